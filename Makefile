# Everything works on a fresh clone with Python 3.11 or newer, pip and make: each target first sets up .venv when pyproject.toml has changed.

PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.installed-$(shell cksum < pyproject.toml | tr -d ' ')

.PHONY: setup demo test test-unit test-e2e test-slow check chaos-deaths soak bench bench-recovery bench-failures bench-replicas bench-persist bench-planning bench-cadence bench-simulator bench-observe clean

setup: $(STAMP)

# Some distributions ship Python without ensurepip; then pip itself fills the environment.
$(STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv .venv || $(PYTHON) -m venv --clear --without-pip .venv
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m pip --python $(BIN)/python install pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	rm -f .venv/.installed-*
	touch $@

demo: $(STAMP)
	$(BIN)/lastgood demo

test: test-unit test-e2e

test-unit: $(STAMP)
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal -m 'not slow and not gpu' $(ARGS) tests/unit

# One at a time: they share a Ray, and what they measure.
test-e2e: $(STAMP)
	$(BIN)/python -m pytest -m 'not slow and not gpu' $(ARGS) tests/e2e tests/gpu

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m 'slow and not gpu' $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Kills the supervisor's own parts at random moments, e.g. ARGS="--trials 50 --seed 7".
chaos-deaths: $(STAMP)
	$(BIN)/python tests/e2e/random_deaths.py $(ARGS)

# 500 kills in one run, about an hour; a shorter one: ARGS="--kills 30". `lastgood chaos plans` lists others.
soak: $(STAMP)
	$(BIN)/lastgood chaos run soak $(ARGS)

# What a save costs beside other ways to save; ARGS="--saves 200": whether memory stays flat.
bench: $(STAMP)
	$(BIN)/python tests/benchmarks/saves.py $(ARGS)

bench-recovery: $(STAMP)
	$(BIN)/python tests/benchmarks/recovery.py $(ARGS)

bench-failures: $(STAMP)
	$(BIN)/python tests/benchmarks/failures.py $(ARGS)

bench-replicas: $(STAMP)
	$(BIN)/python tests/benchmarks/replicas.py $(ARGS)

bench-persist: $(STAMP)
	$(BIN)/python tests/benchmarks/persist.py $(ARGS)

bench-planning: $(STAMP)
	$(BIN)/python tests/benchmarks/planning.py $(ARGS)

# How good the tuner is; ARGS="--traces DIR" scores a folder of failure traces instead.
bench-cadence: $(STAMP)
	$(BIN)/python tests/benchmarks/cadence.py $(ARGS)

# How fast the simulator is; ARGS=--real: a real run with kills beside it.
bench-simulator: $(STAMP)
	$(BIN)/python tests/benchmarks/simulator.py $(ARGS)

# What ledger and exporter cost, and how long a scrape of 1,024 ranks takes.
bench-observe: $(STAMP)
	$(BIN)/python tests/benchmarks/observe.py $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
