# Two commands: `make demo` and `make test`. Both begin with `make install`, which does nothing when it is done.
# PYTHON=… names the Python that .venv is made with, ENGINE=torch|deepspeed the engine that `make demo` trains with,
# TEST=… a part of the tests: `make test TEST=tests/llmsys/model`.

ENGINE ?= torch
TEST ?= tests
# Two test processes, as a two-core CI machine has.
TEST_PROCESSES ?= 2
# Tests whose results depend on how a processor sums.
NUMERIC ?= $(addprefix tests/llmsys/,model optim kernels engine/test_half_precision.py engine/test_parity.py engine/test_every_optimizer.py)

BIN := .venv/bin
# llmsys has links to data_pipeline and launch.
TYPED := llmsys tools tests
# The first Python on the path that is new enough and can make a virtual environment; the tested version before others.
SUITABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
CANDIDATES := python3.11 python3.12 python3.13 python3.14 python3 python
ifndef PYTHON
PYTHON := $(shell for p in $(CANDIDATES); do $$p -c '$(SUITABLE)' >/dev/null 2>&1 && { echo $$p; break; }; done)
endif

.DEFAULT_GOAL := help
.PHONY: help install demo test numerics pairs check docs format clean

help:  ## Print what each target does
	@sed -n 's/^\([a-z]*\):.*##/  make \1\t/p' Makefile

install:  ## Create .venv with llmsys and its pinned dependencies
	@$(or $(PYTHON),false) -c '$(SUITABLE)' 2>/dev/null || { \
		echo 'make: llmsys needs Python 3.11 or newer with its venv module, and found none$(if $(PYTHON), in $(PYTHON)).' \
			'Install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name one: make PYTHON=/path/to/python3' >&2; \
		exit 1; }
	@$(PYTHON) tools/install.py

demo: install  ## Crawl shards in, a trained mixture-of-experts model out: make demo ENGINE=torch|deepspeed
	@exec env LLMSYS_PARENT=$$PPID $(BIN)/llmsys demo --engine $(ENGINE)

test: install  ## Run every test, or TEST=tests/llmsys/model
	@$(BIN)/python tools/system_packages.py
	@OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal $(TEST)

numerics: install  ## Run the tests of numbers with 2 and 4 threads and with the instructions of other processors
	@set -e; for processor in '2 default default' '4 AVX512_CORE default' '1 AVX2 avx2' '2 SSE41 avx2'; do \
		set -- $$processor; echo "threads $$1, ONEDNN_MAX_CPU_ISA=$$2, ATEN_CPU_CAPABILITY=$$3"; \
		env LLMSYS_TEST_THREADS=$$1 OMP_NUM_THREADS=$$1 \
			$$([ $$2 = default ] || echo ONEDNN_MAX_CPU_ISA=$$2) $$([ $$3 = default ] || echo ATEN_CPU_CAPABILITY=$$3) \
			$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist worksteal $(NUMERIC); \
	done

pairs: install  ## Compare the sample of pairs of choices with a plain process; before a change of a step lands
	@$(BIN)/llmsys doctor pairs --sample

check: install  ## Check format, lint, names and docstrings, types and import directions; print the size
	@$(BIN)/ruff format --check --quiet . || { echo 'make: `make format` formats these files:' >&2; $(BIN)/ruff format --check .; }
	@$(BIN)/ruff check .
	@$(BIN)/python tools/lint.py
	@$(BIN)/mypy $(TYPED)
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python tools/size.py

docs: install  ## Build the documentation into site/, warnings being errors
	@$(BIN)/python tools/install.py --extra docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'docs: open site/index.html; with search: $(BIN)/mkdocs serve'

format: install  ## Format the code and fix what ruff can fix
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

clean:  ## Remove caches and build outputs; keeps .venv, demo and runs
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
