//! The apply step: the plan, carried out. With `status` and `finalizer` the only code that writes for a plugin.
//!
//! Independent children are written at the same time, and one that fails stops none of the others; but nothing is deleted
//! unless every write of the pass has succeeded (`C42`).

use std::sync::Arc;

use futures::{StreamExt as _, stream};
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams, Preconditions, PropagationPolicy},
};

use super::Context;
use crate::{
    object::Object,
    state::{Applied, ChildApply, ChildDelete, ChildError, ChildKey, Plan},
};

/// Writes under way at once for one parent. The API server takes more; other parents want some, too.
const CONCURRENT_WRITES: usize = 8;

/// Carries out the plan for the parent with this UID.
pub(super) async fn apply(context: &Context, plan: Plan, parent_uid: &str, manager: &str) -> Applied {
    let mut applied = Applied::default();
    let writes = stream::iter(plan.applies).map(|child| async move {
        let result = write(context, &child, parent_uid, manager).await;
        (child, result)
    });
    let mut writes = writes.buffer_unordered(CONCURRENT_WRITES);
    while let Some((child, result)) = writes.next().await {
        match result {
            Ok(answer) => {
                let seen = context.children[child.key.kind].apply(answer.clone());
                applied.changed |= seen.is_some();
                applied.written.push((child.key, child.digest, Arc::new(answer)));
            }
            Err(error) => applied.failures.push((child.key, error)),
        }
    }
    drop(writes);
    if !applied.failures.is_empty() {
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

async fn write(context: &Context, child: &ChildApply, parent_uid: &str, manager: &str) -> Result<Object, ChildError> {
    let api = api(context, &child.key);
    let params = PatchParams::apply(manager).force();
    let name = &child.key.object.name;
    let conflict = match api.patch(name, &params, &Patch::Apply(&child.body)).await {
        Ok(answer) => return Ok(answer),
        Err(error) => match ChildError::from(error) {
            ChildError::Conflict(conflict) => conflict,
            error => return Err(error),
        },
    };
    // Something is there that the store does not show, or not what the store shows: look.
    match read_again(context, &child.key).await? {
        Some(live) if child.create => {
            let ours = match live.parent_uid(&context.child_kinds[child.key.kind].group_kind()) {
                Some(uid) => uid == parent_uid,
                // Our own apply made it, and somebody took the owner reference away.
                None => live.owned_by(manager, "Apply", "").is_some(),
            };
            if !ours {
                return Err(ChildError::NameCollision);
            }
            let mut body = child.body.clone();
            if let Some(metadata) = body.get_mut("metadata").and_then(|metadata| metadata.as_object_mut()) {
                metadata.remove("resourceVersion");
                metadata.insert("uid".to_owned(), live.uid().into());
            }
            Ok(api.patch(name, &params, &Patch::Apply(&body)).await?)
        }
        _ => Err(ChildError::Conflict(conflict)),
    }
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
        Err(error) if is_status(&error, 404) => forget(context, child),
        Err(error) => match ChildError::from(error) {
            // Another object has taken its name: ours is gone.
            ChildError::Conflict(_) => read_again(context, &child.key).await.map(drop),
            error => Err(error),
        },
    }
}

/// Deletes a child that has no owner reference, if it is still bound to the parent with this UID; whether it is gone.
pub(super) async fn delete_remote(context: &Context, key: &ChildKey, parent_uid: &str) -> Result<bool, ChildError> {
    let kind = context.child_kinds[key.kind].group_kind();
    let Some(live) = api(context, key).get_opt(&key.object.name).await? else { return Ok(true) };
    if live.parent_uid(&kind) != Some(parent_uid) {
        // Somebody has taken it, or made another one of that name.
        return Ok(true);
    }
    if live.is_deleting() {
        return Ok(false);
    }
    delete(context, &ChildDelete { key: key.clone(), uid: live.uid().to_owned() }).await?;
    Ok(api(context, key).get_opt(&key.object.name).await?.is_none_or(|left| left.uid() != live.uid()))
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
    let live = api(context, key).get_opt(&key.object.name).await?;
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
    let kind = &context.child_kinds[key.kind];
    match &key.object.namespace {
        Some(namespace) => Api::namespaced_with(context.client.clone(), namespace, &kind.api),
        None => Api::all_with(context.client.clone(), &kind.api),
    }
}

pub(super) fn is_status(error: &kube::Error, code: u16) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == code)
}

impl From<kube::Error> for ChildError {
    fn from(error: kube::Error) -> Self {
        match &error {
            kube::Error::Api(status) => match status.code {
                409 => Self::Conflict(error),
                403 => Self::Forbidden(error),
                422 | 400 => Self::Invalid(error),
                _ => Self::Request(error),
            },
            _ => Self::Request(error),
        }
    }
}
