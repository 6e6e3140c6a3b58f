//! The observe step: the parent and its children as the watches have shown them, without a request.

use std::sync::Arc;

use super::{Context, remote::Record};
use crate::{
    object::Object,
    state::{ChildKey, Observed},
};

/// What there is of this parent.
pub(super) fn observe(context: &Context, parent: Arc<Object>) -> Observed {
    let mut children = Vec::new();
    for (kind, store) in context.children.iter().enumerate() {
        let owned = store.owned_by(parent.uid());
        children.extend(owned.into_iter().map(|child| (ChildKey { kind, object: child.key() }, child)));
    }
    let record = Record::of(&parent);
    Observed { parent, children, record }
}
