# Set-up, checks and demonstrations. Needs GNU make, pip and Python 3.11 or newer.
#   make demo    a server, and its predictions on one screen
#   make test    the whole suite
# Every target makes .venv from the pinned versions on first use: `make demo` and `make serve` install what they need,
# the others everything.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

# To use another interpreter: make setup PYTHON=/path/to/python3.12
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Stamps of an environment that serves and predicts, and of the complete one.
SERVES := $(VENV)/.serves
READY := $(VENV)/.ready
# More options for pip. On Linux the package index serves torch with 2 GB of CUDA libraries, which nothing
# here needs: to save them name an index of CPU wheels, PIP_OPTIONS='--extra-index-url https://...'.
PIP_OPTIONS ?=
# Where `make serve` listens.
HOST ?= 127.0.0.1
PORT ?= 8000
# More options for pytest, such as PYTEST_OPTIONS='-k devices'.
PYTEST_OPTIONS ?=
# Processes of the test targets. Three, because many tests wait for processes that they start.
JOBS ?= 3
# `make test-stress`: test files and how often each runs; by default two groups of files, 20 and 5 times.
STRESS_FILES ?=
STRESS_ROUNDS ?=
# `make demo VERBOSE=1` prints everything.
VERBOSE ?=
# Folder of the public tables (docs/data.md); only to measure accuracy anew.
PUBLIC_DATA ?=

# `make gpu-job`: the device to measure, and the folder of the job.
DEVICE ?= h100-sxm
# `make printed-outputs`: the pages; by default all.
PAGES ?=
GPU_JOB ?= gpu-job

.PHONY: help setup demo test test-fast test-nightly test-stress test-native test-browser serve check docs wheel accuracy figures
.PHONY: templates stored-answers printed-outputs gpu-job clean

help:
	@echo 'make setup         .venv with every extra and the cdmpp command'
	@echo 'make demo          predictions, a plan and an adaptation for GPUs this machine does not have (all of it: VERBOSE=1)'
	@echo 'make test          all tests but the nightly ones, and the notebooks (about 10 minutes on two cores)'
	@echo 'make test-fast     tests that are not marked slow (about 2 minutes on two cores)'
	@echo 'make test-nightly  benchmarks on tiny sizes, random requests, all networks, Ray, load (about 2 minutes)'
	@echo 'make test-stress   timing-sensitive tests repeatedly on busy processors (hours)'
	@echo 'make test-native   tests that need a C compiler, a linker or nvcc'
	@echo 'make test-browser  tests that need a browser'
	@echo 'make serve         keep a server running (HOST=127.0.0.1 PORT=8000)'
	@echo 'make check         ruff, mypy, import-linter, the CI workflow'
	@echo 'make docs          documentation site in site/'
	@echo 'make wheel         wheel and sdist in dist/, checked'
	@echo 'make accuracy      docs/accuracy.md and its figures (PUBLIC_DATA=DIR measures what is missing)'
	@echo 'make figures       the pictures of the README from the metrics of models/base'
	@echo 'make templates     the shipped lowered operators anew, with TVM'
	@echo 'make gpu-job       part files that measure a borrowed GPU (DEVICE=h100-sxm, docs/measuring.md)'
	@echo 'make stored-answers  the answers that tests/stored_answers compares with'
	@echo 'make printed-outputs  what the commands of README.md and docs/*.md print (PAGES=docs/llm.md: of one page)'

setup: $(READY)

# A broken download leaves no stamp behind, so the next call goes on where this one stopped.
# Arguments: number of packages, extra, more options of pip.
define make_venv
@test -n "$(PYTHON)" || { echo 'error: no python3 found; install Python 3.11 or name one: make setup PYTHON=...' >&2; exit 1; }
@"$(PYTHON)" -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and f"error: Python 3.11 or newer is needed, $(PYTHON) is {v}; name another: make setup PYTHON=...")'
@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV) || { echo 'error: $(PYTHON) cannot make a virtual environment (on Debian: apt install python3-venv)' >&2; rm -rf $(VENV); exit 1; }
@echo 'setting up $(VENV): about $(1) packages, once ...'
@PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --progress-bar off --disable-pip-version-check $(PIP_OPTIONS) $(3) --constraint constraints.txt --editable '.[$(2)]' 2>&1 | "$(PYTHON)" .ci/pip_progress.py
@touch $@
endef

$(READY): pyproject.toml constraints.txt
	$(call make_venv,180,all)
	@touch $(SERVES)

# Without --no-compile pip would compile ten times the files that the demonstration imports.
$(SERVES): pyproject.toml constraints.txt
	$(call make_venv,50,demo,--no-compile)

# Their processes would compile the package anew where the caller forbids files of bytecode.
demo serve test test-fast test-nightly test-stress: export PYTHONDONTWRITEBYTECODE :=

demo: $(SERVES)
	@echo 'starting a server on this machine (some seconds) ...'
	@$(BIN)/python -m cdmpp.cli.demo $(if $(VERBOSE),--verbose)

# The tests of a file run in one process because they share servers and trained models; tests/conftest.py puts files
# with slow tests first. Tests marked native, browser, gpu or load are skipped where their tool is missing.
# After a crash of one of its processes xdist may wait for ever, so a crash ends the run.
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(PYTEST_OPTIONS)
test: $(READY)
	@echo 'all tests but the nightly ones, and the notebooks: about 10 minutes on two idle cores'
	$(PYTEST) -m 'not nightly' tests --nbmake notebooks

test-fast: $(READY)
	@echo 'tests that are not marked slow: about 2 minutes on two idle cores'
	$(PYTEST) -m 'not slow and not nightly' tests

test-nightly: $(READY)
	@echo 'nightly tests: benchmarks on tiny sizes, random requests, all networks, Ray, load'
	$(PYTEST) -m nightly tests

test-stress: $(READY)
	$(BIN)/python -m tests.stress $(if $(STRESS_ROUNDS),--rounds $(STRESS_ROUNDS)) $(STRESS_FILES)

# pytest ends with 5 when it selects no test: that none carries the marker is no failure.
test-native test-browser: test-%: $(READY)
	@status=0; $(BIN)/python -m pytest $(PYTEST_OPTIONS) -m $* tests || status=$$?; \
	if [ $$status -eq 5 ]; then echo 'make $@: no test carries the marker $*, nothing to run'; status=0; fi; exit $$status

serve: $(SERVES)
	$(BIN)/cdmpp serve --host $(HOST) --port $(PORT)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

# Warnings are errors. Needs no network connection.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo 'open site/index.html'

# Builds in this environment, so it needs no network connection.
wheel: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/twine check --strict dist/*

# PUBLIC_DATA=DIR runs the studies that were not measured first: hours, resumable.
accuracy: $(READY)
	$(BIN)/python -m benchmarks.accuracy $(if $(PUBLIC_DATA),--public-data "$(PUBLIC_DATA)")

figures: $(READY)
	$(BIN)/python -m benchmarks.figures

templates: $(READY)
	$(BIN)/python -m cdmpp.programs.make_templates

# Commit the new answers alone, with the reason.
printed-outputs: $(READY)
	$(BIN)/python -m tests.printed_outputs $(PAGES)

stored-answers: $(READY)
	$(BIN)/python -m tests.stored_answers

# 300 tasks of GPU size, each with its default and at most 15 random schedules: about 3,300 programs. Takes nearly
# three hours on one core; resumable. PUBLIC_DATA=DIR adds Ansor's tasks and schedules.
gpu-job: $(READY)
	$(BIN)/cdmpp collect --build-only --standalone --target "cuda:$(DEVICE)" --schedules 15 --tasks 300 \
		$(if $(PUBLIC_DATA),--ansor "$(PUBLIC_DATA)/sched_ansor.parquet") --out "$(GPU_JOB)"

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
