# make train   a fresh machine: set up .venv, then train a GPT on real text
# make test    the tests of every day, at most ten minutes on two cores; ARGS=tests/planner for one room
# make test-full      all tests, with whole grids and soaks: an hour
# make test-ci        tests as continuous integration runs them: a share of the grids, failures repeated alone, a verdict
# make ci      .ci/run in a fresh clone of HEAD, as continuous integration runs it; what it leaves is in build/ci
# make ci-fast the part of it that takes ten minutes: checks, pure tests, tests that the commits since the last green run touch
#              its environments stay in build/ci-fast
# make test-changed   tests that a change since main touches; SINCE=HEAD for what is not committed
# make test-versions  the tests of every day with the oldest and newest versions; ENVIRONMENTS=folder
# make check   lint, format, types
# make bench   compare with peers   make clean   remove .venv and caches; runs stay
# make docs    the site of docs/, in build/site: strict about links, opens without a server
# make wheel   a wheel with compiled libraries, and the source package that it is built from, in dist/
# make peers   Accelerate, DeepSpeed, Lightning and TRL, beside .venv: make test-full then runs them, too
# make frameworks   TensorFlow and JAX, each without wanma: make test-full then runs their scripts, too
# make trackers   MLflow and W&B, beside .venv: their test runs with --exhaustive
# make emulators  of Google's and Azure's storage, beside .venv (needs npm): their tests run with --exhaustive
# make skypilot   SkyPilot, without wanma: the test of its tasks runs with --exhaustive
# make ray     Ray, beside .venv: make test then runs it, too; make test-ray runs all tests of that engine
# make horovod   Horovod, built in some 6 minutes (needs cmake and g++): its scripts run with --exhaustive
#
# make hadoop   Hadoop's own client, which pyspark carries: make test-full then checks HDFS with it (needs a JDK)
#
# PYTHON=python3.12   another interpreter       JOB=mine.toml   another job
# ARGS="train.steps=20"   passed on to wanma or pytest
# AT_ONCE=1               test files that run beside each other: 4, as tests of clusters, losses and deadlines
#                         wait for half of their time, or 1 on a single core
# PIP_ARGS="..."        handed to pip, e.g. the index of PyTorch's small CPU builds

PYTHON   ?= python3
VENV     ?= .venv
JOB      ?= examples/gpt.toml
ARGS     ?=
PIP_ARGS ?=
AT_ONCE  ?= $(shell expr 1 + 3 \* \( $$(nproc) \> 1 \))
READY    := $(VENV)/.ready
PEERS    := .venv-peers
FRAMEWORKS := .venv-frameworks
HADOOP   := .venv-hadoop
TRACKERS := .venv-trackers
EMULATORS := .venv-emulators
SKYPILOT := .venv-skypilot
RAY      := .venv-ray
DOCS     := .venv-docs
WHEEL    := .venv-wheel
BIN      := $(VENV)/bin
# Runs a command whose temporary files, home and caches are its own.
ISOLATED  = $(BIN)/python tests/support/gate/scratch.py run

SINCE    ?= main

ENVIRONMENTS ?= .versions

.PHONY: train test test-full test-ci test-changed ci ci-fast test-versions check bench docs wheel peers frameworks horovod hadoop trackers emulators skypilot clean setup test-ray ray

train: $(READY)
	@$(BIN)/wanma train $(JOB) $(ARGS)

test: $(READY)
	@$(ISOLATED) $(BIN)/python -m pytest -n $(AT_ONCE) $(ARGS)

test-full: $(READY)
	@$(MAKE) --no-print-directory test ARGS="--full $(ARGS)"

test-ci: $(READY)
	@PYTHONPATH=tests $(BIN)/python -m support.gate --at-once $(AT_ONCE) $(ARGS)

ci:
	@.ci/in-a-clone

ci-fast:
	@.ci/in-a-clone fast $(if $(filter-out main,$(SINCE)),$(SINCE))

test-changed: $(READY)
	@$(MAKE) --no-print-directory test ARGS="--changed-since=$(SINCE) $(ARGS)"

test-ray: $(RAY)/.ready
	@$(MAKE) --no-print-directory test ARGS="--exhaustive tests/engines/ray $(ARGS)"

test-versions: $(READY)
	@PYTHONPATH=src:tests $(BIN)/python -m support.versions --environments $(ENVIRONMENTS) --at-once $(AT_ONCE) $(ARGS)

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(READY)
	@for script in $(sort $(wildcard benchmarks/*/run.py)); do echo "== $$script"; $(BIN)/python $$script $(ARGS) || exit; done

docs: $(DOCS)/.ready
	@PYTHONPATH=tests $(DOCS)/bin/python -m support.site

# PyTorch's own tag, so that both install on the same systems. The wheel is built from the source package.
wheel: $(WHEEL)/.ready
	@rm -rf build/wheel && mkdir -p build/wheel
	@$(WHEEL)/bin/python -m build --no-isolation --outdir build/wheel . > build/wheel/log || { cat build/wheel/log; exit 1; }
	@PATH="$(abspath $(WHEEL))/bin:$$PATH" $(WHEEL)/bin/python -m auditwheel repair --plat manylinux_2_28_x86_64 --only-plat --wheel-dir dist build/wheel/*.whl
	@cp build/wheel/*.tar.gz dist && ls -l dist

setup: $(READY)

peers: $(PEERS)/.ready

hadoop: $(HADOOP)/.ready

trackers: $(TRACKERS)/.ready

emulators: $(EMULATORS)/.ready

skypilot: $(SKYPILOT)/.ready

ray: $(RAY)/.ready

frameworks: $(FRAMEWORKS)/tensorflow/.ready $(FRAMEWORKS)/jax/.ready

horovod: $(FRAMEWORKS)/horovod/.ready

clean:
	rm -rf $(VENV) $(PEERS) $(FRAMEWORKS) $(HADOOP) $(TRACKERS) $(EMULATORS) $(SKYPILOT) $(RAY) $(DOCS) $(WHEEL) .versions build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Make the virtual environment $(1) unless it is there.
define new_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "wanma needs Python 3.11 or newer, and '$(PYTHON)' is none: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || { rm -rf $(1); \
	  $(PYTHON) -m venv $(1) >/dev/null 2>&1 || $(PYTHON) -m virtualenv --quiet $(1) 2>/dev/null || { rm -rf $(1); \
	  echo "'$(PYTHON)' cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }; }
endef

# Make the virtual environment $(1) anew, above .venv: it sees what .venv has, which does not see its packages.
define new_layer
	@rm -rf $(1) && $(BIN)/python -m venv --without-pip $(1)
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  echo "import site; site.addsitedir('$$site')" > \
	  $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
endef

# Install lists of pyproject.toml for the interpreter $(2), with the pip of the environment $(1), files checked by hash.
install_locked = PIP_ARGS="$(PIP_ARGS)" $(1)/bin/python tests/support/install_locked.py $(2) $(3)

# Rebuilt only when what it was made from has changed.
$(READY): pyproject.toml constraints.txt
	$(call new_venv,$(VENV))
	@echo "installing wanma and the pinned versions into $(VENV) (some minutes the first time)"
	@$(call install_locked,$(VENV),$(BIN)/python,core dev build)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# What only the tests of `wanma launch` need.
$(PEERS)/.ready: $(READY)
	$(call new_layer,$(PEERS))
	@$(call install_locked,$(VENV),$(PEERS)/bin/python,peers)
	@touch $@

# Without wanma and torch: interpreters for `wanma launch --framework tensorflow|jax --python FILE`.
$(FRAMEWORKS)/%/.ready: pyproject.toml constraints.txt
	$(call new_venv,$(FRAMEWORKS)/$*)
	@$(call install_locked,$(FRAMEWORKS)/$*,$(FRAMEWORKS)/$*/bin/python,$*)
	@touch $@

$(FRAMEWORKS)/horovod/.ready: constraints.txt tests/support/build_horovod.sh | $(READY)
	$(call new_layer,$(FRAMEWORKS)/horovod)
	@sh tests/support/build_horovod.sh $(abspath $(BIN)/python $(FRAMEWORKS)/horovod/bin/python)
	@touch $@

# MLflow with its server, which needs some hundred packages: for one test by hand.
$(TRACKERS)/.ready: $(READY)
	$(call new_layer,$(TRACKERS))
	@$(BIN)/python -m pip --python $(TRACKERS)/bin/python install -qq --disable-pip-version-check mlflow==3.17.2 wandb==0.31.0
	@touch $@

# Azurite and gcp-storage-emulator, with the libraries of both stores: for tests by hand.
$(EMULATORS)/.ready: $(READY)
	$(call new_layer,$(EMULATORS))
	@$(BIN)/python -m pip --python $(EMULATORS)/bin/python install -qq --disable-pip-version-check \
	  gcsfs==2026.10.1 adlfs==2026.8.0 gcp-storage-emulator==2026.7.19
	@npm install --silent --no-audit --no-fund --prefix $(EMULATORS) azurite@3.37.0
	@touch $@

# Without wanma and torch: SkyPilot's check of its tasks.
$(SKYPILOT)/.ready:
	$(call new_venv,$(SKYPILOT))
	@$(SKYPILOT)/bin/python -m pip install -qq --disable-pip-version-check 'skypilot[kubernetes,ssh]==0.14.1'
	@touch $@

# What only the tests of the engine ray need.
$(RAY)/.ready: $(READY)
	$(call new_layer,$(RAY))
	@$(call install_locked,$(VENV),$(RAY)/bin/python,ray)
	@touch $@

# Without wanma and torch: jars of Hadoop's client, for tests of HDFS.
$(HADOOP)/.ready: pyproject.toml constraints.txt
	$(call new_venv,$(HADOOP))
	@$(call install_locked,$(HADOOP),$(HADOOP)/bin/python,hadoop)
	@touch $@

# Without wanma and torch: what builds and checks a wheel.
$(WHEEL)/.ready: pyproject.toml constraints.txt
	$(call new_venv,$(WHEEL))
	@$(call install_locked,$(WHEEL),$(WHEEL)/bin/python,wheel)
	@touch $@

# Small, without wanma and torch: the pages on the source are made without importing it.
$(DOCS)/.ready: pyproject.toml constraints.txt
	$(call new_venv,$(DOCS))
	@$(call install_locked,$(DOCS),$(DOCS)/bin/python,docs)
	@touch $@
