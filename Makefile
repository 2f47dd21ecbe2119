# Everything runs in .venv, made with the python3 found first; another one: make PYTHON=python3.12 …

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

EXTRAS_demo := examples
EXTRAS_test := test,examples
EXTRAS_lint := test,lint,examples
EXTRAS_coverage := test
EXTRAS_fuzz := fuzz
EXTRAS_docs := docs,dashboard
EXTRAS_models := test,examples,models,dashboard
EXTRAS_engines := test,engines
EXTRAS_package := test,package
FUZZ_SECONDS := 60

DEMO := $(BIN)/psync run examples/digits.py --ps 2 --workers 2

# Run an example, which checks its own numbers; show what it prints, and look for a line in it.
printing = $(BIN)/psync run examples/$(2) > out/examples/printed.txt; code=$$?; cat out/examples/printed.txt; \
	test $$code = 0 && grep -q $(1) out/examples/printed.txt

.PHONY: help docs docs-here pages pages-here pictures models models-here engines engines-here package package-here pythons gallery demo demo-short examples test test-first test-second contract contract-first contract-second test-more more-processes more-processes-too more-others test-full test-all full promises \
	chaos chaos-short sim sim-mutants coverage lint fuzz bench bench-peers bench-scaling clean
.DELETE_ON_ERROR:

help:
	@echo "make demo         train on 2 ps and 2 workers, all on this machine"
	@echo "make demo-short   the same, three epochs"
	@echo "make examples     the other examples"
	@echo "make test         the test suite: every test that is not slow, once; four minutes"
	@echo "make contract     the tests of it that hold whatever is inside: three minutes"
	@echo "make test-more    the rest of it: slow tests, real processes, the stock loop; test-full: what takes minutes; test-all: all"
	@echo "make promises     each promise of GUARANTEES.md, and its tests"
	@echo "make docs         the site, in out/site; a warning is an error, and internal links are checked"
	@echo "make pages        every code block of README and site runs, and prints what the page says; pictures: draws theirs"
	@echo "make models       models of torch, JAX and Keras, notebooks: tests and examples, in an environment of their own"
	@echo "make engines      clusters on Ray and Dask: a node removed, a worker killed; in an environment of their own"
	@echo "make gallery      the programs of docs/howto/gallery.md in full, ten minutes; their plots in out/gallery"
	@echo "make package      wheel and sdist: built twice, compared, installed on each Python of this machine"
	@echo "make pythons      the test suite on the other Pythons of this machine, each in an environment of its own"
	@echo "make full         before a release: test-full, pages, package, pythons, models, engines, gallery, coverage, fuzz, sim with 20000 seeds, sim-mutants, chaos"
	@echo "make chaos        train for a quarter of an hour while tasks are killed, stopped and cut off; chaos-short: one minute"
	@echo "make sim          simulate whole clusters that things happen to: SEEDS=300 of them from SEED=1; REPLAY=17 shows one"
	@echo "make sim-mutants  rules that are wrong on purpose: which oracle notices, after how many seeds"
	@echo "make coverage     every branch of the rules and of the wire, by tests of pure modules alone"
	@echo "make fuzz         what comes from outside, attacked for a minute a target (FUZZ_SECONDS=600 for longer)"
	@echo "make lint         style, types, import law; what type checkers find in programs of users"
	@echo "make bench        throughput; synchronous beside asynchronous training"
	@echo "make bench-scaling  what one closure, step, variable or byte costs as there are more"
	@echo "make bench-peers  psync beside TensorFlow, torch RPC and Ray, in an environment of their own"
	@echo "make clean        remove what these made"

demo: $(VENV)/.installed-demo
	$(DEMO)

demo-short: $(VENV)/.installed-demo
	$(DEMO) -- --epochs 3 --short

examples: $(VENV)/.installed-demo
	@rm -rf out/examples && mkdir -p out/examples
	$(call printing,'^step 300: loss 0.01',sync_replicas.py --ps 2 --workers 3)
	$(call printing,'^epoch 1: \([0-9]*\) of \1 shards done$$',embeddings.py --ps 2 --workers 2 -- --quick)
	$(call printing,'^epoch 1/3: ',fit.py --ps 2 --workers 2 -- --epochs 3 --out out/examples/fit)
	$(call printing,'^epoch 4/5: ',fit.py --ps 2 --workers 2 -- --epochs 5 --out out/examples/fit)
	@! grep '^epoch 1/5: ' out/examples/printed.txt

# In full: ten minutes. docs/images/gallery has the pictures of such a run; their short forms are in test-full.
gallery: export OMP_NUM_THREADS = 1
gallery: $(VENV)/.installed-demo
	$(BIN)/psync run examples/gallery/digits_modes.py --ps 2 --workers 4
	$(BIN)/psync run examples/gallery/matrix_factorization.py --ps 2 --workers 2
	$(BIN)/psync run examples/gallery/wide_and_deep.py --ps 2 --workers 3
	$(BIN)/psync run examples/gallery/local_steps.py --ps 1 --workers 4
	$(BIN)/psync run examples/gallery/evolution.py --ps 1 --workers 8
	$(BIN)/python examples/gallery/search.py

# What is in test is decided in tests/conftest.py: tests marked slow (and not smoke), and the stock loop, are in test-more.
# Two jobs run at a time; each shows what it printed when it ends.
test: $(VENV)/.installed-test
	@$(MAKE) -j2 --output-sync=target test-first test-second

test-first: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -m "not more and not full" --part 1/2

test-second: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -m "not more and not full" --part 2/2

# Files that import public modules only. They are named, so that no other file has to be importable.
CONTRACT = $$($(BIN)/python tests/helpers/contract.py) -m "not more and not full"

contract: $(VENV)/.installed-test
	@$(MAKE) -j2 --output-sync=target contract-first contract-second

contract-first: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q $(CONTRACT) --part 1/2

contract-second: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q $(CONTRACT) --part 2/2

# Tests that start processes wait for these most of the time, so half of them, and the others, run beside them.
test-more: $(VENV)/.installed-test
	@$(MAKE) -j3 --output-sync=target more-others more-processes more-processes-too

more-processes: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -m more --part 1/2 tests/processes

more-processes-too: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -m more --part 2/2 tests/processes

more-others: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -m more --ignore=tests/processes

test-full: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -m full

test-all: test test-more test-full

promises: | $(VENV)/.created
	@$(BIN)/python tests/helpers/promises.py

# Libraries of models are large: an environment of their own has all of them. They compute in one thread here.
models:
	@$(MAKE) VENV=.venv-models models-here

# Without test_ssh.py, whose processes JAX's threads warn of: make test runs it.
models-here: export OMP_NUM_THREADS = 1
models-here: $(VENV)/.installed-models
	$(BIN)/python -m pytest -q tests/integrations -m "not slow" --ignore=tests/integrations/test_ssh.py
	KERAS_BACKEND=torch $(BIN)/python -m pytest -q tests/integrations/keras -m "not slow"
	$(BIN)/psync run examples/torch_digits.py --ps 2 --workers 2
	$(BIN)/psync run examples/torch_embeddings.py --ps 2 --workers 2
	$(BIN)/psync run examples/jax_digits.py --ps 2 --workers 2
	$(BIN)/psync run examples/keras_fit.py --ps 2 --workers 2

# Sphinx and the theme are in an environment of their own, too.
docs:
	@$(MAKE) VENV=.venv-docs docs-here

docs-here: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet -b html docs out/site
	$(BIN)/python tests/helpers/site_links.py out/site

pages:
	@$(MAKE) VENV=.venv-models pages-here

pages-here: export PSYNC_PAGES = all
pages-here: $(VENV)/.installed-models
	$(BIN)/python -m pytest -q tests/pages

# The pictures that pages show, by the programs that stand there and by those of docs/pictures.
pictures: export PSYNC_PICTURES = 1
pictures: pages
	.venv-models/bin/python docs/pictures/modes.py docs/images/modes.png

# Ray and Dask clusters of several processes, all on loopback.
engines:
	@$(MAKE) VENV=.venv-engines engines-here

engines-here: export OMP_NUM_THREADS = 1
engines-here: $(VENV)/.installed-engines
	$(BIN)/python -m pytest -q tests/integrations/test_ray*.py tests/integrations/test_dask*.py

# Wheel and sdist, and the wheel in an empty environment for each Python: dependencies come from the package index.
package:
	@$(MAKE) VENV=.venv-package package-here

package-here: $(VENV)/.installed-package
	$(BIN)/python -m pytest -q tests/packaging

# Each Python that tests/helpers/pythons.py finds, and PSYNC_PYTHONS=/opt/python3.14/bin adds, but the one of .venv. On the
# newest ones some extra may have no wheel yet; then its tests are skipped, as they are without it.
pythons: $(VENV)/.installed-test
	@own=$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	$(BIN)/python tests/helpers/pythons.py | while read -r version python; do \
		test "$$version" = "$$own" || $(MAKE) VENV=.venv-$$version PYTHON=$$python test < /dev/null || exit 1; \
	done

full: SEEDS := 20000
full: test-full pages package pythons models engines gallery coverage fuzz sim sim-mutants chaos

# Ten minutes and three with backups, half of them synchronous. Another seed: make chaos SEED=2
SEED := 1
chaos: $(VENV)/.installed-test
	$(BIN)/python -m psync.testing.chaos --seed $(SEED) --minutes 10 --mode both --cuts 15 \
		--at-least worker=50,ps=20,chief=5
	$(BIN)/python -m psync.testing.chaos --seed $(SEED) --minutes 3 --recovery backup --mode both --at-least worker=15,ps=8

chaos-short: $(VENV)/.installed-test
	$(BIN)/python -m psync.testing.chaos --seed 15 --minutes 0.7 --mode both --at-least worker=4,ps=3,chief=1

# Another shape: make sim SIM="--shape sync-replica". What else there is: make sim SIM=--help
SEEDS := 300
sim: $(VENV)/.installed-test
	$(BIN)/python -m psync.testing.simulation --keep out/sim --seeds $(SEEDS) --seed $(SEED) $(if $(REPLAY),--replay $(REPLAY)) $(SIM)

# Each rule that is wrong on purpose has to be noticed: an hour at most.
sim-mutants: $(VENV)/.installed-test
	$(BIN)/python -m psync.testing.simulation --mutants --seeds 2000 --seed $(SEED)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/python -m pytest -q tests/test_law.py tests/typing

# Every branch of the pure modules is reached by the rule suite: the tests that import nothing else (tests/helpers/law.py).
coverage: $(VENV)/.installed-coverage
	$(BIN)/python -m pytest -q -m "not slow" $$($(BIN)/python tests/helpers/law.py) \
		--cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=100

fuzz: $(VENV)/.installed-fuzz
	nice $(BIN)/python fuzz/run.py --seconds $(FUZZ_SECONDS)

bench: $(VENV)/.installed-demo
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/embeddings.py
	$(BIN)/psync bench sync-async --out out

# What one closure, step, variable or byte costs as there are more: an hour. A few minutes: make bench-scaling SCALING=--quick
bench-scaling: $(VENV)/.installed-demo
	$(BIN)/python benchmarks/scaling.py $(SCALING) --out out

# psync beside what else there is: minutes to install, and twenty to run.
bench-peers: $(VENV)/.installed-demo .venv-peers/.installed
	$(BIN)/psync bench peers --peers .venv-peers/bin/python --out out

.venv-peers/.installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

clean:
	rm -rf $(VENV) .venv-* build dist out htmlcov .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp for each set of extras: pip runs again only when the requirements have changed.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/.created
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS_$*)]'
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("psync needs Python 3.11 or newer, and $(PYTHON) is %d.%d; call make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	@touch $@
