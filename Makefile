# Two commands for a newcomer: `make demo` and `make test`. Both set up what they need (Python 3.11 and make are enough).
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test unit real lint clean

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: $(VENV)/.ready ## the main job on an embedded fleet of simulated replicas
	$(BIN)/lorafleet demo

test: lint real $(VENV)/.ready ## everything, the tests on real vLLM and TRL included
	LORAFLEET_REAL_PYTHON="$$(sh tests/vllm/provision.sh --print)" $(BIN)/python -m pytest

unit: lint $(VENV)/.ready ## everything but real vLLM and the browser
	$(BIN)/python -m pytest -m "not real and not browser"

real: ## the venv with vLLM and TRL (about 3.7 GB, kept outside the checkout)
	PYTHON=$(PYTHON) sh tests/vllm/provision.sh

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache .hypothesis
