# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check bench format clean

demo: $(VENV)/.demo
	$(BIN)/cloudckpt demo

test: $(VENV)/.test
	$(BIN)/python -m pytest --cov

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@if command -v terraform >/dev/null; then terraform fmt -check -recursive terraform; else echo "terraform is not here: its format was not checked"; fi
	@if command -v checkov >/dev/null; then checkov --directory terraform --quiet --compact; else echo "checkov is not here: the policies were not scanned"; fi

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and by its exact version, so that the pinned build is the one that is taken
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.%: $(VENV)/.torch pyproject.toml
	$(PIP) --editable ".[$*]"
	@touch $@

clean:
	rm -rf $(VENV)
