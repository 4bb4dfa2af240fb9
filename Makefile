# Every target stands alone: each prepares what it needs. `make` lists them.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PROMPT ?= The physical hardware limits

.PHONY: help demo check lint test versions endurance reading bench docs samples clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: $(VENV)/installed ## set up, trace the embedded model, write its report  (PROMPT="…")
	$(BIN)/lifetrace run --prompt "$(PROMPT)"

check: lint test ## set up, pass the checks (ruff, mypy, import-linter) and the tests

lint: $(VENV)/installed .tree ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd .tree && ../$(BIN)/mypy --config-file ../pyproject.toml -p lifetrace
	cd .tree && PYTHONPATH=. ../$(BIN)/lint-imports ../pyproject.toml --no-cache

test: $(VENV)/installed ## the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

versions: ## the tests with the oldest and with the newest supported libraries, an environment for each
	for which in oldest newest; do \
	  $(PYTHON) -m venv $(VENV)-$$which && \
	  $(VENV)-$$which/bin/python -m pip install --quiet --editable '.[dev]' -c tests/versions/$$which.txt && \
	  OMP_NUM_THREADS=1 $(VENV)-$$which/bin/python -m pytest --numprocesses 2 || exit 1; \
	done

endurance: $(VENV)/installed ## 200 kills, 10,000 damaged traces, 200,000 steps and more: about an hour
	$(BIN)/python benchmarks/endurance.py all

reading: $(VENV)/installed ## measure what reading 10 million spans takes, and write it into docs/reading.md
	$(BIN)/python benchmarks/reading.py --write

bench: $(VENV)/installed ## measure what tracing costs, and write it into docs/overhead.md
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py --write

docs: $(VENV)/installed ## write docs/trace-format.md from the schema
	$(BIN)/python -c 'from lifetrace.analysis.schema import markdown; print(markdown(), end="")' > docs/trace-format.md

samples: $(VENV)/installed ## record the traces in sample_traces again
	sample_traces/record.sh $(abspath $(BIN))

# The installed layout as links: mypy and import-linter cannot follow an editable install of mapped folders.
.tree:
	mkdir -p .tree/lifetrace
	ln -sfn ../../hooks .tree/lifetrace/hooks
	ln -sfn ../../analysis .tree/lifetrace/analysis
	for file in tracer/*; do ln -sfn ../../$$file .tree/lifetrace/; done

clean: ## remove what the targets made
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest .tree build
