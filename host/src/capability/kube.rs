//! The capability `kube`: reads from the API server, as the service account of the reconciler.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use kube::{Api, Client};

use super::access::Outside;
use crate::{
    bindings::v0_1::pilothouse::plugin::{
        kube::{Error, Host},
        types,
    },
    crd::SecretRef,
    lookup,
    object::{Kind, Object},
    plugin::{Selector, describe::KindName},
    selection::{self, Rules, Selection},
    telemetry,
};

/// The name of the capability.
pub(super) const KUBE: &str = "kube";
/// The most objects in an answer.
const MAX_OBJECTS: usize = 1000;
/// How many objects are asked for at once.
const PAGE: u32 = 250;
/// How many kinds are remembered: more than a plugin names that means well.
const KINDS: usize = 100;

/// What reads for the plugins of one reconciler, as its service account.
pub struct Reader {
    client: Client,
    /// The one namespace that the reconciler may see; none: all of them.
    scope: Option<String>,
    /// How the kinds that it was asked for are served.
    kinds: Mutex<HashMap<KindName, Kind>>,
}

impl Host for Outside {
    async fn get(
        &mut self,
        api_version: String,
        kind: String,
        namespace: Option<String>,
        name: String,
    ) -> Result<Option<String>, Error> {
        let kind = KindName { api_version, kind };
        let output = self.output();
        self.read(|reader, secrets| async move {
            let object = reader.get(kind, namespace, name, &secrets).await?;
            match object {
                Some(object) if object.json().len() > output => Err(too_large(output)),
                object => Ok(object.map(|object| object.json().to_owned())),
            }
        })
        .await
    }

    async fn list(&mut self, selector: types::Selector) -> Result<Vec<String>, Error> {
        let output = self.output();
        self.read(|reader, secrets| async move { reader.list(selector.into(), &secrets, output).await }).await
    }
}

impl Outside {
    /// Reads on the host's threads, if that is granted.
    async fn read<T, F>(&mut self, read: impl FnOnce(Arc<Reader>, Arc<[SecretRef]>) -> F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Error>> + Send + 'static,
    {
        let access = self.to_read();
        let granted = access.grants().kube.is_some();
        let answer = match access.reader().filter(|_| granted) {
            Some(reader) => access.on_host(read(reader, access.readable_secrets())).await,
            None if granted => Some(Err(Error::Denied("nothing is read before the plugin serves".to_owned()))),
            None => Some(Err(Error::Denied("the reconciler does not grant it (spec.grants.kube)".to_owned()))),
        };
        let answer = answer.unwrap_or_else(|| Err(Error::Failed("the call ended by a bug in the host".to_owned())));
        let (outcome, refusal) = match &answer {
            Ok(_) => ("ok", None),
            Err(Error::Denied(why)) => ("denied", Some(why.as_str())),
            Err(Error::UnknownKind(_)) => ("unknown-kind", None),
            Err(Error::Failed(_)) => ("failed", None),
            Err(Error::TooLarge(_)) => ("too-large", None),
        };
        access.note(KUBE, outcome, refusal);
        answer
    }
}

impl Reader {
    /// One whose `client` acts as the service account, and that sees this namespace only, if there is one.
    pub fn new(client: Client, scope: Option<String>) -> Self {
        Self { client, scope, kinds: Mutex::default() }
    }

    async fn get(
        &self,
        kind: KindName,
        namespace: Option<String>,
        name: String,
        secrets: &[SecretRef],
    ) -> Result<Option<Object>, Error> {
        let selector = Selector { kind, namespace, names: vec![name], labels: String::new() };
        let mut selections = self.rules(secrets).selections("the request", selector).map_err(denied)?;
        let (Some(selection), true) = (selections.pop(), selections.is_empty()) else {
            return Err(Error::Denied("several Secrets of this name are granted; name the namespace".to_owned()));
        };
        let kind = self.kind(&selection, secrets).await?;
        if kind.namespaced && selection.namespace.is_none() {
            return Err(Error::Failed(format!("{kind} has namespaces; name one")));
        }
        let api: Api<Object> = kind.objects(&self.client, selection.namespace.as_deref());
        let name = selection.name.unwrap_or_default();
        let found = lookup::get(&api, &name).await.map_err(|error| self.refused(&kind, error))?;
        Ok(found.map(|object| object.with_kind(&kind.api)))
    }

    async fn list(&self, selector: Selector, secrets: &[SecretRef], output: usize) -> Result<Vec<String>, Error> {
        let mut found = HashMap::new();
        let mut bytes = 0;
        for selection in self.rules(secrets).selections("the selector", selector).map_err(denied)? {
            let kind = self.kind(&selection, secrets).await?;
            let api: Api<Object> = kind.objects(&self.client, selection.namespace.as_deref());
            let mut params = selection.list_params().limit(PAGE);
            loop {
                let page = api.list(&params).await.map_err(|error| self.refused(&kind, error))?;
                for object in page.items {
                    let object = object.with_kind(&kind.api);
                    bytes += object.json().len();
                    found.insert(object.key(), object);
                }
                if found.len() > MAX_OBJECTS {
                    return Err(Error::TooLarge(format!(
                        "{selection} has more than {MAX_OBJECTS} objects; select fewer, or by relations"
                    )));
                }
                if bytes > output {
                    return Err(too_large(output));
                }
                params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
                if params.continue_token.is_none() {
                    break;
                }
            }
        }
        let mut found: Vec<_> = found.into_iter().collect();
        found.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(found.into_iter().map(|(_, object)| object.json().to_owned()).collect())
    }

    fn rules<'a>(&'a self, secrets: &'a [SecretRef]) -> Rules<'a> {
        Rules { kinds: None, scope: self.scope.as_deref(), secrets: Some(secrets) }
    }

    /// How the kind is served; refused if the selection is of Secrets after all, or cannot be of such a kind.
    async fn kind(&self, selection: &Selection, secrets: &[SecretRef]) -> Result<Kind, Error> {
        let name = &selection.kind;
        let known = self.kinds().get(name).cloned();
        let kind = match known {
            Some(kind) => kind,
            None => {
                let found = lookup::kind(&self.client, name).await;
                let kind = found.map_err(|error| match error.is_absent() {
                    true => Error::UnknownKind(error.to_string()),
                    false => Error::Failed(telemetry::chain(&error)),
                })?;
                let mut kinds = self.kinds();
                if kinds.len() >= KINDS {
                    kinds.clear();
                }
                kinds.insert(name.clone(), kind.clone());
                kind
            }
        };
        let is_granted = |secret: &SecretRef| {
            selection.namespace.as_ref() == Some(&secret.namespace) && selection.name.as_ref() == Some(&secret.name)
        };
        if kind.api.group.is_empty() && kind.api.plural == "secrets" && !secrets.iter().any(is_granted) {
            return Err(Error::Denied(format!("{selection} is not granted (spec.grants.kube.secrets)")));
        }
        match (kind.namespaced, &selection.namespace, &self.scope) {
            (false, _, Some(_)) => {
                Err(Error::Denied(format!("{kind} is of cluster scope, and a Reconciler sees only its own namespace")))
            }
            (false, Some(_), None) => Err(Error::Failed(format!("{kind} has no namespaces; leave it out"))),
            _ => Ok(kind),
        }
    }

    fn kinds(&self) -> std::sync::MutexGuard<'_, HashMap<KindName, Kind>> {
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self, kind: &Kind, error: kube::Error) -> Error {
        match &error {
            kube::Error::Api(status) if status.is_forbidden() => Error::Denied(status.message.clone()),
            kube::Error::Api(status) if status.code == 404 => {
                // It may be served in another way by now, or not at all.
                self.kinds().remove(&kind.name());
                Error::UnknownKind(format!("the API server serves no {kind} any more"))
            }
            _ => Error::Failed(telemetry::chain(&error)),
        }
    }
}

fn denied(error: selection::Error) -> Error {
    match error {
        selection::Error::Refused { path, problem } if path.ends_with(".namespace") => {
            Error::Denied(format!("{path} {problem}"))
        }
        selection::Error::Refused { path, problem } => Error::Failed(format!("{path} {problem}")),
        error @ selection::Error::SecretNotGranted { .. } => Error::Denied(error.to_string()),
    }
}

fn too_large(output: usize) -> Error {
    Error::TooLarge(format!("it has more than {output} bytes (limits.output)"))
}
