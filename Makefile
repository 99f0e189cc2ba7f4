# vringlab: `make` lists what there is. Every target works in a folder whose path has blanks.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup setup-test run test test-long test-fast check bench lab notebooks lock clean

# A path relative to the Makefile: an absolute one would break on blanks.
BIN := .venv/bin

# Jupyter looks for free ports and then takes them: of two kernels that start at once one may get
# none, and a cell of its notebook is never answered. Seen once in many runs.
DEAF := --reruns 1 --only-rerun CellTimeoutError

# Emulated machines die now and then (double faults in the guest, QEMU's own crashes: seen once in some
# tens of boots). The product calls that transient and says to try again; so do the tests, once.
TRANSIENT := --reruns 1 --only-rerun "TransientError|transient error"

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## Install what is missing: system packages, then .venv from requirements.lock
	@bash scripts/setup

setup-test:
	@bash scripts/setup --test

run: setup ## The main job: both experiments, quick profile, on the embedded KVM host
	$(BIN)/vringlab run virtio-net-napi-tx --profile quick
	$(BIN)/vringlab run vsock-direct-enqueue --profile quick

test: setup-test check ## Everything: lint, types, all tests with live ones, notebooks by nbval
	$(BIN)/python -m pytest -n 2 --dist loadfile $(DEAF) -m "not long" tests/pure tests/fakes
	VRINGLAB_LIVE=1 $(BIN)/python -m pytest $(TRANSIENT) -m "not long" tests/live
	$(BIN)/python -m pytest -n 2 --dist loadfile --nbval-lax --nbval-current-env notebooks

test-long: setup-test ## The tests that `make test` leaves out: several hosts, a user's host, other kernels
	VRINGLAB_LIVE=1 $(BIN)/python -m pytest $(TRANSIENT) -m long tests/live tests/fakes

test-fast: setup ## Tests without virtual machines (pure functions and fakes)
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/pure tests/fakes

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

bench: setup ## Measure beside virtme-ng, whole builds, bare fio, scipy: a table; rows by ROWS="up fio"
	$(BIN)/python scripts/bench.py $(ROWS)

lab: setup ## Open JupyterLab in notebooks/
	$(BIN)/jupyter-lab --notebook-dir=notebooks

# One process each: papermill changes the working folder of its whole process.
notebooks: setup ## Execute every notebook with its defaults into runs/notebooks/
	@mkdir -p runs/notebooks
	@for notebook in notebooks/*.ipynb; do \
		options=(); \
		if grep -q figures_folder "$$notebook"; then options=(-p figures_folder figures); fi; \
		$(BIN)/papermill --kernel python3 "$${options[@]}" "$$notebook" "runs/$$notebook"; \
	done

lock: setup ## Resolve requirements.lock and environment.yml from pyproject.toml (needs uv)
	$(BIN)/python scripts/sync_environment.py --lock

clean: ## Remove .venv and caches; runs/ and the image cache stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist lib/*.egg-info
	find lib scripts tests notebooks \( -name __pycache__ -o -name .ipynb_checkpoints \) \
		-prune -exec rm -rf -- {} +
