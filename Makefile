# Every target creates what it needs: an environment in .venv, from the first Python that is new enough,
# with the versions in constraints.txt. It is installed again only when pyproject.toml, setup.py,
# constraints.txt or a C++ source has changed.
#
#   make PYTHON=python3.12 test    choose the interpreter (when .venv does not exist yet)
#   make test ARGS="-k clip"       pass more to pytest; the same for the other targets that run tests, demo and bench

VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/runtime.stamp
DEV := $(VENV)/dev.stamp
SETUP := pyproject.toml setup.py constraints.txt $(wildcard src/gradilocks/kernels/native/*)

PYTHON ?=
CANDIDATES := python3.11 python3.12 python3.13 python3.10 python3 python
WORKERS ?= 2
ARGS ?=

# The fast tests of the parts that most changes touch: about 20 s on two idle cores.
QUICK := tests/policies tests/step tests/formats tests/dropin/test_scaler_contract.py tests/test_architecture.py \
  tests/view/test_findings.py tests/view/test_columns.py tests/view/test_runfile.py

# One thread per worker: torch's own threads would compete with the other worker for the same cores. A
# worker without tests takes some from the other. Bytecode is kept even where the environment disables
# it: otherwise every process that a test starts compiles the package again.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

# ensurepip first: an environment made by another tool may have no pip.
define INSTALL
$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null; \
$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
endef

# fastai, timm, Ignite and torchtitan have an environment of their own, because they need many packages
# that the other tests run without.
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_DEV := $(FRAMEWORKS)/dev.stamp
FRAMEWORKS_NEED := numpy pytest pytest-xdist pytorch-ignite \
  cloudpickle fastcore fastdownload fastprogress fasttransform matplotlib pandas pillow pyyaml \
  requests scikit-learn scipy huggingface_hub safetensors spmd_types tyro tensorboard tokenizers torchdata triton

# If the interpreter is gone (an upgrade of the system's Python), nothing counts as installed.
$(shell test -x $(BIN)/python || rm -f $(RUNTIME) $(DEV))
$(shell test -x $(FRAMEWORKS)/bin/python || rm -f $(FRAMEWORKS_DEV))

.DEFAULT_GOAL := help
.PHONY: help demo test test-frameworks quick ranks long lint format types docs bench clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

demo: $(RUNTIME) ## train a GPT in fp16: no scale, one that is too large, a dynamic one; half a minute on a CPU
	@$(BIN)/python -m gradilocks demo $(ARGS)

# pytest comes last, so its closing line is the last line.
test: lint types docs ## run all checks: lint, format, types, site, tests
	@$(PYTEST) -n $(WORKERS) --dist worksteal $(ARGS)

test-frameworks: $(DEV) $(FRAMEWORKS_DEV) ## test all frameworks; fastai, timm, Ignite, torchtitan in an environment of their own
	@$(PYTEST) -n $(WORKERS) --dist worksteal -m 'not gpu' tests/integrations $(ARGS)
	@OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/frameworks $(ARGS)

quick: lint types ## lint, types and the fast tests
	@$(PYTEST) -n $(WORKERS) -q -m 'not gpu and not ranks and not long and not slow' $(QUICK) $(ARGS)

# One worker: each test fills the cores with 2, 4 or 8 processes of its own.
ranks: $(DEV) ## compare every layout over 2, 4 and 8 processes with one process
	@$(PYTEST) -m ranks tests/ranks $(ARGS)

long: $(DEV) ## run all cases of the tests that `make test` runs in part
	@$(PYTEST) -n $(WORKERS) -m long $(ARGS)

lint: $(DEV) ## check rules and format with ruff
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m ruff format --check

format: $(DEV) ## apply ruff's format and safe fixes
	@$(BIN)/python -m ruff check --fix
	@$(BIN)/python -m ruff format

types: $(DEV) ## check types with mypy, strict
	@$(BIN)/python -m mypy

docs: $(DEV) ## build the site in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(DEV) ## measure a step of Gradilocks and of torch
	@$(BIN)/python benchmarks/bench_step.py $(ARGS)

clean: ## remove caches and build outputs; the C extension and the environments stay (rm -r .venv for new ones)
	@rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path './$(VENV)*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# The benchmarks and tests use the C extension in place; pip compiles it there.
$(RUNTIME): $(SETUP) | $(BIN)/python
	@echo "Installing Gradilocks into $(VENV) (the first time also torch: 200 MB as a CPU build, several GB with CUDA) ..."
	@$(INSTALL) -e '.[report]'
	@touch $@

$(DEV): $(SETUP) | $(BIN)/python
	@echo "Installing Gradilocks and its test tools into $(VENV)" \
	  "(the first time also torch: 200 MB as a CPU build, several GB with CUDA) ..."
	@$(INSTALL) -e '.[dev]'
	@touch $(RUNTIME) $@

# Without their dependencies, of which they name more than the tests use: constraints-frameworks.txt.
$(FRAMEWORKS_DEV): BIN := $(FRAMEWORKS)/bin
$(FRAMEWORKS_DEV): $(SETUP) constraints-frameworks.txt | $(FRAMEWORKS)/bin/python
	@echo "Installing fastai, timm, Ignite and torchtitan into $(FRAMEWORKS) ..."
	@$(INSTALL) -c constraints-frameworks.txt -e . $(FRAMEWORKS_NEED)
	@$(INSTALL) -c constraints-frameworks.txt --no-deps fastai timm torchtitan
	@touch $@

# A candidate is tried, not only looked up: a name on the PATH may be a shim for a version that is not
# installed, and Debian ships a python3 without ensurepip, which makes an environment without pip.
# --clear replaces an environment that is incomplete or whose interpreter is gone.
$(BIN)/python $(FRAMEWORKS)/bin/python:
	@chosen=; incomplete=; \
	for python in $(or $(PYTHON),$(CANDIDATES)); do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 || continue; \
	  if "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then chosen=$$python; break; fi; \
	  incomplete="$$incomplete $$python"; \
	done; \
	if [ -z "$$chosen" ] && [ -n "$$incomplete" ]; then \
	  echo "Found$$incomplete, but without the venv and ensurepip modules that make an environment." >&2; \
	  echo "On Debian or Ubuntu: apt-get install python3-venv. Or name another: make PYTHON=/path/to/python" >&2; \
	  exit 1; \
	elif [ -z "$$chosen" ]; then \
	  echo "Gradilocks needs Python 3.10 or newer; none of these is:" \
	    "$(or $(PYTHON),$(CANDIDATES))." >&2; \
	  echo "Install Python 3.11, or name another: make PYTHON=/path/to/python" >&2; \
	  exit 1; \
	fi; \
	echo "Creating $(@:/bin/python=) with $$("$$chosen" --version) ..."; \
	"$$chosen" -m venv --clear $(@:/bin/python=) || { rm -rf $(@:/bin/python=); exit 1; }
