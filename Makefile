# Every target makes its own environment in .venv when it is missing or older than what defines it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-warn-conflicts -c constraints.txt
# `make bench BENCH=overhead` runs one script; the default is all of them.
BENCH  ?= *

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench support clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

demo: $(VENV)/.dev ## Compare K-FAC with other optimizers on digits: a table and a report
	$(BIN)/kronfac compare digits --optimizers sgd,adamw,muon,kfac --seeds 3

test: $(VENV)/.dev ## Run the tests (slow ones: .venv/bin/pytest -m slow)
	$(BIN)/pytest -q -n auto --maxprocesses 8 --dist worksteal

lint: $(VENV)/.dev ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## Apply the formatter and the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench ## Run the benchmarks (BENCH=name for one of them)
	@set -e; for script in benchmarks/$(BENCH).py; do \
		case $$script in benchmarks/_*) ;; *) echo "== $$script"; $(BIN)/python $$script ;; esac; \
	done

support: $(VENV)/.dev ## Run every cell of docs/support.md and write it anew (some minutes)
	$(BIN)/python docs/support.py

clean: ## Remove the environment, caches and build products
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.dev: pyproject.toml constraints.txt requirements-oracle.txt
	@echo "Preparing $(VENV) (a minute or two, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch first and pinned: a range may take a newer build with several GB of GPU packages.
	@$(PIP) torch==2.13.0
	@$(PIP) -e '.[dev]'
	@$(PIP) --no-deps -r requirements-oracle.txt
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@echo "Adding the optimizers that benchmarks compare with"
	@$(PIP) -e '.[bench]'
	@touch $@
