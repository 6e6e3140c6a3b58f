# Everything that a person or CI does here. `make help` lists it.
#
# What is slow is built once and kept outside the checkout, in $PILOTHOUSE_CACHE.

PILOTHOUSE_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/pilothouse
CARGO_TARGET_DIR ?= $(PILOTHOUSE_CACHE)/target
PREFIX ?= /usr/local
export PILOTHOUSE_CACHE CARGO_TARGET_DIR

BIN := $(CARGO_TARGET_DIR)/debug
PLUGINS := $(CARGO_TARGET_DIR)/plugins
STEP := tests/step.sh

.DEFAULT_GOAL := help
.PHONY: help demo test soak lint measure bench bench-smoke build plugins guests registry registry-server postgres s3 control-plane control-plane-up control-plane-down install clean toolchain

help: ## List the targets
	@if [ -t 1 ]; then bold=$$(printf '\033[1m') plain=$$(printf '\033[0m'); fi; \
	awk -F ':.*## ' -v bold="$$bold" -v plain="$$plain" \
	  '/^[a-z-]+:.*## / { printf "  %s%-19s%s %s\n", bold, $$1, plain, $$2 }' $(MAKEFILE_LIST)

demo: build plugins postgres s3 $(if $(USE_CLUSTER),,control-plane registry-server) ## Show the main job on a real Kubernetes (USE_CLUSTER=1: on that of your kubeconfig)
	@tests/demo.sh

test: build plugins guests control-plane registry postgres s3 ## Format, lint, and run all tests; what CI runs
	@tests/test.sh

soak: build plugins control-plane ## Minutes under fire: requests fail, calls trap, parents come and go, plugins are replaced; and times compared
	@cargo test --locked --workspace --lib -- --ignored --nocapture --test-threads=1
	@cargo test --locked --workspace --test e2e -- --ignored --nocapture --test-threads=1

lint: ## Check dependencies: licences, advisories, duplicates (needs cargo-deny)
	@command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
	cargo deny check

measure: build plugins control-plane ## Measure memory and plugin calls of the optimised host
	@$(STEP) "host, optimised" cargo build --locked --release -p pilothouse
	@tests/measure.sh $(BIN)/control-plane $(CARGO_TARGET_DIR)/release/pilothouse $(PLUGINS)/myapp.wasm

bench: build plugins control-plane ## Compare the optimised host with native operators, kopf and the bare API server: hours (BENCH_FLAGS="--rounds 1 --sizes 1000")
	@$(STEP) "operators in Go and Python" tests/bench/build.sh
	@$(STEP) "all of Rust, optimised" cargo build --locked --release -p pilothouse -p bench -p bench-native --bins --bench call
	@PILOTHOUSE_CONTROL_PLANE=$(BIN)/control-plane $(CARGO_TARGET_DIR)/release/bench run --plugin $(PLUGINS)/myapp.wasm \
	  --others "$$(tests/bench/build.sh)" --output tests/bench/results --memory 10000 --fleets 1,10,100 $(BENCH_FLAGS)
	@cargo bench --quiet --locked -p pilothouse -p bench -p bench-native --bench call -- --plugin $(PLUGINS)/myapp.wasm --guests $(PLUGINS) \
	  --others "$$(tests/bench/build.sh)" --output $(CURDIR)/tests/bench/results

bench-smoke: build plugins control-plane ## Count requests, writes and plugin calls with few parents, and fail beyond a limit
	@$(BIN)/bench smoke --plugin $(PLUGINS)/myapp.wasm

# Cargo tells one checkout from another by the time of its files alone, so the sources of one that did not build last are made new.
build: ## Build the host
	@if [ "$$(cat $(CARGO_TARGET_DIR)/checkout 2>/dev/null)" != "$(CURDIR)" ]; then \
	  mkdir -p $(CARGO_TARGET_DIR) && find host guest-sdk plugins tests -name '*.rs' -exec touch {} + && \
	  echo "$(CURDIR)" >$(CARGO_TARGET_DIR)/checkout; fi
	@$(STEP) "host and test tools" cargo build --locked --workspace

toolchain:
	@$(STEP) "tools for plugins" plugins/setup.sh

plugins: build toolchain ## Build the example plugins and the tests' plugins into components
	@$(STEP) "plugin myapp" $(BIN)/pilothouse build plugins/myapp --output $(PLUGINS)/myapp.wasm
	@$(STEP) "plugin workerpool" $(BIN)/pilothouse build plugins/workerpool --output $(PLUGINS)/workerpool.wasm
	@$(STEP) "plugin mirror" $(BIN)/pilothouse build tests/guests/mirror --output $(PLUGINS)/mirror.wasm
	@$(STEP) "plugin reach" $(BIN)/pilothouse build tests/guests/reach --output $(PLUGINS)/reach.wasm

registry-server:
	@$(STEP) "registry" tests/distribution/build.sh

registry: registry-server ## Build the registry of artifacts that tests push to, and the client of others that they push with
	@$(STEP) "client oci-wasm" cargo build --locked --manifest-path tests/oci-wasm/Cargo.toml --target-dir $(CARGO_TARGET_DIR)/oci-wasm

postgres: ## Make sure that there is a PostgreSQL, which tests start
	@$(STEP) "PostgreSQL" tests/postgres/setup.sh
s3: ## Build the S3 server that tests talk to
	@$(STEP) "S3 server" tests/s3/build.sh

guests: build ## Build the tests' plugins in other languages: Go, JavaScript, Python
	@$(STEP) "plugin in Go" $(BIN)/pilothouse build tests/guests/go --output $(PLUGINS)/go.wasm
	@$(STEP) "plugins in JavaScript, Python" tests/guests/build.sh $(PLUGINS)

control-plane: ## Build the Kubernetes control plane that tests and demo run on
	@$(STEP) "Kubernetes control plane" tests/control-plane/build.sh

control-plane-up: build control-plane ## Start one: eval "$(make -s control-plane-up)"
	@$(BIN)/control-plane up

control-plane-down: ## Stop it
	@if [ -x $(BIN)/control-plane ]; then $(BIN)/control-plane down; fi

install: plugins ## Install the host and the example plugins below PREFIX
	@$(STEP) "host, optimised" cargo build --locked --release -p pilothouse
	install -D -m 755 $(CARGO_TARGET_DIR)/release/pilothouse $(PREFIX)/bin/pilothouse
	install -D -m 644 -t $(PREFIX)/share/pilothouse/plugins $(PLUGINS)/myapp.wasm $(PLUGINS)/workerpool.wasm

clean: ## Remove what was built from this checkout (the control plane stays; it is in PILOTHOUSE_CACHE)
	cargo clean
