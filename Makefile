# Everything runs in .venv, made with the python3 found first; another one: make PYTHON=python3.12 …

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

EXTRAS_demo := examples
EXTRAS_test := test,examples
EXTRAS_lint := test,lint
EXTRAS_coverage := test

# What decides, and what reads bytes, is tested without an event loop, every branch of it.
RULES := errors specs cluster partitioners placement sums accumulators sparse_accumulators schedules \
	update_rules blocks shards means store ledger closure_states dispatching closures membership \
	sync_config tokens sync_groups sync_steps staging schedule_report round_clocks session_members \
	pulled_steps
WIRE := limits tensors frames codec messages handshake protocol remote_errors

DEMO := $(BIN)/psync run examples/digits.py --ps 2 --workers 2

.PHONY: help demo demo-short examples test coverage lint bench clean
.DELETE_ON_ERROR:

help:
	@echo "make demo         train on 2 ps and 2 workers, all on this machine"
	@echo "make demo-short   the same, three epochs"
	@echo "make examples     the other examples"
	@echo "make test         the test suite"
	@echo "make coverage     every branch of the rules and of the wire, by their own tests"
	@echo "make lint         style, types, import law"
	@echo "make bench        throughput; synchronous beside asynchronous training"
	@echo "make clean        remove what these made"

demo: $(VENV)/.installed-demo
	$(DEMO)

demo-short: $(VENV)/.installed-demo
	$(DEMO) -- --epochs 3 --short

examples: $(VENV)/.installed-demo
	$(BIN)/psync run examples/sync_replicas.py --ps 2 --workers 3

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/python -m pytest -q tests/test_layers.py

coverage: $(VENV)/.installed-coverage
	$(BIN)/python -m pytest -q $(RULES:%=tests/test_%.py) tests/wire \
		$(RULES:%=--cov=psync.%) $(WIRE:%=--cov=psync.wire.%) \
		--cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=100

bench: $(VENV)/.installed-demo
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/psync bench sync-async --out out

clean:
	rm -rf $(VENV) build dist out htmlcov .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp for each set of extras: pip runs again only when the requirements have changed.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/.created
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS_$*)]'
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("psync needs Python 3.11 or newer, and $(PYTHON) is %d.%d; call make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	@touch $@
