# To use another interpreter: make test PYTHON=python3.12 VENV=.venv-3.12
PYTHON ?= python3
VENV ?= .venv
VENV_TPU ?= .venv-tpu
VENV_GPU ?= .venv-gpu-compile
VENV_TORCH ?= .venv-torch
BIN = $(VENV)/bin
# Tests that CI runs.
CHEAP = not long and not gpu and not tpu and not gpu_compile

.PHONY: train test test-all test-long test-gpu test-gpu-compile test-tpu test-torch torture mutations lint format size

train: $(VENV)/cpu
	$(BIN)/python -m train --config-name=local_test_synthetic paths.model_name=synthetic

# Two marker files in the venv: `cpu`, for the packages that programs need, and `dev`, for those
# that tests and lint need in addition.
$(VENV)/cpu: requirements-cpu.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed: make PYTHON=python3.12')"
	$(PYTHON) -m venv $(VENV)
	@echo "installing 1.3 GB of packages, which takes minutes"
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet --requirement requirements-cpu.txt
	touch $@

$(VENV)/dev: $(VENV)/cpu pyproject.toml
	$(BIN)/pip install --quiet --group dev
	touch $@

test: $(VENV)/dev
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist worksteal

# The quick tests and the slow ones, which try more combinations.
test-all: $(VENV)/dev
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist worksteal -m "$(CHEAP)"

# About fifteen minutes: the README's first hour, lost hosts, kills, every byte flipped.
test-long: $(VENV)/dev
	$(BIN)/python -m pytest -m long

# Ten minutes: kills a run on two hosts 50 times, and checks that it ends like an unkilled run.
torture: $(VENV)/dev
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.torture

# About half an hour: tries each likely mistake in each op, and listed edits. Wrong edits that
# change the numbers must be refused, and right ones accepted. PARTS="dense variants" tries some.
mutations: $(VENV)/dev
	$(BIN)/python -m tests.mutations $(PARTS)

# Needs an environment with requirements-gpu.txt, pytest and optax: make test-gpu PYTHON=...
# One test starts a second program on the GPU, so neither may preallocate most of its memory.
test-gpu:
	JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false \
		$(PYTHON) -m pytest -m gpu tests/test_gpu.py

# Half an hour: compiles steps for NVIDIA GPUs with XLA's compiler, on any machine.
test-gpu-compile: $(VENV_GPU)/gpu
	JAX_PLATFORMS=cpu $(VENV_GPU)/bin/python -m pytest -m "slow or gpu_compile" -rP \
		tests/test_gpu_compile.py

# To compile for GPUs without one, with tools.compile.
$(VENV_GPU)/gpu: requirements-gpu-compile.txt
	$(MAKE) VENV=$(VENV_GPU) $(VENV_GPU)/dev
	$(VENV_GPU)/bin/pip install --quiet --requirement requirements-gpu-compile.txt
	touch $@

# Two hours on two cores: compiles 67 steps for TPUs with libtpu, on any machine. libtpu has a venv
# of its own, because without a TPU it makes every program there print errors.
test-tpu:
	$(MAKE) VENV=$(VENV_TPU) $(VENV_TPU)/dev
	$(VENV_TPU)/bin/pip install --quiet --requirement requirements-tpu.txt
	JAX_PLATFORMS=cpu $(VENV_TPU)/bin/python -m pytest -m tpu -rP

# Ten minutes: compares our models with transformers, ctranslate2 and lm-eval's own model.
# SMOLLM=FOLDER tries the real model in that folder, too.
test-torch:
	$(MAKE) VENV=$(VENV_TORCH) $(VENV_TORCH)/dev
	$(VENV_TORCH)/bin/pip install --quiet --group torch
	JAX_PLATFORMS=cpu $(VENV_TORCH)/bin/python -m pytest -m "$(CHEAP)" \
		tests/benchmarks tests/test_circle.py tests/tools/test_huggingface_weights.py \
		tests/tools/test_lm_eval.py \
		tests/test_experiments.py::test_gemma_3_is_that_of_transformers

lint: $(VENV)/dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(VENV)/dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Counts lines of code, without blank lines, comments and docstrings.
size:
	@$(PYTHON) .ci/size.py
