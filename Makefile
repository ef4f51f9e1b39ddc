# Two commands do all the set-up: `make demo` and `make test`. Everything else builds on `dev`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# Its metadata asks for PyTorch, and with that for CUDA; moving host memory needs neither, hence --no-deps.
NIXL := nixl-cu13==1.5.1
# What the prefix index is measured against. Its metadata bounds pydantic from above; its tree needs none.
DYNAMO := ai-dynamo-runtime==1.6.1

.PHONY: dev demo test test-long check fmt lint types proto proto-check wheel-smoke bench clean

dev: $(STAMP) .types/slagate

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 10) else f"slagate needs Python 3.10 or newer, {sys.executable} is {v[0]}.{v[1]} (use make PYTHON=...)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(if $(filter Linux,$(shell uname -s)),$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(NIXL))
	@touch $(STAMP)

# Type checkers do not run import hooks, so they see the namespace through this link.
.types/slagate:
	@mkdir -p .types && ln -sfn .. .types/slagate

demo: dev
	$(BIN)/slagate demo

test: dev
	$(BIN)/python -m pytest

test-long: dev
	SLAGATE_SEEDS=6000 $(BIN)/python -m pytest tests/property

check: dev lint types proto-check test wheel-smoke
	@echo "check: ok"

fmt: dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: dev
	$(BIN)/mypy

proto: dev
	$(BIN)/python tests/support/protogen.py

proto-check: dev
	$(BIN)/python tests/support/protogen.py --check

wheel-smoke: dev
	$(BIN)/python tests/support/wheel_smoke.py

bench: dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(DYNAMO)
	PYTHONPATH=tests $(BIN)/python -m bench

clean:
	rm -rf $(VENV) .types build dist *.egg-info
