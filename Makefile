# Everything here works from a fresh clone with Python 3.12 and gcc; `make help` lists it.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
JOBS ?= 2
DEMO_MODEL ?= models/demo_checkpoint
DEMO_PROMPT ?= Explain the assert statement.

BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip
REQUIREMENTS := $(BIN)/python scripts/requirements.py
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
CUDA_SOURCES := $(wildcard cuda/*/*)
BUILD_SOURCES := pyproject.toml CMakeLists.txt scripts/strict_nvcc.py $(wildcard build_backend/*.py) $(CUDA_SOURCES)

# One build tree for the editable install and the wheel, kept between builds; warnings are errors.
# One compiler per core: nvcc takes gigabytes.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell getconf _NPROCESSORS_ONLN)
BUILD := --no-deps --no-build-isolation -C build-dir=build/{wheel_tag} -C cmake.define.JAX_HPC_WERROR=ON

# A GPU's memory is shared by the test processes.
TEST_ENV := PYTHONSAFEPATH=1 $(if $(GPU),XLA_PYTHON_CLIENT_PREALLOCATE=false)

.PHONY: help venv install dev test demo wheel lint format docs toolkit-test gpu-test gpu-bench bench-report \
	kernel-tests gpu-sanitize clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# Set-up. Each stamp in the virtual environment is redone when what it was made from changes.

venv: $(BIN)/python ## make the virtual environment (.venv)

$(BIN)/python:
	@python=$$(scripts/find_python.sh); \
	echo "== virtual environment: $(VENV), $$("$$python" --version) at $$python"; \
	"$$python" -m venv $(VENV)

install: $(VENV)/installed ## install jax_hpc with the extension, editable

$(VENV)/packages: pyproject.toml scripts/requirements.py | $(BIN)/python
	@echo "== packages: JAX$(if $(GPU), for this machine's GPU) and what the build needs"
	@$(REQUIREMENTS) build | $(PIP) install -r /dev/stdin
	@$(REQUIREMENTS) build build-more core models $(if $(GPU),cuda13) | $(PIP) install -r /dev/stdin
	@touch $@

$(VENV)/installed: $(BUILD_SOURCES) $(VENV)/packages
	@echo "== build and install jax_hpc"
	@SECONDS=0; $(PIP) install -v $(BUILD) -e .; echo "build: $$SECONDS s" | tee $@

dev: $(VENV)/dev ## install the tests' and linters' packages too

$(VENV)/dev: $(VENV)/installed
	@echo "== packages: tests and linters"
	@$(REQUIREMENTS) build core test dev | $(PIP) install -r /dev/stdin
	@touch $@

# Use.

demo: $(VENV)/installed ## generate text from the demo checkpoint
	@echo "== jax-hpc generate"
	@$(BIN)/jax-hpc generate --model $(DEMO_MODEL) --chat "$(DEMO_PROMPT)"

wheel: $(VENV)/packages ## build a wheel into dist/
	@$(PIP) wheel -v $(BUILD) -w dist .
	@ls -l dist

# Checks.

test: $(VENV)/dev ## set up, lint and run all tests
	@$(MAKE) --no-print-directory lint
	@cat $(VENV)/installed
	@echo "== tests"
	@$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) $(if $(GPU),,-m "not gpu")

lint: $(VENV)/dev ## ruff, clang-format and pyright, as checks
	@echo "== lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $(CUDA_SOURCES)
	@ln -sfn ../models jax_hpc/models
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/dev ## format Python and C++ in place
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CUDA_SOURCES)

docs: $(VENV)/installed ## build the documentation site into site/
	@$(REQUIREMENTS) build core docs | $(PIP) install -q -r /dev/stdin
	@$(BIN)/mkdocs build --strict

toolkit-test: $(BIN)/python ## prove the build with NVIDIA's compiler wheels, in a fresh environment
	@scripts/toolkit_test.sh $(BIN)/python

gpu-test: ## run the GPU tests on WHEEL=dist/x.whl with this machine's own python3, installing nothing; ARGS= for pytest
	@test -n "$(WHEEL)" || { echo "usage: make gpu-test WHEEL=dist/jax_hpc-....whl" >&2; exit 2; }
	@scripts/gpu_test.sh "$(WHEEL)" $(ARGS)

gpu-bench: ## measure OP=router of WHEEL=dist/x.whl on all GPUs; ROWS=, IMPLS=, BUDGET= (seconds), PROCESSES=, ARGS=, OUT_DIR=, PEERS=
	@test -n "$(WHEEL)" -a -n "$(OP)" || { echo "usage: make gpu-bench WHEEL=dist/jax_hpc-....whl OP=router [ROWS='hy3/*,*/64']" >&2; exit 2; }
	@OUT_DIR="$(OUT_DIR)" PEERS="$(PEERS)" scripts/gpu_bench.sh "$(WHEEL)" "$(OP)" $(if $(ROWS),--rows '$(ROWS)') \
	  $(if $(IMPLS),--impls '$(IMPLS)') $(if $(BUDGET),--budget $(BUDGET)) $(if $(PROCESSES),--processes $(PROCESSES)) $(ARGS)

bench-report: $(VENV)/installed ## compare benchmarks/results with the recorded peers
	@$(BIN)/python -m benchmarks.report $(if $(OP),--op $(OP))

kernel-tests: $(VENV)/packages ## build cuda/tests into dist/kernel_tests: kernels without JAX
	@export PATH="$(abspath $(BIN)):$$PATH"; \
	cmake -S . -B build/kernel_tests -G Ninja -DCMAKE_BUILD_TYPE=Release \
		-DSKBUILD_PROJECT_VERSION=0 -DJAX_HPC_KERNEL_TESTS=ON -DJAX_HPC_WERROR=ON \
		-DPython_EXECUTABLE="$$(command -v python)" -Dnanobind_DIR="$$(python -m nanobind --cmake_dir)"; \
	cmake --build build/kernel_tests --target kernel_tests
	@mkdir -p dist && cp -r build/kernel_tests/kernel_tests dist/ && ls -l dist/kernel_tests

# What is given on make's command line reaches the script in its environment; this file's JOBS does not.
gpu-sanitize: ## run compute-sanitizer over dist/kernel_tests, on a machine with a Hopper GPU; TOOLS=, SECONDS_EACH=, JOBS=
	@scripts/gpu_sanitize.sh dist/kernel_tests/*

clean: ## remove what make made, the virtual environment included
	@rm -rf build dist site .pytest_cache .ruff_cache $(VENV)
