# `make demo` and `make test` set everything up by themselves on a machine that has Python 3.11-3.13; the
# stamp below keeps a second call from doing it again. Where packages come from is pip's own configuration.

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
PYTEST_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?=
FUZZ_ARGS ?=
# One thread per test worker: torch's own threads would fight over the cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Tests begin some hundred interpreters: our sources are compiled once, whatever the environment says about byte code.
KEEP_BYTECODE := PYTHONDONTWRITEBYTECODE=
PYTEST := $(ONE_THREAD) $(KEEP_BYTECODE) $(BIN)/python -m pytest -n 2 --dist loadgroup -q

# Sources are compiled on all cores, else every process compiles them where byte code is not written; a pip does so on one, and compiles
# also these: two collections of models of which a process imports a few, and tests. They are compiled when they are imported.
SELDOM := /tests?/|/(transformers|diffusers|pip)/

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-levels test-costs tests all-tests test-gpu lint soak fuzz bench bench-page bench-gpu clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: $(STAMP) ## the virtual environment, once

$(STAMP): pyproject.toml constraints.txt requirements-dev.txt tools/make_venv.sh tools/install.py
	@sh tools/make_venv.sh $(VENV)
	$(BIN)/python tools/install.py
	@$(BIN)/python -m compileall -q -j 0 src
	@$(BIN)/python -m compileall -q -j 0 -x '$(SELDOM)' $(VENV)/lib > /dev/null || true  # packages hold templates that are no Python
	@touch $@

demo: $(STAMP) ## two minutes: a real model gets faster while it serves; then explain() and a report in build/demo
	@$(BIN)/python examples/demo.py $(DEMO_ARGS)

lint: $(STAMP) ## ruff, pyright (strict on src), import-linter
	$(BIN)/ruff check src tests benchmarks examples tools
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache

test: $(STAMP) ## the linters beside the tests, 10 minutes: of tests that take long some cases, drawn from their names
	@$(MAKE) --no-print-directory -j2 lint tests

test-all: $(STAMP) ## the linters beside every test, as CI runs them; kernels' cases on one level each, drawn from their names
	@$(MAKE) --no-print-directory -j2 lint all-tests

test-levels: $(STAMP) ## every test, with every case on every level that this machine executes
	$(PYTEST) --every-level $(PYTEST_ARGS)

test-costs: $(STAMP) ## every test, to write down which of them are costly (tests/costs.txt)
	$(PYTEST) --costs $(PYTEST_ARGS)

tests: $(STAMP)
	$(PYTEST) --quick $(PYTEST_ARGS)

all-tests: $(STAMP)
	@rm -f .pytest_cache/v/cache/lastfailed
	$(PYTEST) $(PYTEST_ARGS) || { [ $$? -eq 1 ] && $(ONE_THREAD) $(BIN)/python tools/repeat_failed.py; }

test-gpu: $(STAMP) ## the tests that need a CUDA device; they say so elsewhere
	$(BIN)/python -m pytest -q -m gpu tests/gpu $(PYTEST_ARGS)

soak: $(STAMP) ## 200,000 calls on four threads while workers die and plans are swapped; two minutes on two cores
	$(ONE_THREAD) HOTFUSE_SOAK_CALLS=200000 $(BIN)/python -m pytest -q -s tests/faults/test_soak.py

fuzz: $(STAMP) ## 5,000 random fused graphs against float64; prints its seed, saves what fails in build/fuzz; FUZZ_ARGS="--seed N"
	$(ONE_THREAD) $(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

$(VENV)/.bench-stamp: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,bench]"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[peers]" || echo "some peers cannot be installed here: lines will say so"
	@touch $@

bench: $(VENV)/.bench-stamp ## all suites against all peers, up to 20 minutes; BENCH_ARGS=--quick: 3
	$(BIN)/hotfuse bench $(BENCH_ARGS)

bench-page: $(VENV)/.bench-stamp ## docs/benchmarks.md and README's table, measured at this commit: 20 minutes; BENCH_ARGS="--profile full"
	$(BIN)/python -m benchmarks.page $(BENCH_ARGS)

bench-gpu: $(VENV)/.bench-stamp ## small batches on a CUDA device, over eager
	$(BIN)/python -m benchmarks.cuda $(BENCH_ARGS)

clean: ## remove the environment and caches
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
