# Every target starts from a bare machine: python3 with venv, a C++ compiler and make. Everything else goes into .venv.
PYTHON ?= python3
TORCH ?= 2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= build/gpu
# Errors alone: pip warns of indexes without a package and of newer versions of itself.
PIP := $(BIN)/pip --quiet --quiet
CPP := $(shell find csrc tests examples -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')
# The CUDA builds of torch bring their Triton.
TRITON_OF_2.13.0 := triton==3.7.1

# Wherever the environment says that Python is to keep nothing of what it compiles: hundreds of processes import torch.
unexport PYTHONDONTWRITEBYTECODE

# torch.compile wants one word in CXX, which may be several ("ccache g++") where something is built: a test that asks for
# what is built finds it in BUILT_WITH.
RUN := env $(if $(word 2,$(CXX)),--unset=CXX BUILT_WITH='$(CXX)')

.PHONY: install install-dev test test-full test-release test-all test-torch test-python lint format docs demo \
	demo-patch bench check-cuda-compile package wheels try-wheels release rehearse clean check-gpu

# Built by setup.py itself, as pip would not show how far it is; ninja finds out what there is to do.
install: $(VENV)/required
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@test $(VENV)/installed -nt pyproject.toml || $(PIP) install --no-build-isolation --no-deps --editable .
	@touch $(VENV)/installed

install-dev: $(VENV)/required-dev install

# Most modules of these packages are never imported: Python compiles those that are.
$(VENV)/required: requirements-demo.txt
	@echo "PyTorch $(TORCH) and what else the build and the demo need go into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --no-compile torch==$(TORCH) --requirement requirements-demo.txt
	@touch $@

$(VENV)/required-dev: requirements-dev.txt $(VENV)/required
	@echo "What the tests need goes into $(VENV)"
	@$(PIP) install --no-compile $(TRITON_OF_$(TORCH)) --requirement requirements-dev.txt
	@touch $@

# A process to a core. What a file needs is made once, by the process that has the file; the longest files come first
# (tests/conftest.py). Threads that wait for work sleep, as the processes have more of them than there are cores.
# torch.compile starts no processes of its own, and does not compile a program first to see whether it can.
PYTEST := $(RUN) OMP_WAIT_POLICY=passive TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1 \
	$(BIN)/python -m pytest --numprocesses auto

# Three tiers of tests: test runs those without a mark, test-full what CI runs, test-release the rest. The Triton kernels
# take the place of the CPU's in processes of their own, where an interpreter executes them.
CORE := not full and not release
CORE_ON_TRITON := triton and $(CORE)
test: TIER := $(CORE)
test-full: TIER := not release
test-full: TRITON_TIER := $(CORE_ON_TRITON)
test-release: TIER := release
test-release: TRITON_TIER := triton_release and $(CORE)
test test-full test-release: install-dev
	$(PYTEST) --dist loadfile --no-loadscope-reorder -m '$(TIER)'
	$(if $(TRITON_TIER),$(PYTEST) --triton -m '$(TRITON_TIER)')

test-all: test-full
	$(MAKE) test-release

# The same with another torch, in an environment of its own: a CUDA build of several GB.
test-torch:
	$(MAKE) test TORCH=$(TORCH) VENV=.venv-torch-$(TORCH) TRITON_TIER='$(CORE_ON_TRITON)'

# With another Python.
test-python:
	$(MAKE) test PYTHON=$(PYTHON) VENV=.venv-$(notdir $(PYTHON)) TRITON_TIER='$(CORE_ON_TRITON)'

lint: $(VENV)/required-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

format: $(VENV)/required-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

# The pages and the API reference, with warnings as errors: links and references that lead nowhere are warnings.
docs: install-dev
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --fresh-env docs build/docs
	@echo "Open build/docs/index.html"

demo: install
	@$(RUN) $(BIN)/python examples/baby_llama.py $(ARGS)

demo-patch: install-dev
	@$(RUN) $(BIN)/python examples/patched_model.py $(ARGS)

bench: install-dev
	$(RUN) $(BIN)/python -m bench $(ARGS)

# Needs nvcc on PATH, and no GPU: compiles every CUDA kernel, and reads what became of it.
check-cuda-compile:
	FORCE_CUDA=1 TORCH_CUDA_ARCH_LIST=all $(MAKE) install-dev
	FORCE_CUDA=1 $(BIN)/python -m pytest tests/gpu/test_cuda_compile.py

# Needs an NVIDIA GPU, nvcc and a $(PYTHON) with a CUDA build of torch, ninja, pytest and rich, and downloads nothing.
# Nine minutes at most for each step of STEP. WHEELS is a folder of implementations to measure beside; with DEVICE=cpu it
# is a rehearsal.
STEP ?= 1
DEVICE ?= cuda
check-gpu:
	status=0; for step in $(STEP); do \
		$(PYTHON) -m bench.check_gpu --step $$step --device $(DEVICE) --out $(OUT) \
			$(if $(WHEELS),--wheels $(WHEELS)) || status=1; done; exit $$status

# An sdist, a wheel made from it, and that wheel installed into a fresh environment, where the sources are not: a part of
# the tests runs there.
WHEEL_TESTS := $(addprefix tests/,$(addprefix operators/test_,add_rms_norm.py gated_rms_norm.py module.py \
	rms_norm_rope.py rms_norm_stats.py) pytorch/test_autograd.py)
package: $(VENV)/required-dev
	rm -rf dist build/fresh
	$(BIN)/python -m build --no-isolation
	$(PYTHON) -m venv build/fresh
	build/fresh/bin/pip install --quiet --no-compile torch==$(TORCH) numpy pytest allpairspy
	build/fresh/bin/pip install --quiet dist/*.whl
	cd build/fresh && bin/python -m normops
	cp -r tests reference pyproject.toml build/fresh
	cd build/fresh && bin/python -m pytest --quiet -m '$(CORE)' $(WHEEL_TESTS)

# One wheel for all of these, into wheels/: for the $(PYTHON) of this environment, with CUDA code for every architecture
# if there is nvcc. Of each torch the headers and libraries are fetched.
TORCHES ?= 2.11.0 2.12.0 2.13.0 2.14.1 2.15.0
nothing :=
space := $(nothing) $(nothing)

wheels: $(VENV)/required-dev
	for torch in $(TORCHES); do test -f build/torches/$$torch/torch/version.py || \
		$(BIN)/pip install --quiet --no-deps --target build/torches/$$torch torch==$$torch || exit 1; done
	rm -rf build/wheel build/lib.* && mkdir -p wheels
	TORCH_CUDA_ARCH_LIST=all NORMOPS_TORCH_FOLDERS=$(subst $(space),:,$(foreach torch,$(TORCHES),build/torches/$(torch)/torch)) \
		$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel
	PATH=$(CURDIR)/$(BIN):$$PATH auditwheel repair --strip --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir wheels build/wheel/*.whl
	$(MAKE) try-wheels

# The wheel as a user gets it: by name, from a folder, without a compiler on PATH, into fresh environments of the oldest
# and the newest torch, with the CUDA packages that they want.
TRIED ?= $(sort $(firstword $(TORCHES)) $(lastword $(TORCHES)))
IMPORT := import time, torch; start = time.perf_counter(); import normops; \
	print(f"seconds to import after torch: {time.perf_counter() - start:.2f}")
try-wheels: SHELL := bash
try-wheels:
	set -e; ls -l wheels; for torch in $(TRIED); do \
		echo "torch $$torch"; rm -rf build/tried; $(PYTHON) -m venv build/tried; \
		build/tried/bin/pip install --quiet torch==$$torch numpy pytest allpairspy; \
		cp -r tests reference pyproject.toml build/tried; \
		(cd build/tried; export PATH=$$PWD/bin TIMEFORMAT="seconds to install: %R"; \
		time pip install --quiet --no-index --find-links $(CURDIR)/wheels normops; \
		python -c '$(IMPORT)'; python -m normops; python -m pytest --quiet -m '$(CORE)' $(WHEEL_TESTS)); \
	done

# A release without its publication (docs/notes/releasing.md), from a clean clone of HEAD. The first failure ends it.
release:
	rm -rf build/release && git clone --quiet . build/release
	$(MAKE) --directory build/release rehearse

rehearse:
	grep --max-count 1 '^## ' CHANGELOG.md | grep --fixed-strings "## $$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) "
	$(MAKE) lint
	$(MAKE) docs
	if command -v nvcc > /dev/null; then $(MAKE) check-cuda-compile; fi
	$(BIN)/python -m build --sdist --no-isolation
	$(MAKE) wheels
	sha256sum dist/*.tar.gz wheels/*.whl > build/SHA256SUMS && cat build/SHA256SUMS

clean:
	rm -rf build dist *.egg-info normops/*.so normops/torch-* $(VENV)/installed
