//! The WIT contract as Rust types, generated. Nothing here leaves `plugin` and `capability`.

wasmtime::component::bindgen!({
    path: "../wit/0.1.0",
    inline: "
        package pilothouse:host;

        /// Every part that a component may have: what this host serves.
        world everything {
            include pilothouse:plugin/plugin@0.1.0;
            include pilothouse:plugin/finalizing@0.1.0;
        }
    ",
    world: "pilothouse:host/everything",
    exports: { default: async },
    additional_derives: [PartialEq],
});
