//! How a revision takes over from the one that serves: looked at first, by its steps, and back again if it does harm.
//!
//! What is decided is in [`crate::rollout`], and what a revision would change in [`crate::reconcile::preview`]. How far it has come is in the
//! status of the reconciler before a parent moves, so a host that starts in the midst goes on there. What has been rolled back, or was never
//! let in, is not tried again before the spec or the plugin changes, or somebody says so.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tokio::sync::OwnedSemaphorePermit;
use tracing::{Instrument as _, info_span};

use super::{Error, LISTING, Reconciler};
use crate::{
    allocator,
    controller::Controller,
    crd::{Preview, ReconcilerStatus, RolloutState, RolloutStatus, Strategy},
    identity::ALLOW_ROLLOUT_ANNOTATION,
    object::Kind,
    queue::Wake,
    reconcile::{
        Candidate, Revisions,
        preview::{Exceeded, Question, Summary},
    },
    revision::{Material, Revision},
    rollout::{self, Decision, Progress, Standing, Start, WITHDRAWN, Wait},
    supervisor::Supervisor,
    telemetry,
};

/// How many parents a preview looks at: enough to see a share of one in a hundred, and few enough to take seconds.
const LOOKED_AT: usize = 500;
/// How many of them are asked about twice.
const ASKED_TWICE: usize = 20;
/// How long a preview may take.
const PREVIEW: Duration = Duration::from_mins(1);
/// How long one question of it lets reconciles go first, and how often it looks whether there are any.
const GIVES_WAY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(10));

/// What a preview has shown, and for which revision and generation of the spec.
pub(super) struct Previewed {
    revision: Arc<Revision>,
    generation: Option<i64>,
    summary: Summary,
}

/// Why it was told that the answers of a plugin are the same or not: a condition.
pub(super) type Determinism = (&'static str, &'static str, String);

impl Reconciler {
    /// Lets the revision that the spec asks for take over, as the spec says.
    pub(super) async fn take_over(&mut self, material: Material) -> Result<(), Error> {
        let id = material.id();
        let good = self.good();
        let spec = &self.declared.terms.rollout;
        let generation = self.declared.metadata.generation;
        let start = rollout::start(&id, good.as_deref(), self.rollout.as_ref(), spec, generation, self.is_allowed(&id));
        match start {
            Start::Refused => Err(self.refusal()),
            Start::Directly if self.serves_alone(&id) => {
                self.note_withdrawn(&id).await;
                Ok(())
            }
            Start::Directly => self.serve_alone(&material, None).await,
            Start::Resume => self.resume(&material).await,
            Start::Beside => self.take_over_from(material, &good.unwrap_or_default()).await,
        }
    }

    /// The revision that serves, or did before this host started.
    fn good(&self) -> Option<String> {
        let serves = self.serving.as_ref().map(|serving| serving.controller.context.revisions().active.id.clone());
        serves.or_else(|| self.declared.status.as_ref()?.last_good_revision.clone())
    }

    fn is_allowed(&self, revision: &str) -> bool {
        self.declared.allowed_rollout() == Some(revision)
    }

    fn refusal(&self) -> Error {
        let Some(rollout) = &self.rollout else { return Error::Guarded(String::new()) };
        match rollout.state {
            RolloutState::Refused => Error::Guarded(rollout.message.clone()),
            _ => Error::RolledBack(rollout.message.clone()),
        }
    }

    /// Lets the revision have all parents.
    async fn serve_alone(&mut self, material: &Material, preview: Option<&Summary>) -> Result<(), Error> {
        let (id, good) = (material.id(), self.good());
        let active = self.loaded(material).await?;
        self.install(Revisions::only(active)).await?;
        // Before anything else: who is interrupted from here on has served.
        let message = good.filter(|good| *good != id).map(|good| self.complete_at_once(&id, good, preview));
        tracing::info!(revision = id, "the revision serves");
        match message {
            Some(message) => self.tell("RolloutComplete", &message).await,
            None => self.note_withdrawn(&id).await,
        }
        self.keep(material, None).await;
        allocator::give_back();
        Ok(())
    }

    fn complete_at_once(&mut self, id: &str, good: String, preview: Option<&Summary>) -> String {
        let is_back = self.rollout.as_ref().is_some_and(|rollout| rollout.from.as_deref() == Some(id));
        let message = format!("all parents are on revision {id}; before it was {good}");
        let now = now();
        self.rollout = Some(RolloutStatus {
            revision: id.to_owned(),
            // What has been left is no way back.
            from: (!is_back).then_some(good),
            state: RolloutState::Complete,
            reason: "Complete".to_owned(),
            message: message.clone(),
            step: None,
            percent: 100,
            started: now.clone(),
            since: now,
            generation: self.declared.metadata.generation,
            preview: preview.map(ToString::to_string),
        });
        self.previewed = None;
        let told = self.declared.status.iter().flat_map(|status| &status.conditions);
        if preview.is_none() && told.into_iter().any(|condition| condition.type_ == "Deterministic") {
            self.determinism = Some(("Unknown", "NotPreviewed", String::new()));
        }
        message
    }

    fn serves_alone(&self, id: &str) -> bool {
        let binding = self.binding().ok();
        self.serving.as_ref().is_some_and(|serving| {
            let revisions = serving.controller.context.revisions();
            revisions.candidate.is_none() && revisions.active.id == id && Some(&serving.binding) == binding.as_ref()
        })
    }

    /// A revision that is loaded already.
    fn live(&self, id: &str) -> Option<Arc<Revision>> {
        let revisions = self.serving.as_ref()?.controller.context.revisions();
        let candidate = revisions.candidate.map(|candidate| candidate.revision);
        let previewed = self.previewed.as_ref().map(|previewed| previewed.revision.clone());
        [Some(revisions.active), candidate, previewed].into_iter().flatten().find(|revision| revision.id == id)
    }

    async fn loaded(&self, material: &Material) -> Result<Arc<Revision>, Error> {
        if let Some(revision) = self.live(&material.id()) {
            return Ok(revision);
        }
        let limits = self.settings().limits.of_a_call();
        let Supervisor { engine, .. } = &self.supervisor;
        Ok(material.load(engine, self.declared.scope(), limits, self.access.clone()).await?.into())
    }

    /// The spec asks again for the revision that serves: the one that was to take over is forgotten, and may be tried again.
    async fn note_withdrawn(&mut self, id: &str) {
        let is_of_another = |rollout: &&mut RolloutStatus| {
            rollout.revision != *id && rollout.state != RolloutState::Complete && rollout.reason != WITHDRAWN
        };
        let Some(rollout) = self.rollout.as_mut().filter(is_of_another) else { return };
        rollout.state = RolloutState::RolledBack;
        rollout.reason = WITHDRAWN.to_owned();
        rollout.message = format!("revision {} is no longer asked for; {id} serves", rollout.revision);
        rollout.percent = 0;
        rollout.since = now();
        let message = rollout.message.clone();
        self.tell(WITHDRAWN, &message).await;
    }

    /// Goes on where a host has ended.
    async fn resume(&mut self, material: &Material) -> Result<(), Error> {
        let Some(rollout) = self.rollout.clone() else { return self.serve_alone(material, None).await };
        let binding = self.binding()?;
        if let Some(serving) = &self.serving
            && serving.controller.context.revisions().has(&rollout.revision)
            && serving.binding == binding
        {
            return Ok(());
        }
        let from = rollout.from.as_deref().unwrap_or_default();
        let active = match self.live(from) {
            Some(active) => active,
            None => match self.kept(from).await? {
                Some(kept) => self.loaded(&kept).await?,
                None => {
                    tracing::warn!(
                        revision = from,
                        "the revision that it takes over from is not kept; all parents go over"
                    );
                    return self.serve_alone(material, None).await;
                }
            },
        };
        let revision = self.loaded(material).await?;
        let candidate = Candidate { revision, percent: rollout.percent, started: rollout.started.0 };
        self.install(Revisions { active, candidate: Some(candidate) }).await?;
        tracing::info!(revision = rollout.revision, percent = rollout.percent, "the rollout goes on");
        Ok(())
    }

    /// Lets the last good revision serve, and beside it the one that was taking over when the host ended. Without the source of the plugin.
    pub(super) async fn fall_back(&mut self) {
        let good = self.declared.status.as_ref().and_then(|status| status.last_good_revision.clone());
        let Some(good) = good.filter(|good| self.desired.as_ref() != Some(good)) else { return };
        match self.serve_kept(&good).await {
            Ok(true) => tracing::info!(revision = good, "the last good revision serves"),
            Ok(false) => tracing::warn!(revision = good, "the last good revision is not kept"),
            Err(error) => tracing::warn!(
                revision = good,
                "the last good revision does not serve either: {}",
                telemetry::chain(&error)
            ),
        }
    }

    /// The last good revision, from what is kept of it.
    pub(super) async fn last_good(&self) -> Result<Option<Arc<Revision>>, Error> {
        let Some(good) = self.good() else { return Ok(None) };
        match self.kept(&good).await? {
            Some(kept) => self.loaded(&kept).await.map(Some),
            None => Ok(None),
        }
    }

    /// Whether it is kept.
    async fn serve_kept(&mut self, good: &str) -> Result<bool, Error> {
        let goes_on = |rollout: &&RolloutStatus| {
            matches!(rollout.state, RolloutState::Progressing | RolloutState::Paused)
                && rollout.from.as_deref() == Some(good)
                && self.desired.as_ref().is_none_or(|desired| *desired == rollout.revision)
        };
        if let Some(rollout) = self.rollout.as_ref().filter(goes_on)
            && let Some(candidate) = self.kept(&rollout.revision).await?
        {
            match self.resume(&candidate).await {
                Ok(()) => return Ok(true),
                Err(error) => tracing::warn!("the rollout does not go on: {}", telemetry::chain(&error)),
            }
        }
        let Some(kept) = self.kept(good).await? else { return Ok(false) };
        let active = self.loaded(&kept).await?;
        self.install(Revisions::only(active)).await?;
        Ok(true)
    }

    /// Takes over from `good`, beside which it comes up.
    async fn take_over_from(&mut self, material: Material, good: &str) -> Result<(), Error> {
        if self.serving.is_none() {
            self.fall_back().await;
        }
        let Some(serving) = &self.serving else { return self.serve_alone(&material, None).await };
        let revisions = serving.controller.context.revisions();
        let active = revisions.active.clone();
        if serving.binding != self.binding()? {
            // That is no matter of the revision, and holds whatever becomes of it.
            self.install(revisions).await?;
        }
        let revision = self.loaded(&material).await?;
        let rollout = self.declared.terms.rollout.clone();
        let preview = match rollout.preview {
            Preview::On => self.preview(&revision).await?,
            Preview::Off => None,
        };
        if let Some(preview) = &preview
            && let Some(exceeded) = preview.exceeds(&rollout.guards)
            && !self.is_allowed(&revision.id)
        {
            return Err(self.refuse(&revision.id, good, preview, &exceeded).await);
        }
        match rollout.strategy {
            Strategy::Immediate => self.serve_alone(&material, preview.as_ref()).await,
            Strategy::Staged => self.begin(&material, active, revision, preview.as_ref()).await,
        }
    }

    /// The first step.
    async fn begin(
        &mut self,
        material: &Material,
        active: Arc<Revision>,
        revision: Arc<Revision>,
        preview: Option<&Summary>,
    ) -> Result<(), Error> {
        let percent = rollout::first(&self.declared.terms.rollout);
        let started = now();
        let (id, from) = (revision.id.clone(), active.id.clone());
        self.keep(material, Some(&from)).await;
        let before = self.rollout.replace(RolloutStatus {
            revision: id.clone(),
            from: Some(from),
            state: RolloutState::Progressing,
            reason: "Progressing".to_owned(),
            message: format!("revision {id} gets {percent}% of the parents"),
            step: Some(1),
            percent,
            started: started.clone(),
            since: started.clone(),
            generation: self.declared.metadata.generation,
            preview: preview.map(ToString::to_string),
        });
        let candidate = Candidate { revision, percent, started: started.0 };
        if let Err(error) = self.install(Revisions { active, candidate: Some(candidate) }).await {
            self.rollout = before;
            return Err(error);
        }
        self.previewed = None;
        self.tell_step().await;
        Ok(())
    }

    async fn tell_step(&self) {
        let Some(rollout) = &self.rollout else { return };
        let (step, steps) = rollout::step_of(&self.declared.terms.rollout, rollout.percent);
        let message =
            format!("revision {} gets {}% of the parents, step {step} of {steps}", rollout.revision, rollout.percent);
        self.tell("RolloutStep", &message).await;
    }

    /// It does not take over.
    async fn refuse(&mut self, id: &str, good: &str, preview: &Summary, exceeded: &Exceeded) -> Error {
        let message = format!(
            "revision {id} is not let in: {exceeded} ({preview}); mend the plugin, or let it in with annotation \
             {ALLOW_ROLLOUT_ANNOTATION}={id} on this reconciler"
        );
        let now = now();
        self.rollout = Some(RolloutStatus {
            revision: id.to_owned(),
            from: Some(good.to_owned()),
            state: RolloutState::Refused,
            reason: "RolloutGuarded".to_owned(),
            message: message.clone(),
            step: None,
            percent: 0,
            started: now.clone(),
            since: now,
            generation: self.declared.metadata.generation,
            preview: Some(preview.to_string()),
        });
        // One that was taking over is no longer asked for.
        self.share(|revisions| revisions.candidate = None);
        self.warn("RolloutGuarded", &message).await;
        Error::Guarded(message)
    }

    /// What the new revision would change; none if that cannot be seen.
    async fn preview(&mut self, new: &Arc<Revision>) -> Result<Option<Summary>, Error> {
        let generation = self.declared.metadata.generation;
        let is_known = |known: &&Previewed| known.revision.id == new.id && known.generation == generation;
        if let Some(known) = self.previewed.as_ref().filter(is_known) {
            return Ok(Some(known.summary.clone()));
        }
        let Some(serving) = &self.serving else { return Ok(None) };
        let controller = serving.controller.clone();
        let mut watching = controller.watching();
        let seen = tokio::time::timeout(LISTING, async {
            watching.wait_for(|watching| watching.synced || !watching.failing.is_empty()).await.map(|it| it.synced)
        });
        if !matches!(seen.await, Ok(Ok(true))) {
            tracing::warn!(revision = new.id, "no preview, since the revision that serves does not see its parents");
            return Ok(None);
        }
        let client = self.impersonate(&self.declared.account.user())?;
        let (_, mut kinds) = self.resolve(&client, &self.known_kinds(), &[new]).await?;
        let known = controller.context.child_kinds.iter().filter(|kind| !kinds.contains(kind)).cloned();
        kinds.extend(known.collect::<Vec<_>>());
        let (summary, unstable) = self.look(&controller, new, &kinds).await;
        self.determinism = Some(match unstable {
            None => ("True", "SameAnswer", String::new()),
            Some(path) => (
                "False",
                "AnswersDiffer",
                format!(
                    "revision {} answers the same request in two ways, at {path}; let it give the same answer",
                    new.id
                ),
            ),
        });
        let message = format!("revision {}: {summary}", new.id);
        self.tell("Previewed", &message).await;
        self.previewed = Some(Previewed { revision: new.clone(), generation, summary: summary.clone() });
        Ok(Some(summary))
    }

    /// Asks both revisions about the parents that would go over first. With the path at which an answer was not the same the second time.
    async fn look(&self, controller: &Controller, new: &Arc<Revision>, kinds: &[Kind]) -> (Summary, Option<String>) {
        let context = &controller.context;
        let mut parents = context.parents.all();
        parents.retain(|parent| !parent.is_deleting() && !context.is_others(parent));
        parents.sort_by_cached_key(|parent| rollout::place(parent.uid()));
        let revisions = context.revisions();
        let mut summary = Summary::of(parents.len());
        let mut unstable = None;
        let end = tokio::time::Instant::now() + PREVIEW;
        for (at, parent) in parents.into_iter().take(LOOKED_AT).enumerate() {
            let old = revisions.of(parent.uid(), Some(&parent));
            let key = parent.key();
            let span = info_span!("preview", reconciler = %context.key, parent = %key, revision = new.id);
            let asked = async {
                let _slot = self.give_way(controller).await;
                let question = Question::about(context, kinds, parent.clone());
                let (before, now) = (question.ask(old).await, question.ask(new).await);
                if let (Ok(now), true) = (&now, at < ASKED_TWICE && unstable.is_none())
                    && let Ok(again) = question.ask(new).await
                {
                    unstable = question.difference(now, &again);
                }
                question.compare(&before, &now)
            };
            match tokio::time::timeout_at(end, asked.instrument(span)).await {
                Ok(outcome) => summary.add(&key, outcome),
                Err(_) => break,
            }
        }
        (summary, unstable)
    }

    /// Waits for a while that no parent waits for a reconcile; then takes the place of one among all of this host.
    async fn give_way(&self, controller: &Controller) -> Option<OwnedSemaphorePermit> {
        let begun = Instant::now();
        let (longest, pause) = GIVES_WAY;
        let waits = || {
            let due = controller.queue().due;
            // For those that are only looked at nobody waits.
            Wake::ALL.iter().any(|wake| *wake < Wake::Resync && due[*wake as usize] > 0)
        };
        while waits() && begun.elapsed() < longest {
            tokio::time::sleep(pause).await;
        }
        self.supervisor.slots.clone().acquire_owned().await.ok()
    }

    /// Whether parents go over step by step.
    pub(super) fn is_rolling(&self) -> bool {
        let candidate = |serving: &super::Serving| serving.controller.context.revisions().candidate.is_some();
        self.serving.as_ref().is_some_and(candidate)
            && self
                .rollout
                .as_ref()
                .is_some_and(|rollout| matches!(rollout.state, RolloutState::Progressing | RolloutState::Paused))
    }

    fn decide(&self) -> Option<(Standing, Decision)> {
        let rollout = self.rollout.as_ref()?;
        let now = Timestamp::now();
        let standing = self.serving.as_ref()?.controller.context.standing(now)?;
        let progress = Progress {
            percent: rollout.percent,
            since: rollout.since.0,
            allowed: self.is_allowed(&rollout.revision),
            paused: self.declared.terms.paused,
        };
        Some((standing, rollout::next(&self.declared.terms.rollout, progress, &standing, now)))
    }

    /// Looks whether the rollout can go on, and does what is next; whether something was done.
    pub(super) async fn advance(&mut self) -> bool {
        // Of a revision that is no longer asked for nothing more goes over. (If it is not known what is asked for, it goes on.)
        let asked_for =
            |rollout: &RolloutStatus| self.desired.as_ref().is_none_or(|desired| *desired == rollout.revision);
        if !self.rollout.as_ref().is_some_and(asked_for) {
            return false;
        }
        let (Some((standing, decision)), Some(rollout)) = (self.decide(), self.rollout.clone()) else { return false };
        match decision {
            Decision::Wait(wait) => self.waits_for.replace(wait) != Some(wait),
            Decision::Step(percent) => self.take_step(rollout, percent).await,
            Decision::Complete => {
                self.complete(rollout, &standing).await;
                true
            }
            Decision::RollBack(why) => {
                self.roll_back(rollout, &why).await;
                true
            }
        }
    }

    async fn take_step(&mut self, rollout: RolloutStatus, percent: u8) -> bool {
        let (step, _) = rollout::step_of(&self.declared.terms.rollout, percent);
        let rollout = RolloutStatus { percent, step: u32::try_from(step).ok(), since: now(), ..rollout };
        // Before a parent moves: a host that starts must not take it back.
        let status =
            ReconcilerStatus { rollout: Some(rollout.clone()), ..self.declared.status.clone().unwrap_or_default() };
        if let Err(error) = self.write(status).await {
            tracing::warn!("the rollout waits, since its next step cannot be noted: {}", telemetry::chain(&error));
            return false;
        }
        self.rollout = Some(rollout);
        self.share(|revisions| {
            if let Some(candidate) = &mut revisions.candidate {
                candidate.percent = percent;
            }
        });
        self.tell_step().await;
        true
    }

    /// Changes which revisions serve, all kinds of which are watched; the parents that have another one now are looked at.
    fn share(&self, change: impl FnOnce(&mut Revisions)) {
        let Some(serving) = &self.serving else { return };
        let context = &serving.controller.context;
        let before = context.revisions();
        let mut revisions = before.clone();
        change(&mut revisions);
        context.serve(revisions);
        serving.controller.resync_moved(&before);
    }

    async fn complete(&mut self, rollout: RolloutStatus, standing: &Standing) {
        self.share(|revisions| {
            if let Some(candidate) = revisions.candidate.take() {
                revisions.active = candidate.revision;
            }
        });
        tracing::info!(revision = rollout.revision, "the revision serves");
        let message = format!(
            "all {} parents are on revision {}; before it was {}",
            standing.all,
            rollout.revision,
            rollout.from.as_deref().unwrap_or_default()
        );
        self.tell("RolloutComplete", &message).await;
        let (state, reason) = (RolloutState::Complete, "Complete".to_owned());
        self.rollout =
            Some(RolloutStatus { state, reason, message, step: None, percent: 100, since: now(), ..rollout });
    }

    async fn roll_back(&mut self, rollout: RolloutStatus, why: &str) {
        self.share(|revisions| revisions.candidate = None);
        let (step, steps) = rollout::step_of(&self.declared.terms.rollout, rollout.percent);
        let id = &rollout.revision;
        let message = format!(
            "revision {id} was rolled back at step {step} of {steps}: {why}; mend the plugin, or try it again with annotation \
             {ALLOW_ROLLOUT_ANNOTATION}={id} on this reconciler"
        );
        self.warn("RolledBack", &message).await;
        self.problem = Some(Error::RolledBack(message.clone()));
        let (state, reason) = (RolloutState::RolledBack, "RolledBack".to_owned());
        let generation = self.declared.metadata.generation;
        self.rollout = Some(RolloutStatus { state, reason, message, percent: 0, since: now(), generation, ..rollout });
    }

    /// The rollout as it is to be told now.
    pub(super) fn told_rollout(&self) -> Option<RolloutStatus> {
        let rollout = self.rollout.clone()?;
        let Some((standing, Decision::Wait(wait))) = self.decide().filter(|_| self.is_rolling()) else {
            return Some(rollout);
        };
        let state = if wait == Wait::Paused { RolloutState::Paused } else { RolloutState::Progressing };
        let message = rollout::describe(&self.declared.terms.rollout, &rollout, &standing, wait);
        Some(RolloutStatus { state, message, ..rollout })
    }

    async fn tell(&self, reason: &str, message: &str) {
        tracing::info!(reason, "{message}");
        self.supervisor.events.publish_of_reconciler(&self.declared, false, reason, message).await;
    }

    async fn warn(&self, reason: &str, message: &str) {
        tracing::warn!(reason, "{message}");
        self.supervisor.events.publish_of_reconciler(&self.declared, true, reason, message).await;
    }
}

/// The time in seconds, as the conditions of parents have it.
fn now() -> Time {
    let now = Timestamp::now();
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}
