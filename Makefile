# `make demo` and `make test` are all a newcomer needs: each sets up what it uses, and is quick the second time.
#
#   make demo       a mixture-of-experts language model trains on two ranks, with a loss curve
#   make test       every test but the long ones
#   make test-long  generated cases by the thousand, any arguments at all for every op in forked children, and the CPU kernels
#                   under the address and undefined sanitizers
#   make test-cpus  the tests of equal bits as on CPUs with fewer instructions, one run for each of CPUS
#   make test-megatron
#                   tests under megatron-core, which is installed for them; needs Python 3.12 or later
#   make bench      benchmarks into benchmarks/results/, and plots from there
#   make docs       the manual, in docs/_build/html
#   make lint       ruff, clang-format, mypy;  make format: let ruff and clang-format rewrite
#   make clean      removes what was built;  make distclean: the virtual environment too
#
# PYTHON names the interpreter of the virtual environment: `make test PYTHON=python3.12`.

PYTHON ?= python3
TORCH ?= torch==2.11.0
RANKS ?= 2

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The processes of the tests share compiled modules, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INSTALLED := $(VENV)/.installed
LIBRARY := transformer_plugin/_C.abi3.so
BUILD_INPUTS := setup.py $(wildcard build_tools/*.py) $(shell find csrc -type f)
CXX_FILES := $(shell find csrc examples -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
BENCHMARKS := $(filter-out __init__ common compile_peer functional_cases grouped_gemm_cpu grouped_gemm_works host_time_cases moe_layer_cases moe_layer_measures moe_layer_page moe_layer_peers peers plot quantize_case quantize_cases quantize_grouped,$(basename $(notdir $(wildcard benchmarks/*.py))))

.PHONY: help setup build demo test test-cpus test-megatron test-long sanitize sanitize-gpu bench docs lint format clean distclean

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

# The virtual environment, with torch and the tools that pyproject.toml pins.
$(READY): pyproject.toml build_tools/extras.py
	@build_tools/check_machine.sh "$(PYTHON)"
	@test -x $(BIN)/python || { echo "making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install "$(TORCH)" $$($(BIN)/python build_tools/extras.py build examples clients test lint docs)
	@touch $@

# ninja prints whole command lines; a line for each file is enough to see how far it is.
$(LIBRARY): $(BUILD_INPUTS) $(READY)
	@echo "building $@"
	@$(BIN)/python -W ignore setup.py build_ext --inplace 2>&1 | sed -u -E \
	  -e 's/^(\[[0-9]+\/[0-9]+\]).* -c (-o [^ ]+ )?[^ ]*\/(csrc\/[^ ]+) .*/\1 \3/'
	@touch $@

$(INSTALLED): pyproject.toml $(LIBRARY)
	@$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@ && touch -r $@ $(LIBRARY)

setup: $(READY)
build: $(INSTALLED)

demo: build
	$(BIN)/python examples/train_moe.py --ranks $(RANKS)

# By default the files with the fewest tests, which take longest, would run beside each other at the end.
test: build
	$(BIN)/python -m pytest -m "not long" -n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-long: build sanitize
	$(BIN)/python -m pytest -m long --all-dtypes $(PYTEST_ARGS)

# oneDNN and torch use fewer instructions than this CPU has: products round in another order, in all of the package alike.
CPUS ?= ONEDNN_MAX_CPU_ISA=AVX512_CORE ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=default
test-cpus: build
	@for cpu in $(CPUS); do echo "== $$cpu"; env $$cpu $(BIN)/python -m pytest -m "bits and not long" -n 3 --dist loadfile \
	  --no-loadscope-reorder $(PYTEST_ARGS) $$(grep -rl "mark.bits" tests --include=*.py); done

# megatron-core is not among the requirements of `make test`: it has no wheel for older Pythons.
test-megatron: build
	$(BIN)/python -m pip install --quiet "$$($(BIN)/python build_tools/extras.py megatron)"
	@$(BIN)/python -c "import megatron.core" || \
	  { echo "megatron-core: expected Python 3.12 or later, got $$($(BIN)/python --version). Set PYTHON."; exit 1; }
	$(BIN)/python -m pytest tests/clients $(PYTEST_ARGS)

# A CPU build with sanitizers in build/asan, under the tests of the ops. Leaks are torch's own, at exit.
SANITIZED := build/asan/package
sanitize: $(READY)
	TRANSFORMER_PLUGIN_CPU_ONLY=1 TRANSFORMER_PLUGIN_SANITIZE=1 $(BIN)/python setup.py --quiet build_ext \
	  --build-lib $(SANITIZED) build_py --build-lib $(SANITIZED)
	cd build/asan && \
	  LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	  PYTHONPATH=$(CURDIR)/$(SANITIZED) $(CURDIR)/$(BIN)/pytest --import-mode=append -p no:cacheprovider -q \
	  -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) -m "not long" $(CURDIR)/tests/ops

# The same on a GPU: memcheck and racecheck of CUDA's compute-sanitizer.
sanitize-gpu: build
	$(BIN)/python -m tests.sanitize_gpu

bench: build
	@for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done
	$(BIN)/python -m benchmarks.plot
	$(BIN)/python -m benchmarks.moe_layer_page

docs: build
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "the manual is in docs/_build/html/index.html"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "clang-format on $(words $(CXX_FILES)) files"; $(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist *.egg-info $(LIBRARY) $(INSTALLED) docs/_build docs/reference/generated
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean
	rm -rf $(VENV)
