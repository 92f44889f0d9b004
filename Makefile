# Each target is a line or two; `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help train test fuzz check plan bench-launch lock clean
VENV := .venv
BIN := $(VENV)/bin
LOCKS := $(wildcard containers/*.txt containers/cpu-intel/*.txt)

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

train: $(VENV)/installed ## train through the entrypoint (every TRAIN_* and LAUNCH_* variable works)
	@$(BIN)/entrypoint train

plan: $(VENV)/installed ## what `make train` would do here, and why
	@$(BIN)/entrypoint plan

test: $(VENV)/installed ## every test that this machine can run
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

fuzz: $(VENV)/installed ## 100,000 generated machines a property, and as many environments (an hour)
	@FUZZ_EXAMPLES=100000 $(BIN)/python -m pytest -q -m "not launch" \
	  $(addprefix tests/entrypoint/test_,budget.py shares.py planner.py fuzz.py)

check: $(VENV)/installed ## format, lint, types, shell scripts, Dockerfiles
	@PATH="$(abspath $(BIN)):$$PATH" bash containers/check.sh

bench-launch: $(VENV)/installed ## time from the command to a script's first line, against peers
	@$(BIN)/python benchmarks/launch.py

lock: $(VENV)/installed ## resolve containers/*.in anew into locked requirements
	@UV=$(abspath $(VENV))/tools/bin/uv bash containers/lock.sh

$(VENV)/installed: $(LOCKS) containers/venv.sh containers/entrypoint.pth pyproject.toml
	@bash containers/venv.sh $(VENV) && touch $@

clean: ## remove the virtual environment and caches (runs/ stays)
	@rm -rf $(VENV) build ./*.egg-info .pytest_cache .mypy_cache .ruff_cache
