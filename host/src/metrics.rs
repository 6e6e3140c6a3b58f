//! `/metrics`: what there is to count and to measure, as Prometheus reads it. `docs/metrics.md` says what each metric means, and a
//! test keeps it complete.
//!
//! Reconciles and queues have the names that controller-runtime gave them, so that dashboards work; what is ours begins with
//! `pilothouse_`. No label is ever the name of a parent: there is no end to them. A metric is either counted as it happens
//! ([`Handles`]), or, if it can be read at any time, read when somebody asks. A reconciler that ends takes its series along.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use axum::{Router, http::header::CONTENT_TYPE, routing::get};
use jiff::Timestamp;
use kube::Client;
use prometheus_client::{
    collector::Collector,
    encoding::{
        DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeMetric as _, MetricEncoder, NoLabelSet,
        prometheus_text,
    },
    metrics::{MetricType, histogram::Histogram},
    registry::Registry,
};
use tokio::net::TcpListener;

mod handles;
pub(crate) mod process;
mod requests;

pub use self::handles::{Calls, Compilations, Function, Handles, Usage};
use self::requests::{CountRequests, Requests};
use crate::{
    client::ApiServer,
    controller::Controller,
    lease::{self, Term},
    object::Kind,
    queue::{Figures, Wake},
    reconcile::Revisions,
    store::{Size, Store},
};

/// The metrics of a host.
pub struct Metrics {
    reconcilers: Mutex<BTreeMap<String, Weak<Handles>>>,
    requests: Arc<Requests>,
    /// How its plugins came to be machine code.
    pub compilations: Arc<Compilations>,
    term: Term,
}

impl Metrics {
    /// The metrics of a host that leads in that term.
    pub fn new(term: Term) -> Self {
        Self { reconcilers: Mutex::default(), requests: Arc::default(), compilations: Arc::default(), term }
    }

    /// The handles of a reconciler. Its series are there as long as these are.
    pub fn of(&self, reconciler: &str) -> Arc<Handles> {
        let handles = Arc::new(Handles::of(reconciler));
        let mut reconcilers = self.reconcilers.lock().unwrap_or_else(PoisonError::into_inner);
        // Of one that ends, and one of the same name that begins, the latter is shown.
        reconcilers.insert(reconciler.to_owned(), Arc::downgrade(&handles));
        handles
    }

    /// A client whose requests are counted, and sent only while the host leads: one that acts as this user for a reconciler, or that of
    /// the host itself.
    ///
    /// # Errors
    /// If that can be no user's name.
    pub fn client(&self, server: &ApiServer, of: Option<(&str, Arc<Handles>)>) -> Result<Client, kube::Error> {
        self.client_within(&self.term, server, of)
    }

    /// A client for the election, which has to send before the host leads, too.
    ///
    /// # Errors
    /// If the configuration is not good.
    pub fn election_client(&self, server: &ApiServer) -> Result<Client, kube::Error> {
        self.client_within(&Term::endless(), server, None)
    }

    fn client_within(
        &self,
        term: &Term,
        server: &ApiServer,
        of: Option<(&str, Arc<Handles>)>,
    ) -> Result<Client, kube::Error> {
        let (user, of) = of.unzip();
        let count = CountRequests { requests: self.requests.clone(), host: server.authority().into(), of };
        Ok(server.client(user)?.with_layer(&count).with_layer(term).build())
    }

    fn living(&self) -> Vec<Arc<Handles>> {
        let mut reconcilers = self.reconcilers.lock().unwrap_or_else(PoisonError::into_inner);
        reconcilers.retain(|_, handles| handles.strong_count() > 0);
        reconcilers.values().filter_map(Weak::upgrade).collect()
    }
}

/// Serves `/metrics` until the listener fails.
///
/// # Errors
/// If the socket breaks.
pub async fn serve(listener: TcpListener, metrics: Arc<Metrics>) -> Result<(), std::io::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(metrics));
    let registry = Arc::new(registry);
    let scrape = move || {
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = prometheus_text::encode(&mut text, &registry);
        async { ([(CONTENT_TYPE, prometheus_text::CONTENT_TYPE)], text) }
    };
    axum::serve(listener, Router::new().route("/metrics", get(scrape))).await
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// What serves for a reconciler at the moment of a scrape.
struct Serving {
    handles: Arc<Handles>,
    controller: Arc<Controller>,
    queue: Figures,
}

impl Serving {
    fn kinds(&self) -> impl Iterator<Item = (&Kind, &Store)> {
        let context = &self.controller.context;
        let children = context.child_kinds.iter().zip(&context.children);
        std::iter::once((&context.parent_kind, &context.parents)).chain(children)
    }
}

impl Collector for Metrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let living = self.living();
        let serving = |handles: &Arc<Handles>| {
            let controller = handles.serving()?;
            Some(Serving { handles: handles.clone(), queue: controller.queue(), controller })
        };
        let serving: Vec<_> = living.iter().filter_map(serving).collect();
        let mut page = Page(encoder);
        page.reconciles(&living, &serving)?;
        page.queues(&living, &serving)?;
        page.plugins(&living)?;
        page.compilations(&self.compilations)?;
        page.parents_and_stores(&serving)?;
        page.writes(&living)?;
        page.requests(&self.requests)?;
        page.election(&self.term)?;
        page.process()
    }
}

/// The page that is being written.
struct Page<'a>(DescriptorEncoder<'a>);

impl Page<'_> {
    fn reconciles(&mut self, living: &[Arc<Handles>], serving: &[Serving]) -> fmt::Result {
        self.counter("controller_runtime_reconcile", "Reconciles, by what they came to", |samples| {
            for of in living {
                for (result, count) in of.by_result() {
                    samples.counter([("controller", &of.reconciler), ("result", result)], count)?;
                }
            }
            Ok(())
        })?;
        self.counter("controller_runtime_reconcile_errors", "Reconciles that failed", |samples| {
            living.iter().try_for_each(|of| samples.counter([("controller", &of.reconciler)], of.errors()))
        })?;
        self.counter(
            "controller_runtime_terminal_reconcile_errors",
            "Reconciles that failed and are not tried again",
            |samples| {
                living.iter().try_for_each(|of| samples.counter([("controller", &of.reconciler)], of.terminal.get()))
            },
        )?;
        self.counter("controller_runtime_reconcile_panics", "Reconciles that ended by a bug of the host", |samples| {
            living.iter().try_for_each(|of| samples.counter([("controller", &of.reconciler)], of.panics.get()))
        })?;
        self.histogram("controller_runtime_reconcile_time_seconds", "How long reconciles took", |samples| {
            living.iter().try_for_each(|of| samples.histogram([("controller", &of.reconciler)], &of.reconcile_time))
        })?;
        self.gauge("controller_runtime_max_concurrent_reconciles", "Reconciles that may run at once", |samples| {
            serving
                .iter()
                .try_for_each(|it| samples.gauge([("controller", &it.handles.reconciler)], it.controller.workers()))
        })?;
        self.gauge("controller_runtime_active_workers", "Reconciles that run now", |samples| {
            serving
                .iter()
                .try_for_each(|it| samples.gauge([("controller", &it.handles.reconciler)], it.queue.running.len()))
        })
    }

    fn queues(&mut self, living: &[Arc<Handles>], serving: &[Serving]) -> fmt::Result {
        fn labels(reconciler: &str) -> [(&'static str, &str); 2] {
            [("name", reconciler), ("controller", reconciler)]
        }
        self.gauge("workqueue_depth", "Parents that are due and wait for a worker", |samples| {
            for it in serving {
                let [name, controller] = labels(&it.handles.reconciler);
                for (wake, due) in Wake::ALL.iter().zip(it.queue.due) {
                    samples.gauge([name, controller, ("priority", wake.name())], due)?;
                }
            }
            Ok(())
        })?;
        self.counter("workqueue_adds", "How often a parent became due", |samples| {
            serving.iter().try_for_each(|it| samples.counter(labels(&it.handles.reconciler), it.queue.adds))
        })?;
        self.counter("workqueue_retries", "How often a parent was put off after a failure", |samples| {
            serving.iter().try_for_each(|it| samples.counter(labels(&it.handles.reconciler), it.queue.retries))
        })?;
        self.histogram("workqueue_queue_duration_seconds", "How long due parents waited for a worker", |samples| {
            living.iter().try_for_each(|of| samples.histogram(labels(&of.reconciler), &of.queue_time))
        })?;
        self.histogram("workqueue_work_duration_seconds", "How long workers were at work on a parent", |samples| {
            living.iter().try_for_each(|of| samples.histogram(labels(&of.reconciler), &of.work_time))
        })?;
        self.gauge(
            "workqueue_unfinished_work_seconds",
            "How long reconciles that run have run, together",
            |samples| {
                serving.iter().try_for_each(|it| {
                    let together: Duration = it.queue.running.iter().sum();
                    samples.gauge(labels(&it.handles.reconciler), together.as_secs_f64())
                })
            },
        )?;
        self.gauge("workqueue_longest_running_processor_seconds", "How long the oldest of them has run", |samples| {
            serving.iter().try_for_each(|it| {
                let longest = it.queue.running.iter().max().copied().unwrap_or_default();
                samples.gauge(labels(&it.handles.reconciler), longest.as_secs_f64())
            })
        })
    }

    fn plugins(&mut self, living: &[Arc<Handles>]) -> fmt::Result {
        self.counter("pilothouse_plugin_calls", "Calls of the plugin, by what they came to", |samples| {
            for of in living {
                for (function, calls) in of.calls.by_function() {
                    for (outcome, count) in calls.by_outcome() {
                        let labels =
                            [("reconciler", of.reconciler.as_str()), ("function", function), ("outcome", outcome)];
                        samples.counter(labels, count)?;
                    }
                }
            }
            Ok(())
        })?;
        self.counter(
            "pilothouse_capability_calls",
            "Uses of a capability by the plugin, by what they came to",
            |samples| {
                for of in living {
                    for ((capability, outcome), count) in of.calls.uses() {
                        let labels =
                            [("reconciler", of.reconciler.as_str()), ("capability", capability), ("outcome", outcome)];
                        samples.counter(labels, count)?;
                    }
                }
                Ok(())
            },
        )?;
        for (name, help, histogram) in [
            (
                "pilothouse_plugin_instantiate_seconds",
                "How long it took to make the instance for a call",
                (|calls| &calls.instantiate_time) as fn(&handles::OfFunction) -> &Histogram,
            ),
            ("pilothouse_plugin_call_seconds", "How long calls were in the guest", |calls| &calls.call_time),
            ("pilothouse_plugin_memory_bytes", "The most memory that the guest had in a call", |calls| &calls.memory),
        ] {
            self.histogram(name, help, |samples| {
                for of in living {
                    for (function, calls) in of.calls.by_function() {
                        let labels = [("reconciler", of.reconciler.as_str()), ("function", function)];
                        samples.histogram(labels, histogram(calls))?;
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn compilations(&mut self, compilations: &Compilations) -> fmt::Result {
        self.counter(
            "pilothouse_plugin_loads",
            "Plugins that were loaded, by where their machine code came from",
            |samples| {
                compilations.counts().into_iter().try_for_each(|(from, count)| samples.counter([("from", from)], count))
            },
        )
    }

    fn parents_and_stores(&mut self, serving: &[Serving]) -> fmt::Result {
        self.gauge("pilothouse_revision_info", "The revisions that serve", |samples| {
            for it in serving {
                let Revisions { active, candidate } = it.controller.context.revisions();
                for revision in std::iter::once(active).chain(candidate.map(|candidate| candidate.revision)) {
                    let labels = [
                        ("reconciler", it.handles.reconciler.as_str()),
                        ("revision", &revision.id),
                        ("digest", revision.plugin.digest()),
                    ];
                    samples.gauge(labels, 1_u64)?;
                }
            }
            Ok(())
        })?;
        self.gauge("pilothouse_rollout_parents", "Parents of a revision that takes over step by step", |samples| {
            for it in serving {
                let Some(standing) = it.controller.context.standing(Timestamp::now()) else { continue };
                for (state, count) in [
                    ("assigned", standing.parents),
                    ("reconciled", standing.reconciled),
                    ("failing", standing.failing),
                    ("not_ready", standing.not_ready),
                ] {
                    samples.gauge([("reconciler", it.handles.reconciler.as_str()), ("state", state)], count)?;
                }
            }
            Ok(())
        })?;
        self.gauge("pilothouse_parents", "Parents by state, as in the status of the reconciler", |samples| {
            for it in serving {
                let counts = it.controller.context.parent_counts();
                for (state, count) in [
                    ("total", counts.total),
                    ("current", counts.current),
                    ("ready", counts.ready),
                    ("failing", counts.failing),
                ] {
                    samples.gauge([("reconciler", it.handles.reconciler.as_str()), ("state", state)], count)?;
                }
            }
            Ok(())
        })?;
        self.gauge("pilothouse_open_circuits", "Parents whose children wake them but rarely", |samples| {
            serving
                .iter()
                .try_for_each(|it| samples.gauge([("reconciler", &it.handles.reconciler)], it.queue.open_circuits))
        })?;
        self.gauge("pilothouse_watch_age_seconds", "How long ago a watch was last heard of", |samples| {
            for it in serving {
                for (kind, _) in it.kinds() {
                    if let Some(age) = it.handles.watch_age(&kind.resource()) {
                        let labels = [("reconciler", it.handles.reconciler.as_str()), ("kind", &kind.group_kind())];
                        samples.gauge(labels, age.as_secs_f64())?;
                    }
                }
            }
            Ok(())
        })?;
        let (mut sizes, mut watches) = (BTreeMap::<_, Size>::new(), Vec::new());
        for it in serving {
            let reconciler = it.handles.reconciler.as_str();
            for (kind, store) in it.kinds() {
                *sizes.entry((reconciler, kind.group_kind())).or_default() += store.size();
            }
            for (kind, (count, size)) in it.controller.context.related.sizes() {
                watches.push((reconciler, kind.clone(), count));
                *sizes.entry((reconciler, kind)).or_default() += size;
            }
        }
        self.gauge("pilothouse_related_watches", "Watches for the objects that relations select", |samples| {
            watches.iter().try_for_each(|(reconciler, kind, count)| {
                samples.gauge([("reconciler", *reconciler), ("kind", kind.as_str())], *count)
            })
        })?;
        for (name, help, number) in [
            (
                "pilothouse_store_objects",
                "Objects that are kept of a kind",
                (|size| size.objects) as fn(&Size) -> usize,
            ),
            ("pilothouse_store_json_bytes", "The JSON text of these objects", |size| size.json),
            ("pilothouse_store_bytes", "The memory for these objects, JSON and indices included", |size| size.bytes),
        ] {
            self.gauge(name, help, |samples| {
                sizes.iter().try_for_each(|((reconciler, kind), size)| {
                    samples.gauge([("reconciler", *reconciler), ("kind", kind.as_str())], number(size))
                })
            })?;
        }
        Ok(())
    }

    fn writes(&mut self, living: &[Arc<Handles>]) -> fmt::Result {
        self.counter("pilothouse_writes", "Writes that the API server has accepted", |samples| {
            for of in living {
                for ((verb, resource), count) in of.writes() {
                    let labels = [("reconciler", of.reconciler.as_str()), ("verb", verb), ("resource", &resource)];
                    samples.counter(labels, count)?;
                }
            }
            Ok(())
        })
    }

    fn requests(&mut self, requests: &Requests) -> fmt::Result {
        self.counter("rest_client_requests", "Requests to the API server", |samples| {
            for ((code, method, host), count) in requests.counts() {
                // As client-go has it.
                let code = code.map_or_else(|| "<error>".to_owned(), |code| code.to_string());
                samples.counter([("code", code.as_str()), ("method", method.as_str()), ("host", &host)], count)?;
            }
            Ok(())
        })
    }

    fn election(&mut self, term: &Term) -> fmt::Result {
        self.gauge("leader_election_master_status", "Whether this host leads", |samples| {
            samples.gauge([("name", lease::NAME)], u64::from(term.is_on()))
        })
    }

    fn process(&mut self) -> fmt::Result {
        self.gauge("process_resident_memory_bytes", "Resident memory of the host", |samples| {
            process::resident_memory().map_or(Ok(()), |bytes| samples.gauge([], bytes))
        })?;
        self.counter("process_cpu_seconds", "Time of the host on a processor", |samples| {
            process::cpu_seconds().map_or(Ok(()), |seconds| samples.counter([], seconds))
        })
    }

    /// A family of counters; `_total` is added to the name.
    fn counter(&mut self, name: &str, help: &str, write: impl FnOnce(&mut Samples<'_>) -> fmt::Result) -> fmt::Result {
        write(&mut Samples(self.0.encode_descriptor(name, help, None, MetricType::Counter)?))
    }

    fn gauge(&mut self, name: &str, help: &str, write: impl FnOnce(&mut Samples<'_>) -> fmt::Result) -> fmt::Result {
        write(&mut Samples(self.0.encode_descriptor(name, help, None, MetricType::Gauge)?))
    }

    fn histogram(
        &mut self,
        name: &str,
        help: &str,
        write: impl FnOnce(&mut Samples<'_>) -> fmt::Result,
    ) -> fmt::Result {
        write(&mut Samples(self.0.encode_descriptor(name, help, None, MetricType::Histogram)?))
    }
}

/// The samples of one family.
struct Samples<'a>(MetricEncoder<'a>);

impl Samples<'_> {
    fn counter<const N: usize>(&mut self, labels: [(&str, &str); N], value: impl EncodeCounterValue) -> fmt::Result {
        self.0.encode_family(&labels)?.encode_counter::<NoLabelSet, _, f64>(&value, None)
    }

    fn gauge<const N: usize>(&mut self, labels: [(&str, &str); N], value: impl EncodeGaugeValue) -> fmt::Result {
        self.0.encode_family(&labels)?.encode_gauge(&value)
    }

    fn histogram<const N: usize>(&mut self, labels: [(&str, &str); N], histogram: &Histogram) -> fmt::Result {
        histogram.encode(self.0.encode_family(&labels)?)
    }
}
