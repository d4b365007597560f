# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
#
# A fresh machine needs Python 3.11 or newer and make; everything else is set up here.
#   make demo       fedblend auto on heart patients of four hospitals, half a minute
#   make test       the tests
#   make test-slow  the slow tests, hours; continues where it stopped
#   make lint       style and types
#   make docs       the documentation as a website, site/index.html
#   make bench      the time of a round, beside other ways to compute it
#   make cards      the benchmark cards: whole runs, at most a minute of each
#   make release    builds the distributions and tries them in a fresh environment
#   make clean      removes what was set up

PYTHON ?= python3
TORCH ?= torch==2.13.0
PFL ?= pfl==0.6.0
FLOWER ?= flwr[simulation]==1.41.0
FEDJAX ?= fedjax==0.0.17
BIN := .venv/bin
INSTALL := bin/python -m pip install -qq
OTHERS := adapters federation interop reproductions
DEVELOPERS := -e '.[dev]' $(OTHERS:%=-e ./%)
# uv installs four times as fast as pip, whose settings it does not read: where a mirror
# is set for pip alone, pip does it.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif
CHECK := $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
  || { echo "error: '$(PYTHON)' is not Python 3.11 or newer; make PYTHON=... names one" \
  >&2; exit 1; }

.PHONY: demo test test-slow lint docs bench cards release clean

demo: .venv/.ready
	@$(BIN)/fedblend demo

test: .venv/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: .venv/.ready
	@$(BIN)/python tools/slow_tests.py $(GROUPS)

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

docs: .venv/.ready
	$(BIN)/python tools/docs_site.py

bench: .venv/.ready
	@$(MAKE) --no-print-directory .venv-torch/.ready || echo "PyTorch is left out"
	@$(MAKE) --no-print-directory .venv-fedjax/.ready || echo "FedJAX is left out"
	@$(BIN)/python benchmarks/run.py peers

cards: .venv/.ready
	@$(MAKE) --no-print-directory .venv-torch/.ready || echo "PyTorch is left out"
	@$(MAKE) --no-print-directory .venv-fedjax/.ready || echo "FedJAX is left out"
	@$(BIN)/python benchmarks/run.py cards --peers --limit 60 --out cards

release:
	@$(CHECK)
	@$(PYTHON) tools/release.py

clean:
	rm -rf .venv .venv-torch .venv-fedjax .pytest_cache .ruff_cache .hypothesis dist site cards

.venv/.ready: pyproject.toml $(OTHERS:%=%/pyproject.toml)
	@$(CHECK)
	@echo 'setting up .venv, once; this takes about a minute'
	@$(PYTHON) -m venv .venv
	@.venv/$(INSTALL) uv
	@$(BIN)/uv pip install -q --python $(BIN)/python $(DEVELOPERS) \
	  || .venv/$(INSTALL) $(DEVELOPERS)
	@touch $@

.venv-torch/.ready:
	@$(CHECK)
	$(PYTHON) -m venv .venv-torch
	.venv-torch/$(INSTALL) $(TORCH) numpy $(PFL) '$(FLOWER)'
	@touch $@

.venv-fedjax/.ready:
	@$(CHECK)
	$(PYTHON) -m venv .venv-fedjax
	.venv-fedjax/$(INSTALL) $(FEDJAX)
	@touch $@
