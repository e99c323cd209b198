# Every target sets itself up on a fresh clone (Python >= 3.10, a C compiler, make). PYTHON=python3.12 make test picks the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard native/*.c native/*.h native/*.py)
PIP := $(BIN)/python -m pip install -q -q --disable-pip-version-check -c constraints.txt

.PHONY: help install demo test check bench bench-ipc wheel sanitize clean

help:
	@echo "make demo       real text embedded by one owner for gunicorn workers and forked processes, with checked answers"
	@echo "make test       the test suite"
	@echo "make check      ruff, mypy --strict, C warnings as errors"
	@echo "make bench-ipc  round trips and throughput against the alternatives, in one run"
	@echo "make sanitize   the native tests under ThreadSanitizer, AddressSanitizer and UBSan"
	@echo "make wheel      dist/*.whl;   make install, make clean"

# One stamp per set of extras, in the same environment.
$(VENV)/.have-%: $(SOURCES)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing gpuworker[$*] into $(VENV)"
	@$(PIP) -e ".[$*]"
	@touch $@

install: $(VENV)/.have-test

demo: $(VENV)/.have-demo
	$(BIN)/python -m examples.semantic_search

test: $(VENV)/.have-test
	$(BIN)/python -m pytest -q

check: $(VENV)/.have-check $(VENV)/.have-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(CC) -std=c11 -O2 -Wall -Wextra -Werror -fsyntax-only native/*.c

bench: bench-ipc

bench-ipc: $(VENV)/.have-bench
	$(BIN)/python bench/ipc_overhead.py $(ARGS)

wheel: $(VENV)/.have-test
	@rm -rf dist build
	$(BIN)/python -m build --outdir dist . >/dev/null
	@rm -rf build
	@ls dist

sanitize:
	$(MAKE) -C native/tests tsan asan

clean:
	rm -rf $(VENV) build dist *.egg-info gpuworker/_native.c gpuworker/*.so bench/results
	$(MAKE) -C native/tests clean
