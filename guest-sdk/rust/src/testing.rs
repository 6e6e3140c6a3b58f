//! Tests of a plugin's logic with plain `cargo test`, through the same JSON that the component exchanges with the host.
//!
//! ```no_run
//! # use pilothouse_sdk::{prelude::*, testing::Case};
//! # fn test<MyApp: Plugin>() -> Result<(), Failure> {
//! let answer = Case::parent(json!({
//!     "apiVersion": "mygroup.example.com/v1",
//!     "kind": "MyApp",
//!     "metadata": { "name": "web", "namespace": "default" },
//!     "spec": { "image": "nginx" },
//! }))
//! .reconcile::<MyApp>()?;
//! assert_eq!(answer.child("Deployment", "web")["spec"]["replicas"], 3);
//! # Ok(())
//! # }
//! ```
#![allow(clippy::panic, reason = "called from tests, where a panic is how one fails")]

use std::{rc::Rc, time::Duration};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::fake::{self, Fake};
use crate::raw::{finalizer, reconciler, relations, types};
use crate::{Failure, Finalize, Plugin, Relate, http, kube, sql};

pub use crate::raw::types::{Cleanup, ConditionStatus, EventKind, Next};
pub use crate::sql::fake::SqlAnswer;

/// What a plugin is asked with.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    parent: Value,
    #[serde(default)]
    children: Vec<Value>,
    #[serde(default)]
    related: Vec<Value>,
    #[serde(default = "empty")]
    config: Value,
    #[serde(default = "empty")]
    context: Value,
    #[serde(skip)]
    sql: Option<Fake<sql::fake::Answers>>,
    #[serde(skip)]
    http: Option<Fake<http::Answers>>,
    #[serde(skip)]
    kube: Option<Fake<kube::Answers>>,
}

fn empty() -> Value {
    json!({})
}

/// What a plugin answered.
#[derive(Debug)]
pub struct Answer {
    /// The children, in the plugin's order. After `finalize`: those still wanted, none if they are left alone.
    pub children: Option<Vec<Value>>,
    /// The status; null if the plugin left it alone.
    pub status: Value,
    /// The conditions.
    pub conditions: Vec<types::Condition>,
    /// The events.
    pub events: Vec<types::Event>,
}

impl Case {
    /// A parent without children.
    pub fn parent(parent: Value) -> Self {
        let (children, related) = (Vec::new(), Vec::new());
        let (config, context) = (empty(), empty());
        Self { parent, children, related, config, context, sql: None, http: None, kube: None }
    }

    /// A case in YAML: `parent`, and optionally `children`, `related`, `config` and `context`.
    ///
    /// # Panics
    /// When it is not.
    #[must_use]
    pub fn yaml(text: &str) -> Self {
        serde_saphyr::from_str(text).unwrap_or_else(|err| panic!("the case is not readable: {err}"))
    }

    /// The same with one more child that exists.
    #[must_use]
    pub fn child(mut self, child: Value) -> Self {
        self.children.push(child);
        self
    }

    /// The same with one more object that the plugin's relations select.
    #[must_use]
    pub fn related(mut self, object: Value) -> Self {
        self.related.push(object);
        self
    }

    /// The same with these answers to the reads of [`kube`]. Without them each is denied.
    ///
    /// ```
    /// # use pilothouse_sdk::{kube::Read, prelude::*, testing::Case};
    /// let case = Case::parent(json!({ "metadata": { "name": "web" }, "spec": {} })).kube(|read| match read {
    ///     Read::Get { kind: "Node", name, .. } => Ok(vec![json!({ "metadata": { "name": name } })]),
    ///     _ => Ok(Vec::new()),
    /// });
    /// ```
    #[must_use]
    pub fn kube(mut self, answer: impl Fn(&kube::Read<'_>) -> Result<Vec<Value>, kube::Error> + 'static) -> Self {
        self.kube = Some(Fake(Rc::new(answer)));
        self
    }

    /// The same with this `spec.config` of the reconciler.
    #[must_use]
    pub fn config(mut self, config: Value) -> Self {
        self.config = config;
        self
    }

    /// The same with these keys of the [`Context`](crate::Context).
    #[must_use]
    pub fn context(mut self, context: Value) -> Self {
        self.context = context;
        self
    }

    /// The same with databases that answer like this, by the name of the grant and the statement:
    ///
    /// ```
    /// # use pilothouse_sdk::{json, sql::Value, testing::{Case, SqlAnswer}};
    /// let case = Case::parent(json!({})).sql(|grant, statement| match (grant, statement.text.as_str()) {
    ///     ("db", "SELECT quota FROM teams WHERE name = $1") => {
    ///         Ok(SqlAnswer::Rows(vec!["quota".into()], vec![vec![Value::Int(5)]]))
    ///     }
    ///     _ => Ok(SqlAnswer::Affected(1)),
    /// });
    /// ```
    #[must_use]
    pub fn sql(mut self, answers: impl Fn(&str, &sql::Statement) -> Result<SqlAnswer, sql::Reason> + 'static) -> Self {
        self.sql = Some(Fake(Rc::new(answers)));
        self
    }

    /// The same with somebody who answers requests by [`http`] and [`s3`](crate::s3). Without, each is denied.
    ///
    /// ```no_run
    /// # use pilothouse_sdk::{http::Response, prelude::*, testing::Case};
    /// # fn test<MyApp: Plugin>(case: Case) -> Result<(), Failure> {
    /// let case = case.http(|request| match (request.method.as_str(), request.target.as_str()) {
    ///     ("GET", "/v1/teams/7") => Ok(Response::new(200).with_body(r#"{"name": "a"}"#)),
    ///     _ => Ok(Response::new(404)),
    /// });
    /// case.reconcile::<MyApp>()?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn http(mut self, answer: impl Fn(&http::Request) -> Result<http::Response, http::Error> + 'static) -> Self {
        self.http = Some(Fake(Rc::new(answer)));
        self
    }

    /// Asks which other objects it needs to see.
    ///
    /// # Errors
    /// What the plugin answered.
    ///
    /// # Panics
    /// When it selects a kind that [`Plugin::describe`] does not list: the host would refuse it.
    pub fn relate<P: Relate>(&self) -> Result<Vec<types::Selector>, Failure> {
        let relate = |request| <P as relations::Guest>::relate(types::Request { related: Vec::new(), ..request });
        let selectors = self.with_fakes(relate).map_err(failure)?;
        let describe = value(&P::describe().to_json());
        for selector in &selectors {
            let kind = json!({ "apiVersion": selector.api_version, "kind": selector.kind });
            let declared = describe["related"].as_array().is_some_and(|all| all.contains(&kind));
            assert!(declared, "describe() does not list the kind of this selector: {kind}");
        }
        Ok(selectors)
    }

    /// Asks for the children.
    ///
    /// # Errors
    /// What the plugin answered.
    ///
    /// # Panics
    /// When it returned a child of a kind that [`Plugin::describe`] does not list: the host would refuse it.
    pub fn reconcile<P: Plugin>(&self) -> Result<Answer, Failure> {
        let desired = self.with_fakes(<P as reconciler::Guest>::reconcile).map_err(failure)?;
        Ok(Answer::new::<P>(Some(desired.children), desired.status, desired.conditions, desired.events))
    }

    /// Asks for cleanup.
    ///
    /// # Errors
    /// What the plugin answered.
    ///
    /// # Panics
    /// As [`reconcile`](Self::reconcile).
    pub fn finalize<P: Finalize>(&self) -> Result<(Cleanup, Answer), Failure> {
        let answer = self.with_fakes(<P as finalizer::Guest>::finalize).map_err(failure)?;
        Ok((answer.cleanup, Answer::new::<P>(answer.children, answer.status, answer.conditions, answer.events)))
    }

    fn with_fakes<T>(&self, ask: impl FnOnce(types::Request) -> T) -> T {
        let ask = || fake::during(&kube::FAKE, self.kube.as_ref(), || ask(self.request()));
        let ask = || fake::during(&sql::fake::FAKE, self.sql.as_ref(), ask);
        fake::during(&http::FAKE, self.http.as_ref(), ask)
    }

    fn request(&self) -> types::Request {
        types::Request {
            parent: self.parent.to_string(),
            children: self.children.iter().map(Value::to_string).collect(),
            related: self.related.iter().map(Value::to_string).collect(),
            config: self.config.to_string(),
            context: self.context.to_string(),
        }
    }
}

impl Answer {
    fn new<P: Plugin>(
        children: Option<Vec<types::Child>>,
        status: Option<String>,
        conditions: Vec<types::Condition>,
        events: Vec<types::Event>,
    ) -> Self {
        let describe = value(&P::describe().to_json());
        let children = children.map(|all| all.iter().map(|child| value(&child.object)).collect::<Vec<_>>());
        for child in children.iter().flatten() {
            let kind = json!({ "apiVersion": child["apiVersion"], "kind": child["kind"] });
            let declared = describe["children"].as_array().is_some_and(|all| all.contains(&kind));
            assert!(declared, "describe() does not list the kind of this child: {kind}");
        }
        Self { children, status: status.map_or(Value::Null, |status| value(&status)), conditions, events }
    }

    /// The child with this kind and name; null if there is none.
    #[must_use]
    pub fn child(&self, kind: &str, name: &str) -> &Value {
        let mut children = self.children.iter().flatten();
        children.find(|child| child["kind"] == kind && child["metadata"]["name"] == name).unwrap_or(&Value::Null)
    }

    /// The condition of this type.
    #[must_use]
    pub fn condition(&self, kind: &str) -> Option<&types::Condition> {
        self.conditions.iter().find(|condition| condition.kind == kind)
    }
}

/// Does some work while somebody answers its requests by [`http`] and [`s3`](crate::s3): for tests of parts of a plugin.
pub fn with_http<T>(
    answer: impl Fn(&http::Request) -> Result<http::Response, http::Error> + 'static,
    work: impl FnOnce() -> T,
) -> T {
    fake::during(&http::FAKE, Some(&Fake(Rc::new(answer))), work)
}

fn value(json: &str) -> Value {
    serde_json::from_str(json).unwrap_or_else(|err| panic!("the plugin answered with what is no JSON: {err}: {json}"))
}

/// The author's view of a failure. (As an error it would become `Retry` with its debug text.)
fn failure(failure: types::Failure) -> Failure {
    match failure {
        types::Failure::Retry(message) => Failure::Retry(message),
        types::Failure::RetryAfter((delay, message)) => {
            Failure::RetryAfter(Duration::from_millis(delay.into()), message)
        }
        types::Failure::Terminal(message) => Failure::Terminal(message),
    }
}
