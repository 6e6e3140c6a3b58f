//! The contract as it is: the types and traits generated from `wit/`, without the comforts of the rest of this crate.
//!
//! A plugin that needs full control (or that misbehaves on purpose, to test the host) implements [`reconciler::Guest`] itself;
//! [`export_plugin!`](crate::export_plugin) exports that as well. Everyone else implements [`Plugin`](crate::Plugin).
//!
//! There is one module per export world, so that a component exports the parts that it has and no others.

pub use finalizing::exports::pilothouse::plugin::finalizer;
pub use plugin::exports::pilothouse::plugin::reconciler;
pub use plugin::pilothouse::plugin::{log, types};
pub use relating::exports::pilothouse::plugin::relations;
pub use with_http::pilothouse::plugin::http;
pub use with_kube::pilothouse::plugin::kube;
pub use with_sql::pilothouse::plugin::sql;

macro_rules! world {
    ($module:ident, { $($options:tt)* }) => {
        #[allow(
            unsafe_code,
            missing_docs,
            unreachable_pub,
            clippy::all,
            clippy::allow_attributes_without_reason,
            clippy::use_self,
            reason = "generated; the canonical ABI works on raw pointers"
        )]
        #[doc(hidden)]
        pub mod $module {
            wit_bindgen::generate!({ path: "wit", pub_export_macro: true, $($options)* });
        }
    };
}

world!(plugin, {
    world: "plugin",
    export_macro_name: "export_reconciler",
    // The other worlds borrow their types from here.
    generate_unused_types: true,
    additional_derives: [PartialEq, Eq],
});

world!(finalizing, {
    world: "finalizing",
    export_macro_name: "export_finalizer",
    with: { "pilothouse:plugin/types@0.1.0": crate::raw::plugin::pilothouse::plugin::types },
});

world!(relating, {
    world: "relating",
    export_macro_name: "export_relations",
    with: { "pilothouse:plugin/types@0.1.0": crate::raw::plugin::pilothouse::plugin::types },
});

world!(with_http, {
    world: "with-http",
    with: { "pilothouse:plugin/types@0.1.0": crate::raw::plugin::pilothouse::plugin::types },
});

world!(with_kube, {
    world: "with-kube",
    with: { "pilothouse:plugin/types@0.1.0": crate::raw::plugin::pilothouse::plugin::types },
});

world!(with_sql, {
    world: "with-sql",
    additional_derives: [PartialEq],
});
