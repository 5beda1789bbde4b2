PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install train test check format clean

install: $(VENV)/.installed

# torch brings its own dependencies. Everything else is pinned whole and installed without
# resolving, since SGLang pins CUDA packages that a CPU machine neither needs nor can load.
$(VENV)/.installed: requirements/cpu.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$$(grep '^torch==' requirements/cpu.txt)"
	$(BIN)/pip install --quiet --no-deps -r requirements/cpu.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

train: install
	$(BIN)/magistral train configs/tiny.yaml

test: install
	$(BIN)/python -m pytest -m "not slow and not gpu"

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy megatron_magistral verifier_sandbox

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
