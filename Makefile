# Each target is a line or two; `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help train test fuzz check plan bench-launch bench-peers bench-plan bench-scaling bench-cuda bench-checkpoint bench-accuracy bench-limit lock book book-quick clean images sif-cpu-intel sif-cuda image-report image-compare
VENV := .venv
BIN := $(VENV)/bin
LOCKS := $(wildcard containers/*.txt containers/cpu-intel/*.txt)

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

train: $(VENV)/installed ## train through the entrypoint (every TRAIN_* and LAUNCH_* variable works)
	@$(BIN)/entrypoint train

plan: $(VENV)/installed ## what `make train` would do here, and why
	@$(BIN)/entrypoint plan

test: $(VENV)/installed ## every test that this machine can run
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

fuzz: $(VENV)/installed ## 100,000 generated machines a property, and as many environments (an hour)
	@FUZZ_EXAMPLES=100000 $(BIN)/python -m pytest -q -m "not launch" \
	  $(addprefix tests/entrypoint/,plan/test_cpu_budget.py plan/test_core_assignment.py plan/test_planner.py cli/test_any_environment.py)

check: $(VENV)/installed ## format, lint, types, shell scripts, Dockerfiles
	@PATH="$(abspath $(BIN)):$$PATH" bash containers/check.sh

bench-launch: $(VENV)/installed ## time from the command to a script's first line, against peers
	@$(BIN)/python benchmarks/launch.py

bench-limit: $(VENV)/installed ## how near a step comes to what the machine can multiply, and what the loop adds
	@$(BIN)/python -m benchmarks.limit

bench-peers: $(VENV)/installed ## images a second and seconds of the whole command, against what people use today
	@$(BIN)/python -m benchmarks.peers

bench-plan: $(VENV)/installed ## what the plan is worth on a bare, limited and busy machine, against peers and a sweep
	@$(BIN)/python -m benchmarks.worth

bench-scaling: $(VENV)/installed ## how throughput and the launcher's own cost grow with ranks
	@$(BIN)/python -m benchmarks.scaling

bench-cuda: $(VENV)/installed ## on a GPU: seconds to 94 % of CIFAR-10, ResNet-50's images a second, the cost of the loop
	@$(BIN)/python -m benchmarks.cuda

bench-accuracy: $(VENV)/installed ## how soon it is as good as the book, and what the book's time buys
	@$(BIN)/python -m benchmarks.accuracy

bench-checkpoint: $(VENV)/installed ## what checkpoints cost a run
	@$(BIN)/python -m benchmarks.checkpoint

book: $(VENV)/installed ## the book's result tables on this machine, as book/book.html (two hours; BOOK_ARGS=--only=2,9.2)
	@$(BIN)/python -m benchmarks.book $(BOOK_ARGS)

book-quick: $(VENV)/installed ## the same on a few pictures (minutes)
	@$(BIN)/python -m benchmarks.book --quick $(BOOK_ARGS)

images: ## build both Docker images (ONECCL_INDEX=… takes oneCCL in, TORCH_BUILD=cpu|pypi chooses torch)
	@bash containers/build.sh docker cpu-intel
	@bash containers/build.sh docker cuda

sif-cpu-intel sif-cuda: sif-%: ## build sif/NAME.sif with Apptainer
	@bash containers/build.sh sif $*

image-report: $(VENV)/installed ## sizes and start times of the images, beside the virtual environment
	@$(BIN)/python benchmarks/images.py

image-compare: ## build cpu-intel twice without a cache, and tell which files differ
	@bash containers/compare.sh cpu-intel

lock: $(VENV)/installed ## resolve containers/*.in anew into locked requirements
	@UV=$(abspath $(VENV))/tools/bin/uv bash containers/lock.sh

$(VENV)/installed: $(LOCKS) containers/venv.sh containers/entrypoint.pth pyproject.toml
	@bash containers/venv.sh $(VENV) && touch $@

clean: ## remove the virtual environment and caches (runs/ stays)
	@rm -rf $(VENV) build ./*.egg-info .pytest_cache .mypy_cache .ruff_cache
