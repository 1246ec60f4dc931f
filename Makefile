# Every target does its own set-up, once: needs Python 3.10 or newer, make and a package index.
#   make demo PYTHON=python3.12 PIP_ARGS="--index-url ..."    chooses the interpreter and passes options to pip
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
DEMO_ARGS ?=
PYTEST_ARGS ?= -n auto --maxprocesses=4

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := build/installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint format types layers tests bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## create .venv and install the package with its pinned dependencies

demo: $(STAMP)  ## the whole path on a small real pair: text, traces, router, ONNX, comparison (no GPU, no account)
	$(BIN)/speccascade demo $(DEMO_ARGS)

test: check  ## all checks and tests; the same as check, and what CI runs

check: lint types layers tests  ## format, lint, types, import layers, tests with doctests

lint: $(STAMP)  ## ruff, format and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(STAMP)  ## let ruff mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(INSTALLED)/.stamp  ## mypy --strict on an installed copy
	cd $(INSTALLED) && $(abspath $(BIN))/mypy --cache-dir $(CURDIR)/.mypy_cache -p speccascade

layers: $(INSTALLED)/.stamp  ## the direction of imports, on an installed copy
	cd $(INSTALLED) && $(abspath $(BIN))/lint-imports --cache-dir $(CURDIR)/.import_linter_cache

tests: $(STAMP)  ## pytest, one thread a worker
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

bench: $(STAMP)  ## run every script of benchmarks/, one after the other
	set -e; for script in benchmarks/*.py; do echo "$$script"; $(BIN)/python "$$script"; done

clean:  ## remove what the other targets made, but for runs/
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# torch first and alone: it is by far the largest, and a machine may already hold the pinned release.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "speccascade needs Python 3.10 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 ..." >&2; exit 2; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch (once, about a minute)"
	@$(PIP) install --quiet $(PIP_ARGS) -c constraints.txt torch==2.13.0
	@echo "installing speccascade and what it needs (once, about two minutes)"
	@$(PIP) install --quiet --use-pep517 $(PIP_ARGS) -c constraints.txt -e '.[demo,dev]'
	@touch $@

# Built afresh each time from clean folders: setuptools would otherwise carry files of an earlier build along.
SOURCES := $(shell find cascade router data training eval configs speccascade -name '*.py' -o -name '*.yaml')
$(INSTALLED)/.stamp: $(STAMP) $(SOURCES)
	@rm -rf build
	@$(PIP) install --quiet --no-deps --no-build-isolation --no-compile --target $(INSTALLED) .
	@cp pyproject.toml $(INSTALLED)
	@touch $@
