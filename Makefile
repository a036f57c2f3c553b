# make demo: run it.  make test: test it.  Everything goes into $(VENV).
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch>=2.11
# Build the CUDA code when a GPU is visible or CUDA=1 is given; otherwise install the CPU reference alone.
CUDA ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo 1)
NO_CUDA := $(if $(filter 1,$(CUDA)),,KIMI_KERNELS_NO_CUDA=1)
BIN := $(VENV)/bin

.PHONY: venv install demo test smoke lint kernels check-cuda clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# torch first and by itself, so that TORCH decides which build is taken.
$(VENV)/.torch: | $(BIN)/python
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	touch $@

$(VENV)/.installed: setup.py pyproject.toml | $(VENV)/.torch
	$(NO_CUDA) $(BIN)/python -m pip install --quiet -e '.[server,test]'
	touch $@

venv: $(BIN)/python
install: $(VENV)/.installed

demo: install
	$(BIN)/python examples/demo.py

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

smoke: install
	$(BIN)/python -m engine generate --smoke

# With the packages installed, so that mypy sees their types.
lint: install
	$(BIN)/python -m pip install --quiet ruff==0.17.6 mypy==2.4.1 clang-format==23.1.5
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	find csrc -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp' | xargs $(BIN)/clang-format --dry-run --Werror

# The compiled module, beside the sources (needs nvcc).
kernels: | $(BIN)/python
	$(BIN)/python -m pip install --quiet setuptools wheel 'pybind11>=3.0' ninja
	$(BIN)/python setup.py build_ext --inplace

# No GPU needed: compiles each source for each arch, fails on spills, local memory, serialised wgmma or a missing instruction.
check-cuda: | $(BIN)/python
	$(BIN)/python -m pip install --quiet 'pybind11>=3.0' ninja nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
	$(BIN)/python csrc/check_build.py

clean:
	rm -rf build dist *.egg-info kimi_kernels/_C*.so
