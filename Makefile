# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
CONFIG ?= examples/length_ratio_maac.yaml

.PHONY: runtime install train test test-long lint format docs clean

# The lock files hold the whole dependency tree, so pip must not resolve anything by itself.
$(VENV)/.runtime: requirements/cpu.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps -r requirements/cpu.txt
	$(BIN)/pip install --quiet --no-deps -e .
	touch $@

$(VENV)/.installed: $(VENV)/.runtime requirements/dev.txt
	$(BIN)/pip install --quiet --no-deps -r requirements/dev.txt
	touch $@

runtime: $(VENV)/.runtime


install: $(VENV)/.installed

train: install
	$(BIN)/python examples/prepare.py
	$(BIN)/greenroom train $(CONFIG)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -m "not slow"

test-long: install
	$(BIN)/pytest -m slow

docs: install
	$(BIN)/python -c "from services.config import config_reference; print(config_reference(), end='')" > docs/config-reference.md

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
