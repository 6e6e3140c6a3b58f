//! The WIT contract as Rust types, generated; a module for each version that this host serves. Nothing here leaves `plugin` and
//! `capability`.

pub(crate) mod v0_1 {
    //! The newest 0.1.

    wasmtime::component::bindgen!({
        path: "../wit/0.1.0",
        inline: "
            package pilothouse:host;

            /// Every part that a component may have: what this host serves.
            world everything {
                include pilothouse:plugin/plugin@0.1.0;
                include pilothouse:plugin/finalizing@0.1.0;
                include pilothouse:plugin/relating@0.1.0;
                include pilothouse:plugin/with-http@0.1.0;
                include pilothouse:plugin/with-kube@0.1.0;
                include pilothouse:plugin/with-sql@0.1.0;
            }
        ",
        world: "pilothouse:host/everything",
        imports: {
            "pilothouse:plugin/http": async,
            "pilothouse:plugin/kube": async,
            "pilothouse:plugin/sql": async,
        },
        exports: { default: async },
        additional_derives: [PartialEq],
    });
}

#[cfg(test)]
pub(crate) mod v0_0 {
    //! A version that never was, to show what an older one takes.

    wasmtime::component::bindgen!({
        path: "../tests/contract/0.0.9",
        world: "pilothouse:plugin/everything",
        exports: { default: async },
    });
}
