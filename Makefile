# Every target sets itself up: it needs only Python 3.11 or newer, pip and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed

.PHONY: help demo test test-fast check clean
help:  ## show this
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

demo: $(SETUP)  ## set up .venv, then train the quickstart
	$(BIN)/penstock train examples/quickstart/run.yaml

test: check  ## set up .venv, then format, lint, types and all tests that CI runs
	$(BIN)/python -m pytest -n auto -m "not integration"
	$(BIN)/python -m pytest -m integration

test-fast: $(SETUP)  ## only the tests that need no process, socket or training run
	$(BIN)/python -m pytest -n auto -m "not integration"

check: $(SETUP)
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy

$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[tasks,predict,lora,tensorboard,wandb,dev]'
	@touch $@

clean:  ## remove the environment and all caches, not the runs
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build
