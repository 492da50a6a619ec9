# One entry point for everything: `make` tells what there is.
# Needs Python >= 3.11; all else goes into .venv and is reinstalled only when what it is made of changes.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
CHAKRA := mlc-chakra==1.0.0
TORCH  := torch==2.14.1
PROTOC := grpcio-tools==1.75.1
# What an installation is made of; the loop of the clock is compiled.
BUILT   := pyproject.toml setup.py stagec/time/clock/loop.py stagec/time/clock/loop.pxd
SCHEMAS := stagec/formats/chakra/et_def.proto stagec/formats/perfetto/trace.proto

DEMO_DIR  := build/demo
DEMO_ARGS := llama3-8b -o $(DEMO_DIR) --tp 8 --dp 8 --sp --zero 3 --force

# Tests start hundreds of processes, which read compiled files instead of compiling them again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST  := $(BIN)/python -m pytest -n 2 --dist loadfile -q

.PHONY: help test test-ci test-all test-torch check demo bless docs site site-version pictures pages-check man bench mutants fuzz proto lit wheel clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make test    run the tests                     make check   linters, types, layers"
	@echo "make test-ci     ... all tests, each on three of its cases; of exhaustive cases one in 400"
	@echo "make test-all    all cases of all tests, half an hour"
	@echo "make demo    compile a Llama 3 8B for 64 GPUs  make bless   accept changed goldens"
	@echo "make docs    regenerate the generated docs     make bench   time the compiler"
	@echo "make site    the documentation as a site       make man     man pages, into build/man"
	@echo "make site-version    one version of the site, into the branch gh-pages (VERSION=0.2)"
	@echo "make lit     the lit suite, with stock lit     make proto   regenerate the trace schema"
	@echo "make pictures    draw the pictures of docs/gallery.md with Chromium"
	@echo "make pages-check look at pages (PAGES=step.html, AXE=axe.min.js)"
	@echo "make mutants make lines of passes wrong, one by one: their lit tests must notice (K=TEXT chooses)"
	@echo "make fuzz    try mutated inputs (FOR=600 seconds, SEED=1)"
	@echo "make wheel   build a wheel with the compiled clock, an sdist, and a wheel of published figures"
	@echo "make test-torch  record steps with PyTorch, compare with validation/torch-*"
	@echo "make clean   remove build outputs              make distclean   ... and .venv"

test: $(VENV)/.stamp-test
	$(PYTEST) -m 'not exhaustive and not long' --most=1 --hypothesis-profile=quick

test-ci: $(VENV)/.stamp-test
	$(PYTEST) --share=400 --most=3 --hypothesis-profile=quick

test-all: $(VENV)/.stamp-test
	$(PYTEST)

# PyTorch has an environment of its own: neither linters nor tests know it.
test-torch: build/torch/.stamp
	build/torch/bin/python -m tools.torch_memory torch-data-parallel
	build/torch/bin/python -m tools.torch_memory torch-tensor-parallel
	build/torch/bin/python -m tools.torch_memory torch-adapters
	build/torch/bin/python -m tools.torch_memory torch-experts
	build/torch/bin/python -m tools.torch_memory torch-pipeline
	build/torch/bin/python -m tools.torch_memory torch-context

build/torch/.stamp: pyproject.toml Makefile
	$(PYTHON) -m venv build/torch
	build/torch/bin/python -m pip --disable-pip-version-check --quiet install $(TORCH) -e .
	@touch $@

check: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; $(BIN)/pyright; right=$$?; wait $$types && exit $$right
	$(BIN)/lint-imports
	$(BIN)/python tools/lint_checks.py
	$(BIN)/python -m tools.size --check
	$(BIN)/codespell *.md docs ir_spec passes stagec tools validation
	$(BIN)/python -m tools.words

demo: $(VENV)/.stamp-run
	$(BIN)/stagec compile $(DEMO_ARGS)

bless: $(VENV)/.stamp-test
	$(BIN)/stagec test tests/lit --bless

lit: $(VENV)/.stamp-test
	$(BIN)/lit -v tests/lit

docs: $(VENV)/.stamp-run
	$(BIN)/python -m tools.gen_tables
	$(BIN)/python -m tools.gen_docs

# Strict: a link or an anchor that leads nowhere fails.
site: $(VENV)/.stamp-site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site
	@echo "build/site/index.html"

# One of several versions, which the branch gh-pages keeps; nothing is pushed.
VERSION ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
site-version: $(VENV)/.stamp-site
	PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $(VERSION) latest
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/mike set-default latest

pictures: $(VENV)/.stamp-run
	$(BIN)/python -m tools.pictures

# PAGES are files that commands wrote with --html, AXE is axe.min.js of the npm package axe-core.
pages-check: $(VENV)/.stamp-run
	$(BIN)/python -m tools.pages_check $(or $(AXE),-) build/pages $(PAGES)

man: $(VENV)/.stamp-test
	$(BIN)/python -m tools.man build/man

bench: $(VENV)/.stamp-run
	$(BIN)/python tools/bench.py

# Wrong lines, each of which the lit folder of its pass must notice; K chooses some.
K ?=
mutants: $(VENV)/.stamp-test
	$(BIN)/python -m tools.mutants -k '$(K)'

# Inputs with new faults go to build/fuzz; tools/fuzz.py has more options.
FOR ?= 600
SEED ?= 1
fuzz: $(VENV)/.stamp-test
	$(BIN)/python -m tools.fuzz --seconds $(FOR) --seed $(SEED)

# Generated code refuses a protobuf older than its own: the compiler is that of our lower bound.
# Its environment is apart, since that compiler's pins may conflict with what is installed.
proto:
	$(PYTHON) -m venv build/protoc
	build/protoc/bin/python -m pip --disable-pip-version-check --quiet install $(PROTOC)
	build/protoc/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. $(SCHEMAS)

# For this Python and this Linux; `auditwheel repair build/wheels/stagec-*.whl` makes one for others.
wheel: | $(BIN)/python
	$(PIP) install build
	$(BIN)/python -m build --outdir build/wheels .
	$(BIN)/python -m build --wheel --outdir build/wheels validation
	@ls build/wheels

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# A half-made environment is removed, so that the next run starts afresh.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("stagec needs Python 3.11 or newer; this is %d.%d: make PYTHON=python3.12" % v[:2])'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || $(PYTHON) -m virtualenv $(VENV) || { rm -rf $(VENV); \
	  echo "cannot create a virtual environment: install python3-venv or virtualenv" >&2; exit 1; }

$(VENV)/.stamp-run: $(BUILT) | $(BIN)/python
	$(PIP) install -e .
	@touch $@

$(VENV)/.stamp-test: $(BUILT) | $(BIN)/python
	$(PIP) install -e '.[test]'
	$(PIP) install --no-deps $(CHAKRA)
	@touch $@ $(VENV)/.stamp-run

$(VENV)/.stamp-site: pyproject.toml $(VENV)/.stamp-run
	$(PIP) install -e '.[site]'
	@touch $@

$(VENV)/.stamp-dev: $(BUILT) | $(BIN)/python
	$(PIP) install -e '.[test,dev,site]'
	$(PIP) install --no-deps $(CHAKRA)
	@touch $@ $(VENV)/.stamp-test $(VENV)/.stamp-run $(VENV)/.stamp-site
