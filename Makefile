# Everything a fresh clone needs: `make test` and `make check` build .venv themselves.

PYTHON ?= python3
VENV   ?= .venv
PYTEST_ARGS ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: test check format demo bench sim clean help

help:
	@echo "make test    all tests (PYTEST_ARGS=... is passed on)"
	@echo "make check   ruff, mypy --strict, import directions, public names"
	@echo "make format  let ruff format and fix what it can"
	@echo "make demo    a short run through all tiers"
	@echo "make bench   metadata path, file store, copies: tables"
	@echo "make sim     a longer simulated run with faults"
	@echo "make clean   remove the virtual environment and all caches"

# Made again when the pins or the package's metadata change. The backend is installed first so that
# the build uses the pinned one.
$(STAMP): constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e ".[dev]"
	@touch $@

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(STAMP)
	PATH="$(abspath $(BIN)):$$PATH" scripts/check

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: $(STAMP)
	$(BIN)/quire demo

bench: $(STAMP)
	$(BIN)/quire bench core
	$(BIN)/quire bench store
	$(BIN)/quire bench transfer

sim: $(STAMP)
	$(BIN)/quire sim run --seed 1 --steps 100000

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
