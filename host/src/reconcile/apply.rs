//! The apply step: the plan, carried out. With `status` and `finalizer` the only code that writes for a plugin.
//!
//! Independent children are written at the same time, and one that fails stops none of the others; but nothing is deleted
//! unless every write of the pass has succeeded (`C42`).

use std::collections::BTreeSet;

use futures::{StreamExt as _, stream};
use json_patch::{PatchOperation, ReplaceOperation, jsonptr::PointerBuf};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::{
    Api, Resource,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions, PropagationPolicy},
    core::DynamicResourceScope,
    discovery::ApiResource,
};
use serde_json::{Map, Value, json};

use super::{
    Context, coverage::differences, failures::message, heal::heal, jobs, managers, plan, projection::projection_of,
    remote::Record, restored, taken::taken,
};
use crate::{
    identity::{self, RECONCILER_LABEL},
    lookup,
    object::Object,
    state::{
        AdoptionPolicy, Applied, ChildApply, ChildDelete, ChildError, ChildKey, Held, LastApply, Observed, Plan,
        UpdateStrategy, Written,
    },
};

/// Writes under way at once for one parent. The API server takes more; other parents want some, too.
const CONCURRENT_WRITES: usize = 8;
/// How often a change of `managedFields` is tried from fresh when others write at the same time.
const TRIES: usize = 3;

/// Carries out the plan for this parent.
pub(super) async fn apply(context: &Context, plan: Plan, observed: &Observed, manager: &str) -> Applied {
    let running = plan.running.into_iter().map(|key| (key, ChildError::PendingRecreate));
    let mut applied = Applied { failures: running.collect(), ..Applied::default() };
    let mut complete = plan.waiting.is_empty();
    let writes = stream::iter(plan.applies).map(|child| async move {
        let before = context.children[child.key.kind].get(&child.key.object);
        let write = Write { context, api: api(context, &child.key), child: &child, observed, manager };
        let result = write.run().await;
        (child, before, result)
    });
    let mut writes = writes.buffer_unordered(CONCURRENT_WRITES);
    while let Some((child, before, result)) = writes.next().await {
        match result {
            Ok(Outcome::Written(answer)) => {
                let mut written = written(&child, &answer, manager);
                written.taken = before.as_deref().map(|before| taken(before, &answer, manager)).unwrap_or_default();
                // Who no longer writes it has lost nothing.
                written.taken.retain(|(manager, _)| !child.options.adopt_field_managers.contains(manager));
                applied.written.push(written);
                // Whether or not the watch has shown it by now.
                applied.changed |= before.is_none_or(|before| answer.is_newer_than(&before));
                context.children[child.key.kind].apply(*answer);
            }
            Ok(Outcome::Held { uid, running, why }) => {
                complete = false;
                if running {
                    applied.failures.push((child.key.clone(), ChildError::PendingRecreate));
                }
                applied.held.push((child.key, Held { desired: child.digest, uid, running }, why));
            }
            Ok(Outcome::Recreating) => {
                complete = false;
                applied.changed = true;
                applied.deleted.push(child.key);
            }
            Err(error) => applied.failures.push((child.key, error)),
        }
    }
    drop(writes);
    if !complete || !applied.failures.is_empty() {
        applied.waiting_deletes = plan.deletes.len();
        return applied;
    }
    let deletes = stream::iter(plan.deletes).map(|child| async move {
        let result = delete(context, &child).await;
        (child, result)
    });
    let mut deletes = deletes.buffer_unordered(CONCURRENT_WRITES);
    while let Some((child, result)) = deletes.next().await {
        match result {
            Ok(()) => {
                applied.changed = true;
                applied.deleted.push(child.key);
            }
            Err(error) => applied.failures.push((child.key, error)),
        }
    }
    applied
}

/// What to remember and to tell of an answer.
pub(super) fn written(child: &ChildApply, answer: &Object, manager: &str) -> Written {
    let fields = answer.owned_by(manager, "Apply", "").and_then(|fields| serde_json::from_str(fields.get()).ok());
    let (Some(fields), Ok(live)) = (fields, serde_json::from_str::<Value>(answer.json())) else {
        return Written { key: child.key.clone(), last: None, differences: Vec::new(), taken: Vec::new() };
    };
    let last = LastApply {
        desired: child.digest,
        projection: projection_of(&fields, &live),
        resource_version: answer.resource_version().to_owned(),
    };
    let differences = differences(&child.body, &fields, &live).iter().map(ToString::to_string).collect();
    Written { key: child.key.clone(), last: Some(last), differences, taken: Vec::new() }
}

/// How a write ended, if not with an error.
enum Outcome {
    /// The child is as the plugin wants it, as far as the API server lets it.
    Written(Box<Object>),
    /// It stays as it is until somebody deletes it, or if it is running until it has finished.
    Held { uid: String, running: bool, why: String },
    /// It is being deleted, to be made anew.
    Recreating,
}

/// What ties a child from before a restore to its parent again.
enum Restored {
    /// This patch, which puts our owner reference in the place of the former one.
    Owned(json_patch::Patch),
    /// The apply itself, which says whose it is by label and annotation.
    Bound,
}

/// One child being written.
struct Write<'a> {
    context: &'a Context,
    api: Api<Object>,
    child: &'a ChildApply,
    observed: &'a Observed,
    manager: &'a str,
}

impl Write<'_> {
    async fn run(&self) -> Result<Outcome, ChildError> {
        if self.child.fold {
            self.fold().await?;
        }
        let error = match self.apply(&self.child.body).await {
            Ok(answer) => return self.written(answer).await,
            Err(error) if is_too_large(&error) => return Err(ChildError::TooLarge(size(&self.child.body), error)),
            Err(error) => ChildError::from(error),
        };
        match error {
            // Whose the fields are is told before whether there may be such an object at all.
            ChildError::Conflict(conflict) | ChildError::FieldConflict(conflict) if self.child.create => {
                self.take(conflict).await
            }
            ChildError::Conflict(conflict) => {
                // Something is there that is not what the store shows: look.
                read_again(self.context, &self.child.key).await?;
                Err(ChildError::Conflict(conflict))
            }
            ChildError::Invalid(refusal) if !self.child.create => {
                self.refused(refusal, &self.child.body, self.child.changed).await
            }
            error => Err(error),
        }
    }

    fn name(&self) -> &str {
        &self.child.key.object.name
    }

    async fn apply(&self, body: &Map<String, Value>) -> Result<Object, kube::Error> {
        match self.send(body).await {
            Err(error) if is_status(&error, 500) && self.renew().await => self.send(body).await,
            answer => answer,
        }
    }

    async fn send(&self, body: &Map<String, Value>) -> Result<Object, kube::Error> {
        let params = PatchParams { force: !self.child.options.yields, ..PatchParams::apply(self.manager) };
        self.api.patch(self.name(), &params, &Patch::Apply(body)).await
    }

    /// The end of an apply that succeeded: nobody else may be left to own what only we do.
    async fn written(&self, answer: Object) -> Result<Outcome, ChildError> {
        if !managers::has_repeats(&answer, self.manager) {
            return Ok(Outcome::Written(Box::new(answer)));
        }
        let released = self.rewrite_managers(|entries| managers::release(entries, self.manager)).await?;
        Ok(Outcome::Written(Box::new(released.unwrap_or(answer))))
    }

    async fn fold(&self) -> Result<(), ChildError> {
        let api_version = &self.context.child_kinds[self.child.key.kind].api.api_version;
        let legacy = &self.child.options.adopt_field_managers;
        let folded =
            self.rewrite_managers(|entries| managers::fold(entries, self.manager, api_version, legacy)).await?;
        if folded.is_some() {
            tracing::info!("fields of earlier managers of {} are ours now", self.context.describe(&self.child.key));
        }
        Ok(())
    }

    /// Whether the API server failed on the child because of who owns it in a version of its kind that is no longer served, and does so no
    /// longer. Built-in kinds do not suffer from that.
    async fn renew(&self) -> bool {
        let kind = &self.context.child_kinds[self.child.key.kind];
        let Ok(meta) = self.api.get_metadata(self.name()).await else { return false };
        let entries = meta.metadata.managed_fields.unwrap_or_default();
        let versions: BTreeSet<_> = entries.into_iter().filter_map(|entry| entry.api_version).collect();
        let mut dropped = Vec::new();
        for version in versions.into_iter().filter(|version| *version != kind.api.api_version && !kind.is_built_in()) {
            match self.context.client.list_api_group_resources(&version).await {
                Ok(served) if served.resources.iter().any(|served| served.name == kind.api.plural) => {}
                Ok(_) => dropped.push(version),
                Err(error) if is_status(&error, 404) => dropped.push(version),
                Err(_) => return false,
            }
        }
        let renewed = self.rewrite_managers(|entries| managers::renew(entries, &dropped, &kind.api.api_version)).await;
        let renewed = matches!(renewed, Ok(Some(_)));
        if renewed {
            tracing::info!(
                "{} was owned in a version that is no longer served",
                self.context.describe(&self.child.key)
            );
        }
        renewed
    }

    /// Changes `metadata.managedFields` of what is there now, and nothing else. None: there was nothing to change.
    async fn rewrite_managers(
        &self,
        rewrite: impl Fn(&[ManagedFieldsEntry]) -> Option<Vec<ManagedFieldsEntry>>,
    ) -> Result<Option<Object>, ChildError> {
        let mut tries = 0;
        loop {
            let meta = self.api.get_metadata(self.name()).await.map_err(gone_is_conflict)?.metadata;
            let Some(entries) = rewrite(meta.managed_fields.as_deref().unwrap_or_default()) else { return Ok(None) };
            let pointer = |name| PointerBuf::from_tokens(["metadata", name]);
            let replace = |name, value| PatchOperation::Replace(ReplaceOperation { path: pointer(name), value });
            let patch = json_patch::Patch(vec![
                replace("managedFields", json!(entries)),
                // Checked by the API server against what is there: 409 if others have written in between.
                replace("resourceVersion", json!(meta.resource_version)),
            ]);
            tries += 1;
            match self.api.patch(self.name(), &PatchParams::default(), &Patch::<()>::Json(patch)).await {
                Ok(answer) => return Ok(Some(answer)),
                Err(error) if is_status(&error, 409) && tries < TRIES => {}
                Err(error) => return Err(gone_is_conflict(error)),
            }
        }
    }

    /// The child was to be created, and something of its name is there.
    async fn take(&self, conflict: kube::Error) -> Result<Outcome, ChildError> {
        let Some(live) = read_again(self.context, &self.child.key).await? else {
            return Err(ChildError::Conflict(conflict));
        };
        let kind = self.context.child_kinds[self.child.key.kind].group_kind();
        let restored = self.restored(&live, &kind);
        let may_take = match live.parent_uid(&kind) {
            Some(uid) => uid == self.observed.parent.uid() || restored.is_some(),
            // Our own apply made it, and somebody took the owner reference away; or the plugin wants it all the same.
            None => {
                live.owned_by(self.manager, "Apply", "").is_some()
                    || (self.child.options.adoption == AdoptionPolicy::IfUnowned && !live.is_deleting())
            }
        };
        if !may_take {
            return Err(ChildError::NameCollision);
        }
        if live.is_deleting() {
            // Ours, and on its way: once it is gone there is something to create.
            return Err(ChildError::Conflict(conflict));
        }
        if let Some(restored) = restored {
            self.relink(restored).await?;
        }
        if managers::has_legacy(&live, self.manager, &self.child.options.adopt_field_managers) {
            self.fold().await?;
        }
        let mut body = self.child.body.clone();
        if let Some(Value::Object(metadata)) = body.get_mut("metadata") {
            metadata.remove("resourceVersion");
            metadata.insert("uid".to_owned(), live.uid().into());
        }
        match self.apply(&body).await {
            Ok(answer) => self.written(answer).await,
            Err(error) if is_status(&error, 422) => {
                let json: Value = serde_json::from_str(live.json()).unwrap_or_default();
                let changed = plan::applied_for(&json) != Some(identity::applied(&self.child.digest).as_str());
                self.refused(error, &body, changed).await
            }
            Err(error) => Err(error.into()),
        }
    }

    /// How this parent's child from before a restore is tied to it again; none if it is no such child.
    fn restored(&self, live: &Object, kind: &str) -> Option<Restored> {
        let Observed { parent, record, .. } = self.observed;
        let former = live.parent_uid(kind).filter(|uid| *uid != parent.uid())?;
        let by_us = live.labels().get(RECONCILER_LABEL).is_some_and(|label| label == self.context.identity.label());
        if !by_us {
            return None;
        }
        if live.controller_uid().is_some() {
            // The child of a parent that was here a moment ago is garbage, and about to be collected (`C14`).
            let json = serde_json::from_str(live.json()).ok()?;
            let patch = restored::relinked(&json, &self.child.body, parent, &self.context.parent_kind)?;
            return (!self.context.parents.has_seen(former)).then_some(Restored::Owned(patch));
        }
        // What was to outlive its parent is on no record.
        let named = self.child.options.adoption == AdoptionPolicy::IfUnowned
            || record.as_ref().is_some_and(|record| record.is_of(former));
        (named && self.context.parents.key_of(former).is_none()).then_some(Restored::Bound)
    }

    async fn relink(&self, restored: Restored) -> Result<(), ChildError> {
        if let Restored::Owned(patch) = restored {
            let params = PatchParams { field_manager: Some(self.manager.to_owned()), ..PatchParams::default() };
            self.api.patch(self.name(), &params, &Patch::<()>::Json(patch)).await.map_err(guarded)?;
        }
        tracing::info!("{} is from before a restore, and ours again", self.context.describe(&self.child.key));
        Ok(())
    }

    /// The API server refuses to make `body` of what is there: because of `body`, because of what is there, or because of both together.
    async fn refused(
        &self,
        refusal: kube::Error,
        body: &Map<String, Value>,
        changed: bool,
    ) -> Result<Outcome, ChildError> {
        if !is_status(&refusal, 422) {
            return Err(ChildError::Invalid(refusal));
        }
        if changed {
            match self.create_dry(body).await {
                // The object as such is fine, only the step to it is refused.
                Err(error) if is_status(&error, 409) => {}
                Err(error) if is_status(&error, 422) => return Err(ChildError::Invalid(error)),
                Err(_) => return Err(ChildError::Invalid(refusal)),
                Ok(()) => return Err(ChildError::Conflict(refusal)),
            }
        }
        let uid = body.get("metadata").and_then(|metadata| metadata.get("uid")).and_then(Value::as_str);
        let live = read_again(self.context, &self.child.key).await?.filter(|live| Some(live.uid()) == uid);
        let Some(live) = live else { return Err(ChildError::Conflict(refusal)) };
        let json: Value = serde_json::from_str(live.json()).unwrap_or_default();
        let fields = live.owned_by(self.manager, "Apply", "").map(|fields| serde_json::from_str(fields.get()));
        let fields: Value = fields.and_then(Result::ok).unwrap_or_default();
        if let Some(patch) = heal(refused_fields(&refusal), body, &fields, &json)
            && let Some(answer) = self.replace(patch, body).await?
        {
            tracing::info!("{} is brought back by a patch, since no apply can", self.context.describe(&self.child.key));
            return self.written(answer).await;
        }
        if !changed {
            // Nobody took a field of ours: it has been so since our last apply, which the API server took.
            let ours = differences(body, &fields, &json).iter().all(|difference| difference.owned);
            return if ours { Ok(Outcome::Written(Box::new(live))) } else { Err(ChildError::Drifted(refusal)) };
        }
        match self.child.options.update {
            UpdateStrategy::Apply => Err(ChildError::Immutable(refusal)),
            UpdateStrategy::Recreate if jobs::is_running(&live) => {
                Ok(Outcome::Held { uid: live.uid().to_owned(), running: true, why: message(&refusal) })
            }
            UpdateStrategy::OnDelete => {
                Ok(Outcome::Held { uid: live.uid().to_owned(), running: false, why: message(&refusal) })
            }
            UpdateStrategy::Recreate => {
                tracing::info!(
                    "{} is deleted to be made anew: {}",
                    self.context.describe(&self.child.key),
                    message(&refusal)
                );
                let child = ChildDelete { key: self.child.key.clone(), uid: live.uid().to_owned() };
                delete(self.context, &child).await.map(|()| Outcome::Recreating)
            }
        }
    }

    /// Asks whether the API server would take the object if it were not there.
    async fn create_dry(&self, body: &Map<String, Value>) -> Result<(), kube::Error> {
        let mut object = Value::from(body.clone());
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("uid");
            metadata.remove("resourceVersion");
        }
        let object: DynamicObject = serde_json::from_value(object).map_err(kube::Error::SerdeError)?;
        let params = PostParams { dry_run: true, field_manager: Some(self.manager.to_owned()) };
        of_kind::<DynamicObject>(self.context, &self.child.key).create(&params, &object).await.map(drop)
    }

    /// Puts ours in the place of what an apply cannot change, and applies. None: the API server does not take that either.
    async fn replace(&self, patch: json_patch::Patch, body: &Map<String, Value>) -> Result<Option<Object>, ChildError> {
        let params = PatchParams { field_manager: Some(self.manager.to_owned()), ..PatchParams::default() };
        let patched = self.api.patch(self.name(), &params, &Patch::<()>::Json(patch)).await;
        let answer = match patched {
            Ok(_) => self.apply(body).await,
            Err(error) => Err(error),
        };
        match answer {
            Ok(answer) => Ok(Some(answer)),
            Err(error) if is_status(&error, 422) => Ok(None),
            Err(error) => Err(gone_is_conflict(error)),
        }
    }
}

/// The fields whose size is limited as a whole: a ConfigMap is refused for all of it, a Secret for its data.
const HOLDS: [&str; 4] = ["", "[]", "data", "metadata.annotations"];

/// Whether the API server finds an object, or a field of it, too large: 413 for a request or an object, 422 for what a kind may hold.
fn is_too_large(error: &kube::Error) -> bool {
    is_status(error, 413)
        || (is_status(error, 422)
            && causes(error).any(|(reason, field)| reason == "FieldValueTooLong" && HOLDS.contains(&field)))
}

/// What was sent, in bytes.
fn size(body: &Map<String, Value>) -> usize {
    serde_json::to_vec(body).map_or(0, |json| json.len())
}

/// Of an object that was there a moment ago.
fn gone_is_conflict(error: kube::Error) -> ChildError {
    if is_status(&error, 404) { ChildError::Conflict(error) } else { error.into() }
}

/// The same, of a patch with tests: 422 is the word for one that does not hold.
fn guarded(error: kube::Error) -> ChildError {
    if is_status(&error, 422) { ChildError::Conflict(error) } else { gone_is_conflict(error) }
}

/// The fields that the API server names in a refusal.
fn refused_fields(refusal: &kube::Error) -> Vec<&str> {
    causes(refusal).map(|(_, field)| field).collect()
}

/// The causes of an error, as reason and field.
fn causes(error: &kube::Error) -> impl Iterator<Item = (&str, &str)> {
    let details = match error {
        kube::Error::Api(status) => status.details.as_ref(),
        _ => None,
    };
    details.into_iter().flat_map(|details| &details.causes).map(|cause| (cause.reason.as_str(), cause.field.as_str()))
}

async fn delete(context: &Context, child: &ChildDelete) -> Result<(), ChildError> {
    let params = DeleteParams {
        preconditions: Some(Preconditions { uid: Some(child.uid.clone()), resource_version: None }),
        propagation_policy: Some(PropagationPolicy::Background),
        ..DeleteParams::default()
    };
    let result = api(context, &child.key).delete(&child.key.object.name, &params).await;
    match result {
        // Something holds it: it is marked, and its end will come as an event.
        Ok(either::Either::Left(dying)) if dying.is_deleting() => {
            context.children[child.key.kind].apply(dying);
            Ok(())
        }
        Ok(_) => forget(context, child),
        Err(error) if lookup::is_absent(&error, &child.key.object.name) => forget(context, child),
        Err(error) => match ChildError::from(error) {
            // Another object has taken its name: ours is gone.
            ChildError::Conflict(_) => read_again(context, &child.key).await.map(drop),
            error => Err(error),
        },
    }
}

/// Deletes a child, if it still belongs to this parent, as it is or as it was before a restore; whether it is gone.
pub(super) async fn delete_child(
    context: &Context,
    key: &ChildKey,
    parent: &Object,
    record: &Record,
) -> Result<bool, ChildError> {
    let kind = context.child_kinds[key.kind].group_kind();
    let Some(live) = lookup::get(&api(context, key), &key.object.name).await? else { return Ok(true) };
    let is_bound = |uid: &str| uid == parent.uid() || (record.is_of(uid) && context.parents.key_of(uid).is_none());
    if !live.parent_uid(&kind).is_some_and(is_bound) {
        // Somebody has taken it, or made another one of that name.
        return Ok(true);
    }
    if live.is_deleting() {
        return Ok(false);
    }
    delete(context, &ChildDelete { key: key.clone(), uid: live.uid().to_owned() }).await?;
    Ok(lookup::get(&api(context, key), &key.object.name).await?.is_none_or(|left| left.uid() != live.uid()))
}

#[expect(clippy::unnecessary_wraps, reason = "reads as one of the arms above")]
fn forget(context: &Context, child: &ChildDelete) -> Result<(), ChildError> {
    let store = &context.children[child.key.kind];
    if let Some(known) = store.get(&child.key.object).filter(|known| known.uid() == child.uid) {
        store.delete(&known);
    }
    Ok(())
}

/// The child as the API server has it now, laid over the store. An object without our label is shown to nobody else.
async fn read_again(context: &Context, key: &ChildKey) -> Result<Option<Object>, ChildError> {
    let store = &context.children[key.kind];
    let live = lookup::get(&api(context, key), &key.object.name).await?;
    match &live {
        Some(live) if store.get(&key.object).is_some() => drop(store.apply(live.clone())),
        Some(_) => {}
        None => {
            if let Some(known) = store.get(&key.object) {
                store.delete(&known);
            }
        }
    }
    Ok(live)
}

fn api(context: &Context, key: &ChildKey) -> Api<Object> {
    of_kind(context, key)
}

fn of_kind<K: Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>>(
    context: &Context,
    key: &ChildKey,
) -> Api<K> {
    context.child_kinds[key.kind].objects(&context.client, key.object.namespace.as_deref())
}

pub(super) fn is_status(error: &kube::Error, code: u16) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == code)
}

impl From<kube::Error> for ChildError {
    fn from(error: kube::Error) -> Self {
        match &error {
            kube::Error::Api(status) => match status.code {
                409 if causes(&error).any(|(reason, _)| reason == "FieldManagerConflict") => Self::FieldConflict(error),
                409 => Self::Conflict(error),
                403 if causes(&error).any(|(reason, _)| reason == "NamespaceTerminating") => {
                    Self::NamespaceTerminating(error)
                }
                403 => Self::Forbidden(error),
                404 => Self::NotFound(error),
                422 | 400 => Self::Invalid(error),
                500 => Self::Server(error),
                _ => Self::Request(error),
            },
            _ => Self::Request(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c67_what_is_too_large_is_told_from_what_is_wrong() {
        let error = |code: u16, reason: &str, field: &str| {
            let details = json!({"causes": [{"reason": reason, "message": "", "field": field}]});
            let status = json!({"status": "Failure", "message": "", "reason": "", "code": code, "details": details});
            serde_json::from_value(status).map(|status| kube::Error::Api(Box::new(status))).unwrap()
        };
        for (code, reason, field, large) in [
            (413, "", "", true),
            (422, "FieldValueTooLong", "[]", true),
            (422, "FieldValueTooLong", "data", true),
            (422, "FieldValueTooLong", "spec.name", false),
            (422, "FieldValueInvalid", "data", false),
            (409, "FieldValueTooLong", "data", false),
        ] {
            assert_eq!(is_too_large(&error(code, reason, field)), large, "{code} {reason} {field}");
        }
    }
}
