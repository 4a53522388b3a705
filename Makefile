# Every target does its own set-up, says what it does, and is quick the second time. `make help` lists them.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Where the CPU build of torch is, when pip's own index only has the CUDA build: the address of a wheel index, such as
# PyTorch's CPU one. A build with "+cpu" in its version is taken before any other.
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet --quiet
# Scenarios say `torchrun`, as they would in an activated environment.
ACTIVE := PATH="$(CURDIR)/$(BIN):$$PATH"
TORCH_STAMP := $(VENV)/.$(subst =,,$(TORCH))
SCENARIO ?= scenarios/process/kill-rank.yaml
PACKAGES := plugin harness injectors assertions scenarios

# The tiers of tests, by the markers in pyproject.toml. Each test is in one of them: tests/packaging/test_tiers.py.
TEST := not (long or system or slow) and (not job or smoke)
TEST_ALL := not long and (system or slow or job and not smoke)
TEST_LONG := long
# Folders whose tests need no torch, and hardly another process.
FAST := $(addprefix tests/,analysis assertions diagnosis gameday minimize probes record registry release reporting running scenario)
PYTEST := $(ACTIVE) python -m pytest -q

# Python writes its byte code, also where the environment forbids it: hundreds of processes import the same modules.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-fast test-all test-long test-agent-versions check check-style check-types check-imports links bench docs clean system

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 28

setup: $(VENV)/.tools ## make .venv with pinned versions of everything, and torchaos in it (editable)

demo: $(VENV)/.torchaos ## kill a rank of a live training job, and judge the recovery
	@echo "== torchaos run $(SCENARIO)"
	@$(ACTIVE) torchaos run $(SCENARIO)

test: $(VENV)/.tests ## run the tests that need no root, and nothing of the system; with ten real jobs: eight minutes
	@echo "== tests, three at a time: jobs wait a lot"
	@$(PYTEST) -m "$(TEST)" --numprocesses 3 --dist worksteal --durations 20

test-fast: $(VENV)/.tests ## run those of them that need no torch: two minutes
	@$(PYTEST) -m "$(TEST) and not job" --numprocesses 2 --dist worksteal $(FAST)

test-all: setup system ## run the others, less those that take minutes; as root on Debian it installs what they need
	@echo "== tests of the system, slow ones, and jobs, three at a time: they wait a lot. Those of one file share fixtures"
	@$(PYTEST) -m "$(TEST_ALL)" --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 30

test-long: setup system ## run the tests that take minutes
	@echo "== tests marked long"
	@$(PYTEST) -m "$(TEST_LONG)"

test-agent-versions: system ## run the agent's tests on the oldest and the newest Python and torch that we promise
	@ci/test-agent-versions

check: check-style check-imports check-types ## lint, format, types, and who may import whom

check-style: setup
	@echo "== ruff"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

check-imports: setup links
	@echo "== imports"
	@PYTHONPATH=.links $(BIN)/lint-imports --no-logo --no-cache

check-types: setup links
	@echo "== mypy --strict"
	@$(BIN)/mypy .links/torchaos tests

bench: setup ## measure what the agent and the harness cost
	@echo "== benchmarks"
	@$(ACTIVE) python lab/bench

# Without the theme's notice of its successor.
docs: setup ## build the docs as a site that opens offline: build/site/index.html
	@echo "== mkdocs build"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

# Static tools can't follow the mapping from torchaos.harness to harness/, so they get folders of links.
links: $(PACKAGES:%=.links/torchaos/%) ## make .links, which mypy and editors read

.links/torchaos/%:
	@mkdir -p $(@D)
	@ln -sfn ../../$* $@

system:
	@ci/install-system

clean: ## remove what the targets above made, .venv too
	rm -rf $(VENV) .links build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.made:
	@ci/make-venv $(PYTHON) $(VENV)
	@touch $@

# First and on its own: whatever is installed later finds torch there and does not fetch another build. The name of the
# stamp holds the version, so that another TORCH is seen.
$(TORCH_STAMP): $(VENV)/.made ci/constraints.txt
	@echo "== installing $(TORCH) (the CPU build is 0.2 GB; a CUDA build, several: see TORCH_INDEX in the Makefile)"
	@$(PIP) install -c ci/constraints.txt $(TORCH) numpy $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	@rm -f $(VENV)/.torch*
	@touch $@

$(VENV)/.torchaos: $(TORCH_STAMP) pyproject.toml setup.py injectors/native/nvtx/stall.c ci/constraints.txt
	@echo "== installing torchaos"
	@$(PIP) install -c ci/constraints.txt "setuptools>=77"
	@$(PIP) install -c ci/constraints.txt --no-build-isolation --editable .
	@touch $@

$(VENV)/.tests: $(VENV)/.torchaos ci/requirements-test.txt
	@echo "== installing what the tests use"
	@$(PIP) install -c ci/constraints.txt -r ci/requirements-test.txt
	@touch $@

$(VENV)/.tools: $(VENV)/.tests ci/requirements.txt ci/docs/requirements.txt
	@echo "== installing tools, and the trainers of other tests"
	@$(PIP) install --no-compile -c ci/constraints.txt -r ci/requirements.txt # little of them is ever imported
	@touch $@
