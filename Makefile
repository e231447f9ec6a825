# make demo       generate a project and train it on 2 CPU ranks: stopped half-way, resumed by itself, a picture at the end
# make test       a cross-section of the tests; no root, 7 minutes on 2 cores
# make test-slurm what needs root: real jobs on a two-node Slurm on this machine, and pods in namespaces
# make test-update projects of every release, brought to the working tree; and the built package
# make test-more what make test leaves out of a project's own tests, of explain, the five post-mortems, the pages' commands, the recipes
# make test-skypilot  tests/skypilot, with SkyPilot's own code reading the task files: 400 MB of packages more
# make test-all   all of these, and what needs time or other Pythons: the fault matrix, pairs of options, all presets
# make test-long  what more of the same takes longest: larger families trained to what is promised, the rest of the pairs
# make release    VERSION=x.y.z: checks, changelog, version, the release's bundle, commit and tag
# make bench      times of the command line and of updates, sizes of the generated files
# make docs       the documentation site, into site/

PYTHON ?= python3
# An exact version, so that the demo and the tests are the same everywhere. Another one: make demo TORCH=torch
TORCH ?= torch==2.13.0
# Two modules at a time: most tests wait for processes that wait for each other. The Slurm tests share one cluster.
# `make test-update` takes a module apart when one worker has nothing left: the longest would come last.
PARALLEL ?= --numprocesses 2 --dist loadscope
# The cross-section takes three at a time, and takes a module apart when one worker has nothing left.
CROSS_SECTION ?= --numprocesses 3 --dist worksteal
PYTEST_OPTIONS ?=
PIP_OPTIONS ?= --quiet --disable-pip-version-check

.PHONY: demo test test-slurm test-update test-more test-skypilot test-all test-long bench docs clusters examples release clean

test test-slurm test-update test-more test-skypilot test-all test-long bench docs clusters examples release: export PATH := $(CURDIR)/.venv/bin:$(PATH)

demo: .venv-demo/done
	PATH="$(CURDIR)/.venv-demo/bin:$$PATH" bash examples/demo.sh demo

test: .venv/done
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/pytest $(PYTEST_OPTIONS) $(CROSS_SECTION) -m "not slow and not slurm and not pods"

test-all: .venv/done
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/pytest $(PYTEST_OPTIONS) $(PARALLEL) -m "not slurm and not pods and not long"
	.venv/bin/pytest $(PYTEST_OPTIONS) -m "(slurm or pods) and not long"

test-slurm: .venv/done
	.venv/bin/pytest $(PYTEST_OPTIONS) -m "(slurm or (pods and not slow)) and not long"

test-update: .venv/done
	.venv/bin/pytest $(PYTEST_OPTIONS) $(subst loadscope,worksteal,$(PARALLEL)) tests/update tests/adopt -m "not long"
	.venv/bin/pytest $(PYTEST_OPTIONS) $(PARALLEL) tests/cli/test_cli_install.py tests/cli/test_cli_template.py \
	  tests/faults -k "wheel or at_once or (written and restarted)"

test-more: .venv/recipes
	.venv/bin/pytest $(PYTEST_OPTIONS) $(PARALLEL) tests/runtime tests/docs tests/explain \
	  tests/families/test_post_mortems.py tests/skypilot -m "slow and not long"

test-skypilot: .venv/done .venv-skypilot/done
	SKYPILOT_PYTHON=$(CURDIR)/.venv-skypilot/bin/python .venv/bin/pytest $(PYTEST_OPTIONS) $(PARALLEL) tests/skypilot

test-long: .venv/done
	.venv/bin/pytest $(PYTEST_OPTIONS) -rP -m long

bench: .venv/done
	.venv/bin/python benchmarks/cli.py
	.venv/bin/python benchmarks/update.py
	.venv/bin/python benchmarks/size.py

docs: .venv/done
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

# CHECK is what has to pass before: `make release VERSION=1.2.3 CHECK=test-all` for all of it. First comes what needs a
# moment, and nothing but git. Which Python has copier is left to the PATH, on which .venv comes first.
CHECK ?= test
release:
	@$(PYTHON) releases/release.py --check $(VERSION)
	$(if $(CHECK),$(MAKE) $(CHECK))
	@python releases/release.py $(VERSION)

# docs/clusters/ holds a page for each preset, and the wizard's list a line; tests say when they are stale.
clusters: .venv/done
	.venv/bin/python tests/presets/preset_choices.py
	.venv/bin/python docs/make_clusters.py

# examples/ holds rendered projects; a test keeps them equal to a fresh render.
examples: .venv/done
	.venv/bin/python examples/render.py

.venv-demo/done: pyproject.toml
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python -m pip install $(PIP_OPTIONS) "$(TORCH)" numpy
	.venv-demo/bin/python -m pip install $(PIP_OPTIONS) --editable .
	touch $@

.venv/done: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install $(PIP_OPTIONS) "$(TORCH)" numpy
	.venv/bin/python -m pip install $(PIP_OPTIONS) --editable ".[test,docs]"
	touch $@

# What the pages of docs/recipes/ are about, for the tests of these pages.
.venv/recipes: .venv/done
	.venv/bin/python -m pip install $(PIP_OPTIONS) "$(TORCH)" --editable ".[test,docs,recipes]"
	touch $@

# An environment of its own: SkyPilot pins what others need in other releases.
.venv-skypilot/done: pyproject.toml
	$(PYTHON) -m venv .venv-skypilot
	.venv-skypilot/bin/python -m pip install $(PIP_OPTIONS) "skypilot==0.14.1"
	touch $@

clean:
	rm -rf .venv .venv-demo .venv-skypilot demo site dist
