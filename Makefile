# Everything runs in one environment, which the first call makes: `make demo` or `make test` is enough.
#
#   make demo PYTHON=python3.12        another Python to make the environment with
#   make test VENV=/another/disk/venv  another place for the environment
#   make test PYTEST_ARGS="-x tests/test_files.py"
#   make test WORKERS=0                one test after the other, in one process

SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
WORKERS ?= auto

# One thread for the tests: steady on a machine with few cores, or with other work on them. Workers take
# neighbouring tests, which share what fixtures make; one that is done takes some from the other.
OMP_NUM_THREADS ?= 1
PYTEST = OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(RUN) -m pytest -n $(WORKERS) --dist worksteal
export PYTHON VENV

RUN = "$(VENV)/bin/python"
SETUP = bash tools/setup_env.sh

.PHONY: help env env-dev demo test test-all test-zoo lint format docs clean

help: ## show this list
	@echo "torch-dcl: Deep Collaborative Learning for PyTorch"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "Settings: PYTHON=$(PYTHON)  VENV=$(VENV)  PYTEST_ARGS=$(PYTEST_ARGS)"

demo: env ## the idea in two minutes: three networks on two-digit numbers, and a report
	@$(RUN) -m torch_dcl demo

test: env-dev ## run the tests that every change needs (no GPU needed)
	$(PYTEST) $(PYTEST_ARGS)

test-all: env-dev ## run these and the slow ones: the same on more sizes, types and recipes
	$(PYTEST) -m "not zoo" $(PYTEST_ARGS)

test-zoo: env-dev ## run the large zoo: torchvision, timm, transformers, segmentation-models-pytorch
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(RUN) -m pytest -m zoo --durations=10 tests/convert/test_zoo.py $(PYTEST_ARGS)

lint: env-dev ## check style (ruff) and types (mypy, strict)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: env-dev ## put the code into the house style
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

docs: env-dev ## build the documentation from pages and docstrings (no network needed)
	$(RUN) -m sphinx -q -W --keep-going -E -d build/doctrees docs build/docs
	@echo "Built: build/docs/index.html"

env: ## make the environment and install the package
	@$(SETUP)

env-dev: ## the same, with what tests and checks need
	@$(SETUP) dev

clean: ## remove caches and build outputs (the environment stays)
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests tools benchmarks docs -type d -name __pycache__ -prune -exec rm -rf {} +
