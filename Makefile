# `make demo` and `make test` are all a newcomer needs: each sets up what it uses, and is quick the second time.
#
#   make demo       a mixture-of-experts language model trains on two ranks, with a loss curve
#   make test       every test but the long ones
#   make test-long  generated cases by the thousand, any arguments at all for every op in forked children, and the CPU kernels
#                   under the address and undefined sanitizers
#   make test-cpus  the tests of equal bits as on CPUs with fewer instructions, one run for each of CPUS
#   make test-newest
#                   the library built for CPUs with the newest torch that was tried, and some of its tests
#   make test-megatron
#                   tests under megatron-core (needs Python 3.12 or later), which is installed for them
#   make test-titan tests under torchtitan, which is installed for them, with the newest torch that was tried; 200 steps of its
#                   debug DeepSeek-V3 are the larger part. PYTEST_ARGS='-m "not long"' leaves them out
#   make wheel      dist/: one wheel for every torch that is served (TORCHES="2.11.0 2.15.0" for these alone)
#   make bench      benchmarks into benchmarks/results/, and plots from there
#   make docs       the manual, in docs/_build/html
#   make lint       ruff, clang-format, mypy;  make format: let ruff and clang-format rewrite
#   make clean      removes what was built;  make distclean: the virtual environment too
#
# PYTHON names the interpreter of the virtual environment: `make test PYTHON=python3.12`. TORCH names another torch by its
# version, which gets an environment of its own: `make test TORCH=torch==2.15.0`.

DEFAULT_TORCH := torch==2.11.0
PYTHON ?= python3
TORCH := $(DEFAULT_TORCH)
RANKS ?= 2

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The processes of the tests share compiled modules, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

ifneq ($(shell [[ "$(TORCH)" =~ ^torch==[0-9]+\.[0-9]+[0-9a-z.+]*$$ ]] && echo right),right)
$(error TORCH: expected a version, such as torch==2.15.0, got $(TORCH))
endif

VENV := .venv$(if $(filter-out $(DEFAULT_TORCH),$(TORCH)),-$(subst ==,,$(TORCH)))
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
READY := $(VENV)/.ready
INSTALLED := $(VENV)/.installed
BUILT := $(VENV)/.built
# The stamp of a build has its settings and the path of its library, which a build in another environment may replace.
BUILD_SETTINGS := cpu_only=$(TRANSFORMER_PLUGIN_CPU_ONLY) cflags=$(CFLAGS) ldflags=$(LDFLAGS) cxx=$(if $(filter environment,$(origin CXX)),$(CXX)) archs=$(TORCH_CUDA_ARCH_LIST)
IS_BUILT := $(shell { read -r settings && read -r library; } 2>/dev/null < $(BUILT) && \
  [[ "$$settings" == "$(BUILD_SETTINGS)" && -e "$$library" && ! "$$library" -nt $(BUILT) ]] && echo yes)
BUILD_INPUTS := setup.py $(wildcard build_tools/*.py build_tools/*.map) $(shell find csrc -type f)
CXX_FILES := $(shell find csrc examples -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
BENCHMARKS := $(filter-out __init__ common compile_peer expert_parallel_autograd expert_parallel_cases expert_parallel_exchange expert_parallel_layers expert_parallel_measures expert_parallel_page expert_parallel_peers functional_cases grouped_gemm_cpu grouped_gemm_works host_time_cases moe_layer_cases moe_layer_measures moe_layer_page moe_layer_peers peers plot plot_expert_parallel quantize_case quantize_cases quantize_grouped,$(basename $(notdir $(wildcard benchmarks/*.py))))

.PHONY: FORCE help setup build demo test test-cpus test-newest test-megatron test-titan test-long sanitize sanitize-gpu wheel bench docs lint format clean distclean

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

# The virtual environment, with torch and what the demo needs.
$(RUNS): pyproject.toml build_tools/extras.py
	@build_tools/check_machine.sh "$(PYTHON)"
	@$(PYTHON) transformer_plugin/_torch_versions.py "$(TORCH)"
	@test -x $(BIN)/python || { echo "making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install "$(TORCH)" $$($(BIN)/python build_tools/extras.py build examples)
	@touch $@

# And all tools that pyproject.toml pins.
$(READY): $(RUNS)
	$(BIN)/python -m pip install "$(TORCH)" $$($(BIN)/python build_tools/extras.py build examples clients test lint docs)
	@touch $@

$(BUILT): $(BUILD_INPUTS) transformer_plugin/_torch_versions.py $(READY) $(if $(IS_BUILT),,FORCE)
	@echo "building the library for $(TORCH)"
	@$(BIN)/python -W ignore setup.py build_ext --inplace
	@{ echo "$(BUILD_SETTINGS)"; $(BIN)/python -c "import transformer_plugin._library as x; print(x.LIBRARY)"; } > $@

$(INSTALLED): pyproject.toml $(BUILT)
	@$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $(BUILT) $@  # pip links the library again

setup: $(READY)
build: $(INSTALLED)

# Where there is no GPU, and no library with kernels yet, the demo builds without them, in a folder of its own, and quickly.
ifeq ($(MAKECMDGOALS),demo)
HAS_GPU := $(shell [[ "$$(timeout 20 nvidia-smi -L 2>/dev/null)" == *GPU\ * ]] && echo yes)
endif
ifneq ($(HAS_GPU)$(wildcard $(BUILT)),)
demo: build
	$(BIN)/python examples/train_moe.py --ranks $(RANKS)
else
demo: $(RUNS)
	@echo "building the library for $(TORCH) without CUDA, as there is no GPU, in build/demo"
	@TRANSFORMER_PLUGIN_CPU_ONLY=1 CFLAGS="$(or $(CFLAGS),-O1)" $(BIN)/python -W ignore setup.py --quiet build --build-lib build/demo
	CUDA_VISIBLE_DEVICES= PYTHONPATH=build/demo $(BIN)/python examples/train_moe.py --ranks $(RANKS)
endif

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

# What differs between versions of torch: what is private there, autograd, compiled code, values, modules, two ranks.
NEWEST := torch==2.15.0
NEWEST_TESTS := surface/test_torch_private.py packaging/test_torch_versions.py ops/test_linear_ops.py \
  ops/test_nodes_of_weights.py ops/test_second_derivatives.py compile/test_compiled_autograd.py compile/test_export.py \
  compile/test_cache_keys.py functional/test_compile.py tensor nn/test_linear.py nn/test_grouped.py nn/test_moe.py parallel/test_split_backward.py \
  parallel/test_tensor_parallel_layers.py parallel/test_sharded_weights.py parallel/test_sharded_state.py parallel/test_muon.py \
  parallel/test_dtensor_ops.py parallel/test_quantized_gather.py parallel/test_expert_parallel.py parallel/test_moe.py
test-newest:  # CFLAGS: the build takes two thirds of the time
	TRANSFORMER_PLUGIN_CPU_ONLY=1 CFLAGS=-O1 $(MAKE) test TORCH=$(NEWEST) PYTEST_ARGS="$(addprefix tests/,$(NEWEST_TESTS))"
	TRANSFORMER_PLUGIN_CPU_ONLY=1 CFLAGS=-O1 $(MAKE) test-titan TORCH=$(NEWEST) PYTEST_ARGS='-m "not long"'

# torchtitan does not import on the default torch. It is installed into the environment of another one.
ifeq ($(TORCH),$(DEFAULT_TORCH))
test-titan:
	$(MAKE) test-titan TORCH=$(NEWEST)
else
test-titan: build
	$(BIN)/python -m pip install --quiet "$$($(BIN)/python build_tools/extras.py torchtitan)"
	@$(BIN)/python -c "import torchtitan.models.common.moe" || \
	  { echo "torchtitan: expected a torch that it imports on, got $(TORCH). Leave TORCH out."; exit 1; }
	$(BIN)/python -m pytest tests/clients/test_torchtitan*.py $(PYTEST_ARGS)
endif

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

TORCHES :=
wheel: $(READY)
	$(BIN)/python -m pip install --quiet $$($(BIN)/python build_tools/extras.py wheel)
	$(BIN)/python -m build_tools.wheel $(if $(TORCHES),--torch $(TORCHES))

bench: build
	@for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done
	$(BIN)/python -m benchmarks.plot
	$(BIN)/python -m benchmarks.moe_layer_page
	$(BIN)/python -m benchmarks.expert_parallel_page

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
	rm -rf build dist *.egg-info transformer_plugin/_C.*so transformer_plugin/_kernels.*so .venv*/.built .venv*/.installed docs/_build docs/reference/generated
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean
	rm -rf .venv .venv-*
