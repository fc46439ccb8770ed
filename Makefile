# `make demo` and `make test` do everything on a fresh Debian or Ubuntu machine with Python >= 3.11 and a C++ compiler.
# The other targets are their steps, for development: docs/development.md.
.PHONY: demo test venv lint cpp-test tsan asan bazel-test py-test py-test-oldest oldest-requirements aot-test wheel format clean \
  test-packages report

# The interpreter, and the environment made from it. Another pair works too: make py-test VENV=.venv-3.13 PYTHON=python3.13
PYTHON = $(shell build_tools/find_python.sh)
VENV = .venv
# Python 3.11 comes with the oldest supported jax: where it is found beside a newer reference, the Python tests run there as well.
OLDEST = $(filter-out $(PYTHON),$(shell build_tools/find_python.sh 3.11))
OLDEST_VENV = .venv-3.11

JOBS = $(shell nproc)
# ON makes compiler warnings errors. CI sets it; compilers that we do not have warn about other things.
WERROR = OFF
PYTEST_ARGS =

BIN = $(CURDIR)/$(VENV)/bin
PIP = $(BIN)/python -m pip --quiet --disable-pip-version-check
# Whose CUDA headers the extension is built with: one folder for both environments, else ccache takes their engines for different ones.
CUDA_VENV = $(VENV)
# Where the extension of this environment is compiled, and the C++ tests with it. Kept, so that the next build is short.
BUILD = build/$(VENV:.%=%)
CXX_FILES = CMakeLists.txt $(shell find cmake csrc xla_ffi -type f)
CONFIGURATION = build_tools/find_python.sh build_tools/xla_headers.py build_tools/dependencies.py pyproject.toml $(wildcard requirements/*.txt)
# The second environment's engine is the first one's: where ccache is found, it is compiled once.
export CMAKE_CXX_COMPILER_LAUNCHER = $(shell command -v ccache)
export CCACHE_BASEDIR = $(CURDIR)
# The sanitizers cannot place their shadow memory under the address randomisation of some kernels; where it may be turned off, it is.
NO_ASLR = $(shell setarch $$(uname -m) -R true 2>/dev/null && echo setarch $$(uname -m) -R)

demo: venv
	$(BIN)/python examples/pipeline_training.py

# What comes from elsewhere first, all at a time; then the engine, which ccache keeps for the other environment. The tests run three steps at a time,
# so that some compile while others wait; what a step says appears when it is over. The first failure lets the other steps end, and fails the whole.
# The C++ tests run under ThreadSanitizer, and in Bazel's build under AddressSanitizer: cpp-test and asan would only compile and run them again.
test:
	$(MAKE) --jobs=3 --output-sync=target test-packages $(VENV)/.requirements oldest-requirements
	$(MAKE) --jobs=2 --output-sync=target venv lint
	$(MAKE) --jobs=3 --output-sync=target py-test py-test-oldest tsan bazel-test
	@$(MAKE) --no-print-directory report
	@[ -z "$(OLDEST)" ] || $(MAKE) --no-print-directory report VENV=$(OLDEST_VENV)

test-packages:
	build_tools/system_packages.sh test

venv: $(VENV)/.built

$(VENV)/.requirements: $(CONFIGURATION)
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found."; exit 1; }
	build_tools/system_packages.sh build "$(PYTHON)"
	@echo "Environment $(VENV): $$("$(PYTHON)" --version)"
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(PIP) install -c requirements/constraints.txt -r requirements/build.txt $$($(BIN)/python build_tools/dependencies.py dev)
	$(BIN)/python build_tools/xla_headers.py build/xla_headers
	@touch $@

# Editable: Python comes from the source tree, the extension from $(BUILD).
$(VENV)/.built: $(VENV)/.requirements $(CXX_FILES)
	headers=$$($(BIN)/python build_tools/xla_headers.py build/xla_headers) && \
	cuda=$$(ls -d $(CURDIR)/$(CUDA_VENV)/lib/python3*/site-packages/nvidia/cu*/include | tail -1) && \
	PATH="$(BIN):$$PATH" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) install -c requirements/constraints.txt --no-build-isolation \
	  --no-deps --editable . -C build-dir=$(BUILD) -C cmake.define.HOCCL_WERROR=$(WERROR) -C cmake.define.HOCCL_XLA_INCLUDE_DIR="$$headers" \
	  -C cmake.define.HOCCL_CUDA_INCLUDE_DIR="$$cuda"
	@touch $@

lint: $(VENV)/.requirements
	$(BIN)/pre-commit run --all-files

cpp-test: venv
	PATH="$(BIN):$$PATH" cmake $(BUILD) -DHOCCL_BUILD_TESTS=ON -Wno-dev
	PATH="$(BIN):$$PATH" cmake --build $(BUILD) --parallel $(JOBS)
	PATH="$(BIN):$$PATH" ctest --test-dir $(BUILD) --output-on-failure --parallel $(JOBS)

tsan asan: $(VENV)/.requirements
	PATH="$(BIN):$$PATH" cmake --preset $@ -DPython_EXECUTABLE=$(BIN)/python -DHOCCL_WERROR=$(WERROR)
	PATH="$(BIN):$$PATH" cmake --build build/$@ --parallel $(JOBS)
	PATH="$(BIN):$$PATH" $(NO_ASLR) ctest --test-dir build/$@ --output-on-failure --parallel $(JOBS)

bazel-test: venv
	$(NO_ASLR) bazel test //... --config=asan --jobs=$(JOBS) \
	  --repo_env=HOCCL_CUDA_INCLUDE_DIR="$$(sed -n 's/^HOCCL_CUDA_INCLUDE_DIR:[A-Z]*=//p' $(BUILD)/CMakeCache.txt)"

py-test: venv
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The same with the oldest supported jax, without the tests that any jax would do for. Skipped where Python 3.11 is the reference itself or is missing.
py-test-oldest:
	$(if $(OLDEST),$(MAKE) py-test VENV=$(OLDEST_VENV) CUDA_VENV=$(VENV) PYTHON="$(OLDEST)" PYTEST_ARGS='-m "not any_jax" $(PYTEST_ARGS)',@echo "No Python 3.11 beside the reference: nothing to do.")

oldest-requirements:
	$(if $(OLDEST),$(MAKE) $(OLDEST_VENV)/.requirements VENV=$(OLDEST_VENV) PYTHON="$(OLDEST)")

# Compiles for GPUs that are not there. In an environment of its own, because jax's CUDA plugin and compilers take 1.6 GB.
aot-test:
	$(MAKE) venv VENV=.venv-aot
	.venv-aot/bin/python -m pip --quiet install -c requirements/constraints.txt -r requirements/aot.txt
	$(MAKE) py-test VENV=.venv-aot PYTEST_ARGS=tests/aot

# A wheel as users get it: built apart, with the headers that pyproject.toml names.
wheel: venv
	$(PIP) wheel --no-deps --wheel-dir dist .

format: venv
	$(BIN)/ruff check --fix --quiet; $(BIN)/ruff format
	$(BIN)/clang-format -i $$(git ls-files --cached --others --exclude-standard '*.cc' '*.h')

# What the tests of an environment ran on.
report:
	@$(BIN)/python -c 'import jax, jaxlib, platform; from hoccl_jax import _native; \
	print(f"Python tests passed on Python {platform.python_version()}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")'

clean:
	rm -rf build dist .venv .venv-*
