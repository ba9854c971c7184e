# Every target does its own set-up: an environment in .venv, made by the first Python found that is
# new enough, with the versions in constraints.txt. It is installed again only when pyproject.toml or
# constraints.txt has changed.
#
#   make PYTHON=python3.12 test    choose the interpreter (when .venv does not exist yet)
#   make test ARGS="-k clip"       pass more to pytest; the same for quick, demo and bench

VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/runtime.stamp
DEV := $(VENV)/dev.stamp

PYTHON ?=
CANDIDATES := python3.11 python3.12 python3.13 python3.10 python3 python
WORKERS ?= 2
ARGS ?=
NATIVE ?= wait

# One thread a worker: torch's own threads would only compete with the other worker for the same
# cores. A worker that is through takes over tests of the other. Bytecode is kept also where the
# environment says not to: else each of the processes that tests start compiles the package anew.
# The C++ library is waited for, once a machine: else the first tests would run without it.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= GRADILOCKS_NATIVE=$(NATIVE) \
  $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Version 0.3 in next/ has settings and tests of its own. `gradilocks` in the environment is 0.2;
# next/pyproject.toml and next/tests/conftest.py put next/src before it.
NEXT_PYTEST = cd next && OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
  ../$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# ensurepip first: an environment made by another tool may have no pip.
define INSTALL
$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null; \
$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
endef

# fastai, timm, Ignite and torchtitan have an environment of their own: they need much that the other
# tests are to run without.
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_DEV := $(FRAMEWORKS)/dev.stamp
FRAMEWORKS_NEED := numpy pytest pytest-xdist pytorch-ignite \
  cloudpickle fastcore fastdownload fastprogress fasttransform matplotlib pandas pillow pyyaml \
  requests scikit-learn scipy huggingface_hub safetensors spmd_types tyro

# Where the interpreter has gone (an upgrade of the system's Python), nothing counts as installed.
$(shell test -x $(BIN)/python || rm -f $(RUNTIME) $(DEV))
$(shell test -x $(FRAMEWORKS)/bin/python || rm -f $(FRAMEWORKS_DEV))

.DEFAULT_GOAL := help
.PHONY: help demo test test-next next-native test-frameworks quick ranks sanitize long lint format types bench clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

demo: $(RUNTIME) ## the Goldilocks experiment: too small, too large, just right; a minute on the CPU
	@$(BIN)/python -m gradilocks demo $(ARGS)

# pytest comes last so that its closing line is the last line. If the tests of 0.2 fail, those of 0.3 do
# not run, so that the closing line is that of the failure.
test: lint types next-native ## everything that must hold: lint, format, types, tests of 0.2 and of 0.3 (next/)
	@$(PYTEST) $(ARGS)
	@$(NEXT_PYTEST) $(ARGS)

test-next: next-native ## the tests of 0.3 (next/) alone
	@$(NEXT_PYTEST) $(ARGS)

# Compiles only if a source has changed.
next-native: $(DEV)
	@cd next && ../$(BIN)/python setup.py -q build_ext --inplace

test-frameworks: BIN := $(FRAMEWORKS)/bin
test-frameworks: $(FRAMEWORKS_DEV) ## fastai, timm, Ignite and torchtitan, in an environment of their own
	@$(PYTEST) tests/frameworks $(ARGS)

# What needs no process of its own, no browser and no interpreted GPU kernel; a minute on two cores.
QUICK := tests/stages tests/policies tests/laws tests/runfile tests/formats tests/trace tests/emulate \
  tests/engine/test_table.py tests/engine/test_one_measurement.py \
  tests/engine/test_shared_gradients.py tests/control/test_bad_arguments.py \
  tests/control/test_exact_skip.py tests/control/test_gradient_kinds.py \
  tests/control/test_habits.py tests/control/test_never_finite.py \
  tests/control/test_optimizer_contracts.py tests/control/test_outcome.py \
  tests/control/test_resume.py tests/control/test_retry.py tests/dropin/test_clipping.py \
  tests/dropin/test_scaler_contract.py tests/dropin/test_scaler_errors.py \
  tests/dropin/test_scaler_faults.py tests/kernels/test_reference_writes.py \
  tests/test_architecture.py tests/test_names.py \
  tests/test_documents.py::test_every_path_that_a_guide_names_exists \
  tests/test_documents.py::test_the_tree_of_files_is_that_of_the_source

quick: lint types ## while working: lint, types and the tests that take under a minute together
	@$(PYTEST) -q -m 'not gpu and not ranks and not long and not slow' $(QUICK) $(ARGS)

# One worker: each test fills the cores with 2, 4 or 8 processes of its own.
ranks: next-native ## all layouts over 2, 4 and 8 processes beside one; some 6 minutes on 16 cores, longer on two
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ranks tests/ranks $(ARGS)
	@cd next && OMP_NUM_THREADS=1 ../$(BIN)/python -m pytest -m ranks tests/ranks $(ARGS)

# Both end the process at the first finding, and with it pytest. The sanitizers' own library must be
# loaded before all others, libstdc++ with it (else it does not find what throws); Python's own
# allocator would hide what is written past an object's end. Captured, a report would be lost.
SANITIZED := tests/kernels/test_native_library.py tests/dropin/test_gradient_marks.py \
  tests/kernels/test_native_kernels.py tests/kernels/test_native_steps.py \
  tests/kernels/test_build_in_mid_run.py tests/kernels/test_addresses_in_place.py \
  tests/engine/test_walks_agree.py tests/ranks/test_local_steps.py
SANITIZE := -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all -g1

sanitize: $(DEV) ## the tests of the C++ under AddressSanitizer and UndefinedBehaviorSanitizer
	@OMP_NUM_THREADS=2 PYTHONMALLOC=malloc CXX=g++ GRADILOCKS_NATIVE=wait \
	  GRADILOCKS_NATIVE_CXXFLAGS='$(SANITIZE)' \
	  ASAN_OPTIONS=detect_leaks=0:protect_shadow_gap=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	  $(BIN)/python -m pytest --capture=sys $(SANITIZED) $(ARGS)

long: $(DEV) ## the whole of what `make test` runs a part of: kills, the demo at its default settings
	@$(PYTEST) -m long $(ARGS)

# ruff takes the settings of next/pyproject.toml for the files in next/.
lint: $(DEV) ## ruff: rules and format, changing nothing
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m ruff format --check

format: $(DEV) ## ruff: apply the format and the safe fixes
	@$(BIN)/python -m ruff check --fix
	@$(BIN)/python -m ruff format

types: $(DEV) ## mypy, strict, over src and next/src
	@$(BIN)/python -m mypy
	@cd next && ../$(BIN)/python -m mypy

bench: $(DEV) ## measure a step against torch's own
	@$(BIN)/python benchmarks/bench_step.py $(ARGS)

clean: ## remove caches and build outputs; the environments stay (rm -r .venv for a new one)
	@rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@cd next && rm -rf build dist src/*.egg-info src/gradilocks/kernels/_native*.so \
	  .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path './$(VENV)*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# numpy, because torch warns on import where it is missing.
$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Gradilocks into $(VENV) (the first time also torch: 200 MB as a CPU build, several GB with CUDA) ..."
	@$(INSTALL) -e . numpy
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Gradilocks and its test tools into $(VENV)" \
	  "(the first time also torch: 200 MB as a CPU build, several GB with CUDA) ..."
	@$(INSTALL) -e '.[dev]'
	@touch $(RUNTIME) $@

# Without their dependencies, of which they name more than the tests use: constraints-frameworks.txt.
$(FRAMEWORKS_DEV): pyproject.toml constraints.txt constraints-frameworks.txt | $(FRAMEWORKS)/bin/python
	@echo "Installing fastai, timm, Ignite and torchtitan into $(FRAMEWORKS) ..."
	@$(INSTALL) -c constraints-frameworks.txt -e . $(FRAMEWORKS_NEED)
	@$(INSTALL) -c constraints-frameworks.txt --no-deps fastai timm torchtitan
	@touch $@

# A candidate is tried, not only looked up: a name on the PATH may be a shim for a version that is
# not there, and Debian ships a python3 without ensurepip, which makes an environment without pip.
# --clear replaces an environment whose interpreter has gone or that was left half made.
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
