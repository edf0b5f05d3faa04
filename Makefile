# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
# pinned: the version in constraints.txt; newest: the newest that pip finds, in a folder of its own
TORCH ?= pinned
ifeq ($(TORCH),pinned)
VENV := .venv
CONSTRAINTS := constraints.txt
else ifeq ($(TORCH),newest)
VENV := .venv-newest
CONSTRAINTS := $(VENV)/constraints.txt
else
$(error TORCH=$(TORCH): it is pinned or newest)
endif
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)

# a worker has up to ten processes, most of which wait
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((n < 2 ? 2 : n > 4 ? 4 : n)))
# twice as many for `make test`, whose tests wait for timers, servers and each other half of the time
TEST_WORKERS ?= $(shell n=$$((2 * $(WORKERS))); echo $$((n > 6 ? 6 : n)))

# --cov: what the tests reach is counted, for a third more CPU
COV ?=

# a soak: how long it takes about, and what its chance follows from
SECONDS ?= 60
SEED ?= $(shell date +%s)

# the oldest Python with the oldest torch that is supported, the first torch with CheckpointableTensor,
# and the newest of both; and tests of what depends on them: TLS, pickles, threads, processes; and by
# each road a save, a load and what torch reads
VERSIONS ?= 3.10-2.9.1 3.11-2.14.1 3.13-2.15.0
OF_THE_INTERPRETER := tests/stores/test_long_reads.py tests/checkpoint/test_pickles.py \
	tests/checkpoint/test_plain_values.py tests/transfer/test_group.py \
	tests/test_errors.py tests/dcp/test_processes.py tests/background/test_trainers.py \
	tests/everywhere/test_watch.py
OF_TORCH := tests/dcp/test_interoperability.py tests/dcp/test_tensor_kinds.py \
	tests/dcp/test_tensor_protocol.py tests/dcp/test_global_plan.py tests/dcp/test_outline.py \
	tests/dcp/test_options.py tests/dcp/test_install.py tests/checkpoint/test_index.py \
	tests/checkpoint/test_torch_private.py \
	tests/background/test_saver.py tests/runs/test_manager.py tests/cli/test_commands.py \
	tests/cli/test_converting.py tests/torch_files/test_format_utils.py \
	tests/torch_files/test_experimental.py

# all workers order sets alike, as their lists of tests have to be the same
HASHSEED ?= $(shell date +%s)

# threads come and go in tests: glibc would give each a heap of its own, and keep it; and what one
# process has compiled, the next one need not
WORKER := PYTHONHASHSEED=$(HASHSEED) MALLOC_ARENA_MAX=2 PYTHONDONTWRITEBYTECODE=

COMPOSE := docker compose --file integration/compose.yaml

.PHONY: demo test test-fast test-azurite test-terraform gpu build docs evolve fuzz soak test-versions integration integration-docker integration-real integration-frameworks compare check bench bench-quick pictures format clean

demo: $(VENV)/.demo
	$(BIN)/python examples/demo $(if $(URI),--uri $(URI)) $(ARGS)

PARALLEL = -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 1

test: $(VENV)/.test
	$(WORKER) $(BIN)/python -m pytest -m "not azurite" $(COV) $(PARALLEL)

# for the inner loop, a minute on two idle cores: what is decided without processes and servers, and
# waits for nothing; `make test` before a commit
test-fast: TEST_WORKERS = $(WORKERS)
test-fast: $(VENV)/.test
	$(WORKER) $(BIN)/python -m pytest -q -m "fast and not azurite" tests $(PARALLEL)

# those that need Azurite, and with it Node.js and npm
test-azurite: $(VENV)/.test integration/node_modules/.stamp
	$(WORKER) $(BIN)/python -m pytest -m azurite $(WITH_AZURITE) $(PARALLEL)

WITH_AZURITE := tests/everywhere tests/faults tests/terraform

AS_LONG = --seconds $(SECONDS) --seed $(SEED) -n $(WORKERS) --maxschedchunk 1 \
	-o faulthandler_timeout=$$((900 + 2 * $(SECONDS)))

# states that change from save to save, drawn anew at each run
evolve: $(VENV)/.test
	$(WORKER) $(BIN)/python -m pytest tests/soak/test_evolving.py $(AS_LONG)

# answers that no store gives
fuzz: $(VENV)/.test
	$(WORKER) $(BIN)/python -m pytest tests/soak/test_odd_answers.py $(AS_LONG)

soak: $(VENV)/.test integration/node_modules/.stamp
	$(WORKER) $(BIN)/python -m pytest tests/soak $(AS_LONG)

test-versions: $(VERSIONS:%=test-version-%)

# a Python and a torch; skipped, and said, where this machine has no such Python, or pip finds no such torch
test-version-%: pyproject.toml
	@version=$*; python=$${version%%-*}; torch=$${version#*-}; venv=.venv-$$version; found=; \
	for each in python$$python "$$(PYENV_VERSION=$$(pyenv latest $$python 2>/dev/null) pyenv which python 2>/dev/null)"; do \
		if "$$each" -c "import sys; assert sys.version.startswith('$$python.')" 2>/dev/null; then found=$$each; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "SKIPPED: Python $$python is not here"; exit 0; fi; \
	if [ ! -e $$venv/.test ] || [ pyproject.toml -nt $$venv/.test ]; then \
		"$$found" -m venv $$venv && \
		$$venv/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip && \
		$$venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check torch==$$torch \
			|| { echo "SKIPPED: no torch $$torch can be had for Python $$python"; exit 0; }; \
		$$venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --editable '.[all]' --group test && touch $$venv/.test || exit 1; \
	fi; \
	echo "Python $$python, torch $$torch:"; \
	PYTHONDONTWRITEBYTECODE= CLOUDCKPT_TEST_NOISE=30 $$venv/bin/python -m pytest -q -m "not azurite" -p no:cacheprovider $(OF_THE_INTERPRETER) $(OF_TORCH)

integration: $(VENV)/.integration integration/node_modules/.stamp
	$(BIN)/python -m pytest integration

integration-docker: $(VENV)/.integration
	@trap '$(COMPOSE) down --volumes' EXIT INT TERM; $(COMPOSE) up --detach && \
	CLOUDCKPT_TEST_MINIO_URL=http://127.0.0.1:19000 \
	CLOUDCKPT_TEST_FAKE_GCS_URL=http://127.0.0.1:14443 \
	CLOUDCKPT_TEST_AZURITE_URL=http://127.0.0.1:11000/devstoreaccount1 \
	$(BIN)/python -m pytest integration

# integration/README.md says what to set
integration-real: $(VENV)/.integration
	$(BIN)/python -m pytest integration --only-real

# Lightning and others, in an environment of their own
# FRAMEWORKS=before takes the releases before the newest: requirements-before.txt
FRAMEWORKS_ARE = $(if $(FRAMEWORKS),-$(FRAMEWORKS))
VENV_FRAMEWORKS = .venv-frameworks$(FRAMEWORKS_ARE)

integration-frameworks: $(VENV_FRAMEWORKS)/.installed
	$(WORKER) $(VENV_FRAMEWORKS)/bin/python -m pytest -c integration/frameworks/pytest.ini integration/frameworks -n $(WORKERS) --maxschedchunk 1

$(VENV_FRAMEWORKS)/.installed: integration/frameworks/requirements$(FRAMEWORKS_ARE).txt constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV_FRAMEWORKS)
	$(VENV_FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(VENV_FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[s3]' --requirement $<
	@touch $@

# on a machine with a GPU, in minutes and without a network, by the Python that has torch for it
gpu:
	$(PYTHON) tests/gpu/gpu.py $(ARGS)

# what Terraform says of the modules, whose providers it fetches; TFLint where it is installed
MODULES := $(patsubst %,terraform/%,aws azure gcp)

test-terraform:
	terraform fmt -check -recursive terraform
	@for module in $(MODULES); do \
		echo "$$module:"; \
		terraform -chdir=$$module init -backend=false -input=false >/dev/null && \
		terraform -chdir=$$module validate && \
		terraform -chdir=$$module test || exit 1; \
		if command -v tflint >/dev/null; then tflint --chdir=$$module || exit 1; fi; \
	done

# our requests beside those of the vendors' clients: CLOUDS="s3 gcs azure"
compare: $(VENV)/.integration
	cd integration && PYTHONPATH=../tests ../$(BIN)/python -m vendors $(CLOUDS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python budget
	@if command -v terraform >/dev/null; then terraform fmt -check -recursive terraform; else echo "terraform is not here: its format was not checked"; fi
	@if command -v checkov >/dev/null; then checkov --directory terraform --quiet --compact --skip-download; else echo "checkov is not here: the policies were not scanned"; fi

# what would go to PyPI, and whether it runs where nothing else is installed
build: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/support/try_wheel.py dist

# the site, in site/
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

# whether the scenario that calls the most of a save's functions still runs; says nothing about speed
bench-quick: $(VENV)/.bench
	$(BIN)/python -m benchmarks --quick --only fleet --contenders cloudckpt

# those of docs/cli.md; needs Chromium for the page
pictures: $(VENV)/.demo
	PYTHONPATH=tests $(BIN)/python docs/pictures.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and by its exact version, so that the pinned build is the one that is taken
.venv/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

# at each run, since a newer one may have come
.venv-newest/.torch: constraints.txt FORCE
	$(PYTHON) -m venv $(VENV)
	grep -v '^torch==' constraints.txt > $(CONSTRAINTS)
	$(PIP) --upgrade pip
	$(PIP) --upgrade torch
	@touch $@

FORCE:

$(VENV)/.%: $(VENV)/.torch pyproject.toml
	$(PIP) --editable ".[all]" --group $*
	@touch $@

integration/node_modules/.stamp: integration/package.json integration/package-lock.json
	npm ci --prefix integration
	@touch $@

clean:
	rm -rf dist site .venv .venv-newest $(VERSIONS:%=.venv-%) integration/node_modules
