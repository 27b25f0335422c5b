SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# More arguments for `cargo run` or `cargo test`, as in: make test ARGS='lease -- --nocapture'
ARGS ?=

OPENAPI := openapi/openapi.json openapi/openapi-3.0.json
SCRIPTS := scripts/with-postgres .ci/run

# The versions of the tools that check the OpenAPI documents.
OPENAPI_SPEC_VALIDATOR := 0.9.0
SPECTRAL := 6.16.3
REDOCLY := 2.77.0

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-14s %s\n", $$1, $$2 }' Makefile

.PHONY: run
run: ## Run the service (release build); ARGS are its arguments
	cargo run --release --locked -- $(ARGS)

.PHONY: test
test: ## Run every test against a real PostgreSQL; ARGS go to cargo test
	scripts/with-postgres cargo test --locked $(ARGS)

.PHONY: figures
figures: ## Run the fault tests and show the figures that they measure
	scripts/with-postgres cargo test --locked --test faults -- --nocapture

.PHONY: lint
lint: ## Check formatting, clippy and the shell scripts
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	@if command -v shellcheck >/dev/null; then shellcheck $(SCRIPTS); \
	else echo "shellcheck is not installed: scripts not checked"; fi

# The largest tables come to half a gigabyte, and a database should have them in its own cache.
.PHONY: bench
bench: export WITH_POSTGRES_CONF = shared_buffers = '1GB'
bench: ## Measure the service against its floor, the naive way, Redis and etcd
	scripts/with-postgres cargo bench --locked --bench load -- $(ARGS)

.PHONY: openapi
openapi: ## Regenerate the OpenAPI documents from the code
	@mkdir -p openapi target
	cargo run --quiet --locked -- openapi > target/openapi.json
	cargo run --quiet --locked -- openapi --profile 3.0 > target/openapi-3.0.json
	mv target/openapi.json target/openapi-3.0.json openapi/

.PHONY: openapi-lint
openapi-lint: export REDOCLY_TELEMETRY = off
openapi-lint: export REDOCLY_SUPPRESS_UPDATE_NOTICE = true
openapi-lint: export npm_config_update_notifier = false
openapi-lint: ## Check the OpenAPI documents with three independent tools (needs python3 and npx)
	test -x target/openapi-venv/bin/python || python3 -m venv target/openapi-venv
	target/openapi-venv/bin/pip install --quiet --disable-pip-version-check \
	  openapi-spec-validator==$(OPENAPI_SPEC_VALIDATOR)
	target/openapi-venv/bin/openapi-spec-validator $(OPENAPI)
	npx --yes @stoplight/spectral-cli@$(SPECTRAL) lint --fail-severity warn $(OPENAPI)
	npx --yes @redocly/cli@$(REDOCLY) lint $(OPENAPI)
