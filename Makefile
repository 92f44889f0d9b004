# Each target is a line or two; `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help wheel train plan test test-fast test-all test-nightly fuzz fuzz-commands check docs bench-launch bench-peers bench-cuda gpu-proof gpu-proof-kit bench-accuracy bench-limit bench-techniques bench-stream bench-references lock book book-quick clean images sif-cpu sif-cuda sif-cpu-intel image-compare audit
# Current torch, or another STACK next to it: `STACK=cpu-intel make train` has the book's.
STACK ?= cuda
export STACK
VENV := .venv$(if $(filter-out cuda,$(STACK)),-$(STACK))
BIN := $(VENV)/bin
LOCKS := $(wildcard containers/*.txt containers/*/*.txt)
FUZZED := $(addprefix tests/entrypoint/,plan/test_cpu_budget.py plan/test_core_assignment.py plan/test_planner.py cli/test_any_environment.py \
  supervise/test_wire.py supervise/test_store_commands.py) tests/train/report/test_page.py tests/train/distributed/test_exchange.py

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-][a-z -]*:.*## / { sub(/: .*/, "", $$1); printf "  make %-16s %s\n", $$1, $$2 }' Makefile

train: $(VENV)/installed ## train through the entrypoint (every TRAIN_* and LAUNCH_* variable works)
	@$(BIN)/entrypoint train

plan: $(VENV)/installed ## show what `make train` would do here, and why
	@$(BIN)/entrypoint plan

test: $(VENV)/installed ## test every module on this machine, in about 10 minutes on two cores
	@$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" $(PYTEST_ARGS)

test-fast: $(VENV)/installed ## test what starts no process and takes no time, within a minute: before each commit
	@FUZZ_EXAMPLES=$${FUZZ_EXAMPLES:-20} $(BIN)/python -m pytest -q -n auto --dist loadfile -m "not launch and not seconds and not slow" $(PYTEST_ARGS)

test-nightly: ## all that .ci/run does for each commit, and every slow and generated case (hours)
	@bash .ci/run nightly

test-all: $(VENV)/installed ## every test that this machine can run, 2,000 examples a property
	@FUZZ_EXAMPLES=$${FUZZ_EXAMPLES:-2000} $(BIN)/python -m pytest $(PYTEST_ARGS)

fuzz: $(VENV)/installed ## 100,000 generated machines a property, and as many environments (an hour)
	@FUZZ_EXAMPLES=100000 $(BIN)/python -m pytest -q -m "not launch" $(FUZZED)

fuzz-commands: $(VENV)/installed ## 10,000 random command lines as processes (an hour; FIRST=0 COUNT=10000)
	@COMMAND_LINES_FROM=$(or $(FIRST),0) COMMAND_LINES=$(or $(COUNT),10000) \
	  $(BIN)/python -m pytest -q -n auto tests/entrypoint/cli/test_random_command_lines.py

check: $(VENV)/installed ## format, lint, types, imports, words, shell scripts, Dockerfiles
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash containers/check.sh

docs: $(VENV)/installed ## write docs/settings.md, benchmarks/README.md and the figures of other pages from their sources
	@$(BIN)/python tools/settings_docs.py
	@$(BIN)/python -m tools.benchmarks_docs

bench-launch: $(VENV)/installed ## time from the command to a script's first line, compared with peers
	@$(BIN)/python -m benchmarks.launch $(BENCH_ARGS)

bench-limit: $(VENV)/installed ## a step compared with the best matrix product, and the cost of the loop
	@$(BIN)/python -m benchmarks.limit $(BENCH_ARGS)

bench-techniques: $(VENV)/installed ## what single techniques of the trainer give with this torch
	@$(BIN)/python -m benchmarks.techniques $(BENCH_ARGS)

bench-stream: $(VENV)/installed ## images per second from JPEGs to batches, compared with other loaders (an hour)
	@$$(bash benchmarks/stream/peers.sh $(VENV)) -m benchmarks.stream $(BENCH_ARGS)

bench-references: $(VENV)/installed ## the ImageNet recipe against torchvision's and timm's scripts, which BENCH_ARGS names
	@$(BIN)/python -m benchmarks.references $(BENCH_ARGS)

bench-peers: $(VENV)/installed ## images per second and seconds of the whole command, compared with peers
	@$(BIN)/python -m benchmarks.peers $(BENCH_ARGS)

bench-cuda: $(VENV)/installed ## on a GPU: CIFAR-10 against airbench94, ResNet-50's images per second
	@$(BIN)/python -m benchmarks.cuda $(BENCH_ARGS)

gpu-proof: ## on a bare GPU machine, without a network: every row that needs a GPU, in 9 minutes a call (DRY_RUN=1)
	@$(or $(wildcard $(BIN)/python),python3) -m benchmarks.gpu_proof $(if $(DRY_RUN),--dry-run) $(BENCH_ARGS)

gpu-proof-kit: $(VENV)/installed ## what such a machine lacks, in gpu-proof-kit/ (needs a network)
	@$(BIN)/python -m benchmarks.gpu_proof.kit $(BENCH_ARGS)

bench-accuracy: $(VENV)/installed ## seconds to the book's accuracy, and accuracy after the book's time
	@$(BIN)/python -m benchmarks.accuracy $(BENCH_ARGS)

book: $(VENV)/installed ## the book's result tables on this machine, as book/book.html (two hours; BOOK_ARGS=--only=2,9.2)
	@$(BIN)/python -m benchmarks.book $(BOOK_ARGS)

book-quick: $(VENV)/installed ## the same on a few images (minutes)
	@$(BIN)/python -m benchmarks.book --quick $(BOOK_ARGS)

wheel: $(VENV)/installed ## build dist/*.whl: the launcher for an environment of your own, and the trainer as an extra
	@rm -rf build && $(VENV)/tools/bin/uv build --quiet --wheel --no-build-isolation --python $(BIN)/python --out-dir dist . && ls dist/*.whl

images: ## build the Docker images cpu, cuda and cpu-intel (TORCH_BUILD=pypi takes PyPI's torch)
	@bash containers/build.sh docker cpu
	@bash containers/build.sh docker cpu-intel
	@bash containers/build.sh docker cuda

sif-cpu sif-cuda sif-cpu-intel: sif-%: ## build sif/NAME.sif with Apptainer
	@bash containers/build.sh sif $*

audit: $(VENV)/installed ## list known holes of the locked packages (needs a network)
	@$(BIN)/python tools/audit.py

image-compare: ## build cpu-intel twice without a cache, and list the files that differ
	@bash containers/compare.sh cpu-intel

lock: $(VENV)/installed ## resolve containers/*.in into locked requirements again
	@UV="$(CURDIR)/$(VENV)/tools/bin/uv" bash containers/lock.sh

$(VENV)/installed: $(LOCKS) containers/venv.sh $(wildcard train/kernels/*.cpp train/kernels/*.sh reference_training/*.p*) reference_training/entrypoint pyproject.toml
	@bash containers/venv.sh $(VENV) && touch $@

clean: ## remove the virtual environment and caches (runs/ stays)
	@rm -rf $(VENV) build ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
