# make train   a fresh machine: set up .venv, then train a GPT on real text
# make test    the tests of every day, at most ten minutes on two cores; ARGS=tests/planner for one room
# make test-full      all tests of continuous integration: whole grids, soaks
# make test-changed   tests that a change since main touches; SINCE=HEAD for what is not committed
# make check   lint, format, types
# make bench   compare with peers   make clean   remove .venv and caches; runs stay
# make docs    the site of docs/, in build/site: strict about links, opens without a server
# make peers   Accelerate, Lightning and TRL, beside .venv: make test then runs their scripts, too
#
# PYTHON=python3.12   another interpreter       JOB=mine.toml   another job
# ARGS="train.steps=20"   passed on to wanma or pytest
# AT_ONCE=1               test files that run beside each other: 2, or 1 on a single core
# PIP_ARGS="..."        handed to pip, e.g. the index of PyTorch's small CPU builds

PYTHON   ?= python3
VENV     ?= .venv
JOB      ?= examples/gpt.toml
ARGS     ?=
PIP_ARGS ?=
AT_ONCE  ?= $(shell expr 1 + \( $$(nproc) \> 1 \))
READY    := $(VENV)/.ready
PEERS    := .venv-peers
DOCS     := .venv-docs
BIN      := $(VENV)/bin

SINCE    ?= main

.PHONY: train test test-full test-changed check bench docs peers clean setup

train: $(READY)
	@$(BIN)/wanma train $(JOB) $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest -n $(AT_ONCE) --dist loadfile --no-loadscope-reorder $(ARGS)

test-full: $(READY)
	@$(MAKE) --no-print-directory test ARGS="--full $(ARGS)"

test-changed: $(READY)
	@$(MAKE) --no-print-directory test ARGS="--changed-since=$(SINCE) $(ARGS)"

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(READY)
	@for script in $(sort $(wildcard benchmarks/*/run.py)); do echo "== $$script"; $(BIN)/python $$script $(ARGS) || exit; done

docs: $(DOCS)/.ready
	@PYTHONPATH=tests $(DOCS)/bin/python -m support.site

setup: $(READY)

peers: $(PEERS)/.ready

clean:
	rm -rf $(VENV) $(PEERS) $(DOCS) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Make the virtual environment $(1) unless it is there.
define new_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "wanma needs Python 3.11 or newer, and '$(PYTHON)' is none: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || { rm -rf $(1); \
	  $(PYTHON) -m venv $(1) >/dev/null 2>&1 || $(PYTHON) -m virtualenv --quiet $(1) 2>/dev/null || { rm -rf $(1); \
	  echo "'$(PYTHON)' cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }; }
endef

# Rebuilt only when what it was made from has changed.
$(READY): pyproject.toml constraints.txt
	$(call new_venv,$(VENV))
	@echo "installing wanma and the pinned versions into $(VENV) (some minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt --editable '.[dev]'
	@touch $@

# What .venv has, and above it what only the tests of `wanma launch` need: nothing else sees these packages.
$(PEERS)/.ready: $(READY)
	@rm -rf $(PEERS) && $(BIN)/python -m venv --without-pip $(PEERS)
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  echo "import site; site.addsitedir('$$site')" > \
	  $$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	@wanted=$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["peers"])') && \
	  $(BIN)/python -m pip --python $(PEERS)/bin/python install -qq --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt $$wanted
	@touch $@

# Small, without wanma and torch: the pages on the source are made without importing it.
$(DOCS)/.ready: pyproject.toml constraints.txt
	$(call new_venv,$(DOCS))
	@wanted=$$($(DOCS)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])') && \
	  $(DOCS)/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt $$wanted
	@touch $@
