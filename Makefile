# Everything runs in .venv, which `make install` makes. Nothing here needs a GPU.

VENV := .venv
BIN := $(VENV)/bin
# Written last, so an install that was cut short is never taken for a good one.
STAMP := $(VENV)/.installed

DEMO ?= models.demo
# One worker a core of a small machine: each test process simulates 8 devices with threads of its own.
WORKERS ?= 2
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(if $(SHARD),--shard $(SHARD))

# The versions that everything was tested with; LOCK=/dev/null takes the newest.
LOCK ?= requirements.lock

# Compiling for a GPU that is not there needs JAX itself to run on the CPU.
JAX_PLATFORMS ?= cpu
export JAX_PLATFORMS

# Tests that compile nothing, or next to nothing.
QUICK := $(addprefix tests/,plan cost flags parallelism profiling passes/analysis passes/estimation passes/layouts \
	passes/planning passes/scheduling docs/test_words.py test_packages.py)

.PHONY: help install demo check quick test test-all docs lint format wheel lines nightly lab lock clean FORCE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

install: $(STAMP) ## make .venv with the package, its examples and the developer's tools

# A finished environment is brought up to date in place; anything else is made anew, also one whose
# interpreter has gone (a link to nothing is not found by realpath).
$(STAMP): pyproject.toml $(LOCK) $(if $(realpath $(BIN)/python),,FORCE)
	@if [ -f $(STAMP) ] && $(BIN)/python -m pip --version >/dev/null 2>&1; then rm $(STAMP); \
	else python=$$(tools/find-python) && echo "making $(VENV) with $$python" && \
		"$$python" -m venv --clear $(VENV); fi
	$(BIN)/python -m pip install --disable-pip-version-check --constraint $(LOCK) --editable '.[dev]'
	@touch $(STAMP)

demo: install ## train a small model with and without overlap
	$(BIN)/python -m $(DEMO)

check: install ## lint, types and the tests that compile nothing; for every edit
	@$(MAKE) --no-print-directory --jobs 2 lint quick

quick: install ## the tests that compile nothing
	$(BIN)/pytest -q -n $(WORKERS) -m "not nightly and not pods" --ignore tests/parallelism/pipeline $(QUICK)

test: lint ## lint, types, import order, and the tests that the change can reach
	$(PYTEST) --reach

test-all: lint ## the same with every test; SHARD=1/2 takes one of two halves
	$(PYTEST)

docs: install ## build the site in out/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

lint: install ## check style, types and who imports whom
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

format: install ## fix style and layout
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

wheel: install ## build dist/*.whl, and try it without the checkout
	$(BIN)/python -m build --wheel
	$(BIN)/pytest -q -m nightly tests/test_wheel.py

lines: install ## count the lines of code of the package
	$(BIN)/python tools/count-lines

nightly: install ## run the tests that take too long for every change
	SEEDS=all $(PYTEST) -m "nightly or rotating"

lab: install ## race on hosts with slow links, on this machine (root)
	$(BIN)/python -m benchmarks.lab

lock: ## write the installed versions into requirements.lock
	$(BIN)/python -m pip freeze --exclude-editable --exclude pip --exclude setuptools > $(LOCK)

clean: ## remove .venv, downloads, caches and build outputs
	rm -rf $(VENV) .python build dist *.egg-info out
	rm -rf .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.* htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
