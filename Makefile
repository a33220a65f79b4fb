# Two commands do everything on a fresh machine: `make demo` and `make test`. Each makes its own .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RANKS_ENV := OMP_NUM_THREADS=1
# What sentinel is measured against has an environment of its own: sentinel needs none of it.
RIVALS := .venv-rivals
RIVALS_READY := $(RIVALS)/.ready
RIVALS_LIST := tests/benchmarks/rivals/requirements.txt
RIVALS_PIP = $(RIVALS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Test files that run side by side; WORKERS=0 runs one after the other.
WORKERS ?= 2

.PHONY: demo test check lint types contracts unit long bench bench-overhead docs clean

demo: $(READY)  ## train, break, repair and explain a small model
	$(BIN)/sentinel demo --out demo-out

test: check unit  ## everything that CI asks for

check: lint types contracts  ## what needs no run

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

contracts: $(READY)
	$(BIN)/lint-imports --no-cache

unit: $(READY)  ## tests, and the line coverage of sentinel/ with what they start
	$(RANKS_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --cov --cov-report=term tests

long: $(READY)  ## campaigns with real processes, complete
	$(RANKS_ENV) SENTINEL_TEST_LONG=1 $(BIN)/python -m pytest tests -m long

bench: $(READY)  ## speed, as ratios against a named floor
	$(RANKS_ENV) $(BIN)/python -m tests.benchmarks

bench-overhead: $(RIVALS_READY)  ## sentinel beside other trackers; writes docs/performance.md
	$(RANKS_ENV) $(RIVALS)/bin/python -m tests.benchmarks.rivals

docs: $(READY)  ## write the generated documents again
	$(BIN)/python -m sentinel.respond.kinds > docs/kinds.md
	$(BIN)/python -m tests.generated_docs
	$(BIN)/python -m tests.docker.settings_file

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'torch' -e '.[dev]'
	touch $(READY)

# A tracker that cannot be installed here is named in the table as such; the others are measured.
$(RIVALS_READY): pyproject.toml constraints.txt $(RIVALS_LIST)
	test -x $(RIVALS)/bin/python || $(PYTHON) -m venv $(RIVALS)
	$(RIVALS_PIP) torch -e '.[daemon]'
	$(RIVALS_PIP) -r $(RIVALS_LIST) || \
		for one in $$(grep -v '^#' $(RIVALS_LIST)); do $(RIVALS_PIP) "$$one" || echo "$$one cannot be installed"; done
	touch $(RIVALS_READY)

clean:
	rm -rf $(VENV) $(RIVALS) demo-out .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis
