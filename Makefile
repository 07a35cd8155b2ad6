PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help quickstart install install-dev test lint types layers docs clean
help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

quickstart: install  ## install the core, train the quickstart recipe, write its report (a few minutes)
	$(BIN)/lockstep train quickstart

install: .venv/.core  ## make .venv with the core and the tested pins
install-dev: .venv/.dev  ## the same with the dev tools

.venv/bin/python:
	$(PYTHON) -m venv .venv
.venv/.core: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing lockstep into .venv (a few minutes the first time)"
	$(PIP) --editable .
	@touch $@
.venv/.dev: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing lockstep and its dev tools into .venv (a few minutes the first time)"
	$(PIP) --editable ".[dev]"
	@touch $@ .venv/.core

test: install-dev lint types layers  ## lint, types, import layers, tests: what CI runs
	$(BIN)/pytest -m "not slow and not gpu"
lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
types: install-dev
	$(BIN)/pyright
layers: install-dev
	$(BIN)/lint-imports
docs: install-dev  ## regenerate the pages that come from code
	$(BIN)/python -m lockstep.cli.reference docs
clean:
	rm -rf .venv build dist src/*.egg-info
