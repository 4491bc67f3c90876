# PYTHON and VENV choose another interpreter: make test PYTHON=python3.12 VENV=.venv-3.12
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: train test test-all test-long test-gpu test-tpu torture mutations lint format size

train: $(VENV)/cpu
	$(BIN)/python -m train --config-name=local_test_synthetic paths.model_name=synthetic

# The venv holds two marks: what runs is installed; what tests and lint need is, too.
$(VENV)/cpu: requirements-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet --requirement requirements-cpu.txt
	touch $@

$(VENV)/dev: $(VENV)/cpu pyproject.toml
	$(BIN)/pip install --quiet --group dev
	touch $@

test: $(VENV)/dev
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist worksteal

# The same and the slow ones: each promise in more combinations.
test-all: $(VENV)/dev
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist worksteal -m "not long and not gpu and not tpu"

# Some fifteen minutes more: the README's first hour, the stdlib config to its end, all bytes flipped.
test-long: $(VENV)/dev
	$(BIN)/python -m pytest -m long

# Ten minutes: a run on two hosts is killed 50 times, and has to end as one that was not.
torture: $(VENV)/dev
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.torture

# Five minutes: some 500 edits of train.py's ops, none of which may change its numbers unnoticed.
mutations: $(VENV)/dev
	$(BIN)/python -m tests.mutations

# In an environment that has requirements-gpu.txt, pytest and optax: make test-gpu PYTHON=...
test-gpu:
	JAX_PLATFORMS=cuda $(PYTHON) -m pytest -m gpu

# Twenty minutes: compiles 48 steps for TPUs, with libtpu, on any machine.
test-tpu: $(VENV)/dev
	$(BIN)/pip install --quiet --requirement requirements-tpu.txt
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m tpu -rP

lint: $(VENV)/dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(VENV)/dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Lines of code, without blank lines, comments and docstrings.
size:
	@$(PYTHON) .ci/size.py train.py shardlib data runtime tools benchmarks tests
