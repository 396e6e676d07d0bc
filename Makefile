# Two commands for a fresh machine with Python 3.11 or later: `make demo` and `make test`.
PYTHON ?= python3
CONSTRAINTS ?= constraints/cpu.txt
BIN := .venv/bin
ENV := .venv/installed

.PHONY: demo test test-fast lint format env clean

demo: env  ## learn arithmetic with GRPO in exact FP8 (about two minutes)
	$(BIN)/fp8-grpo run tiny

test: env  ## every test, as CI runs them
	$(BIN)/python -m pytest -m "not gpu"

test-fast: env  ## without the slow ones
	$(BIN)/python -m pytest -m "not gpu and not slow"

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
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[dev]"
	touch $(ENV)

clean:
	rm -rf .venv runs
