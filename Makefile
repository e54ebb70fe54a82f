# `make demo` and `make test` set everything up by themselves on a machine that has Python 3.11-3.13; the
# stamp below keeps a second call from doing it again. Where packages come from is pip's own configuration.

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
TORCH  := $(shell grep '^torch==' constraints.txt)
PYTEST_ARGS ?=
# One thread per test worker: torch's own threads would fight over the cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench clean

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: $(STAMP) ## the virtual environment, once

$(STAMP): pyproject.toml constraints.txt tools/make_venv.sh
	@sh tools/make_venv.sh $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -c constraints.txt "$(TORCH)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP) ## a real model: first call, capture, takeover, explain
	@$(BIN)/python examples/demo.py

lint: $(STAMP) ## ruff, pyright (strict on src), import-linter
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache

test: $(STAMP) lint ## the linters, then every test
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist loadgroup -q $(PYTEST_ARGS)

bench: $(STAMP) ## overhead of tier 0 against eager, side by side
	$(BIN)/python -m benchmarks.overhead

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
