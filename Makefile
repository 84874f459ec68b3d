# make alone lists the targets. GPU users: make TORCH="torch --index-url https://download.pytorch.org/whl/cu130" ...
PYTHON ?= python3
VENV ?= .venv
# One exact version: an open one fetches gigabytes of CUDA packages.
TORCH ?= torch==2.13.0
# How `make profiles/...` profiles: workers on one machine share its cores, so each will have about one.
PROFILE ?= --threads 1
# How `make plans/...` partitions: freely, unless options are given here.
PARTITION ?=

# Many containers set this. Each process would then compile all of torch that it imports, which takes seconds.
export PYTHONDONTWRITEBYTECODE :=

# The page of `pdtool report` is tried in a browser where there is one.
CHROMIUM := $(shell which chromium-headless-shell chromium google-chrome 2>/dev/null | head -1)
COMMA := ,
EXTRAS := test$(if $(CHROMIUM),$(COMMA)browser)

# What setup.cfg allows at least. No torch: one exact version is found everywhere, which TORCH names.
LOWEST = $(filter-out torch==%,$(shell sed -n '/^install_requires/,/^$$/ s/>=/==/p; s/^ *\(pytest\|pytest-timeout\|hypothesis\)>=/\1==/p' setup.cfg))

BIN := $(VENV)/bin
INSTALL := $(BIN)/python tests/install.py
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-demo
LOWEST_STAMP := $(VENV)/.installed-lowest
# Three files of tests at a time, because many wait, in the order of tests/conftest.py; what a file makes once is made in
# one process.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
PDTOOL := $(BIN)/pdtool
DEMO_NETWORK := profiles/demo-vgg16.json plans/demo-vgg16-4.yaml runs/demo-vgg16

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SECONDARY:
.PHONY: help venv test test-all test-models check check-lowest fuzz demo demo-network bench-road bench-planner bench-choice bench-runtime bench-startup bench-transport bench-memory bench-long-run bench-long-epochs reproduce reproduce-quick soak chaos gpu-check browser-check examples docs pictures clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  make plans/NAME-TOPOLOGY.yaml  profile and partition the model NAME of pdtool/zoo, where that is stale"

venv: $(STAMP) ## create .venv with everything that the other targets need

$(DEMO_STAMP): setup.cfg pyproject.toml tests/install.py
	@echo "making $(VENV), which takes about a minute, and 2 GB: $(TORCH), then what pdtool needs"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	$(INSTALL) --editable '.[mnist]'
	@touch $@
	@echo "the command is $(BIN)/pdtool"

$(STAMP): $(DEMO_STAMP)
	$(INSTALL) --editable '.[$(EXTRAS)]'
	@touch $@

$(LOWEST_STAMP): $(DEMO_STAMP) setup.cfg
	$(INSTALL) --target $(VENV)/lowest $(LOWEST)
	$(BIN)/python -m compileall -q -j 2 $(VENV)/lowest
	@touch $@

test: $(STAMP) $(LOWEST_STAMP) ## run all tests, of large tables the rows of the day (about twelve minutes on two cores)
	$(PYTEST)

test-all: $(STAMP) $(LOWEST_STAMP) ## run all tests with all rows of the tables; `make test` runs a part of them each day
	PDTOOL_ALL_ROWS=1 PDTOOL_MUTATIONS_S=60 $(PYTEST)

test-models: $(STAMP) ## take all models of tests/models, and of the libraries installed, through the commands (half an hour)
	$(BIN)/python tests/models_table.py

check: $(STAMP) ## run ruff, mypy --strict and all tests
	$(BIN)/ruff check pdtool tests
	$(BIN)/ruff format --check pdtool tests
	$(BIN)/mypy
	$(PYTEST)

check-lowest: $(STAMP) $(LOWEST_STAMP) ## run the fast tests with the lowest versions that setup.cfg allows, of all but torch (a minute)
	PDTOOL_ALL_ROWS=1 $(BIN)/python -m pytest -n 2 tests/project/test_lowest_versions.py

fuzz: $(STAMP) ## try 10,000 damaged and forged artifacts, and 300 through the commands (about five minutes)
	PDTOOL_FUZZ_INPUTS=$(or $(INPUTS),10000) PDTOOL_FUZZ_COMMANDS=300 \
		$(BIN)/python -m pytest -n 2 --timeout 3600 tests/road/test_fuzz.py

demo: $(DEMO_STAMP) ## plan, prove and train a small VGG on MNIST with two workers, and plan VGG-16 for four servers (half a minute)
	$(BIN)/python tests/demo.py

demo-network: $(DEMO_STAMP) ## emulate VGG-16 on four servers with 2.5 Gbit/s, as a pipeline and data-parallel (one minute)
	rm -rf $(DEMO_NETWORK)
	$(PDTOOL) profile pdtool/zoo/vgg16.py --device v100 --batch-size 64 -o profiles/demo-vgg16.json
	$(PDTOOL) partition profiles/demo-vgg16.json --topology 4 --bandwidth 2.5Gbit/s -o plans/demo-vgg16-4.yaml
	$(PDTOOL) emulate plans/demo-vgg16-4.yaml --minibatches 24 -o runs/demo-vgg16 || \
	  $(PDTOOL) simulate plans/demo-vgg16-4.yaml --sweep bandwidth=0.1..25Gbit/s

bench-road: $(STAMP) ## measure how long each of the four commands takes here
	$(BIN)/python tests/bench/bench_road.py

bench-planner: $(STAMP) ## measure the planner's time and its plans on large models and clusters (several minutes)
	$(BIN)/python tests/bench/bench_planner.py

bench-choice: $(STAMP) ## compare the plans of a thousand random profiles with those of narrower options (over an hour)
	$(BIN)/python tests/bench/bench_choice.py

bench-runtime: $(STAMP) ## compare training speed with the machine's limit and with PyTorch's own ways (about twenty minutes)
	$(BIN)/python tests/bench/bench_runtime.py

reproduce: $(STAMP) ## answer claims of PipeDream by commands, and write docs/reproduction.md (over an hour; goes on where it was stopped)
	$(INSTALL) --editable '.[reproduce]'
	$(BIN)/python tests/reproduce.py

reproduce-quick: $(STAMP) ## a few cases of each claim, in five minutes, into runs/reproduction/quick.md
	$(INSTALL) --editable '.[reproduce]'
	mkdir -p runs/reproduction
	$(BIN)/python tests/reproduce.py --quick -o runs/reproduction/quick.md

bench-startup: $(STAMP) ## measure the memory of each worker of a GPT of 1.5 billion parameters at the start (several minutes)
	$(BIN)/python tests/bench/bench_startup.py

bench-transport: $(STAMP) ## measure the cost of a message between two workers
	PYTHONPATH=. $(BIN)/python tests/bench/bench_transport.py

bench-memory: $(STAMP) ## compare predicted and measured memory of five models (several minutes): part c of bench-runtime
	$(BIN)/python tests/bench/bench_runtime.py --only c

bench-long-run: $(STAMP) ## measure whether a run of 20,000 updates slows down (three minutes)
	$(BIN)/python tests/bench/bench_long_run.py

bench-long-epochs: $(STAMP) ## time the start of epochs of up to 10^8 samples (a minute)
	$(BIN)/python tests/bench/bench_long_epochs.py

soak: $(STAMP) ## train for 2,000 updates on four workers, twice, and compare memory and results
	$(BIN)/python tests/bench/soak.py

chaos: $(STAMP) ## kill, damage and misconfigure runs at random, and say what happened (about ten minutes)
	PYTHONPATH=. $(BIN)/python tests/chaos

gpu-check: $(STAMP) ## run the tests that need a CUDA device, and measure; without one they are skipped
	$(BIN)/python -m pytest -m gpu -rs
	$(BIN)/python tests/bench/bench_gpu.py

examples: $(STAMP) ## write the checked-in examples again
	rm -rf profiles/mnist.json plans/mnist-2.yaml plans/mnist-2
	$(MAKE) plans/mnist-2/bundle.yaml

browser-check: $(STAMP) ## open the pages of `pdtool report` in Chromium, and look for what overlaps or is cut off
	@test -n "$(CHROMIUM)" || { echo "no Chromium is here: apt-get install chromium"; exit 1; }
	$(INSTALL) --editable '.[browser]'
	$(BIN)/python -m pytest tests/reports/test_browser.py

docs: $(STAMP) ## build the documentation into build/docs, and its reference of commands from the commands
	$(BIN)/python tests/cli_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pictures: $(STAMP) ## draw the pictures of README and docs again, docs/images/
	PYTHONPATH=. $(BIN)/python tests/pictures.py

clean: ## delete .venv, runs/ and caches
	rm -rf $(VENV) plans/demo-2* profiles/demo*.json runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find pdtool tests plans -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# profiles/, plans/ and runs/ of the models in pdtool/zoo, by the rules that users include: only what is stale is made again.
MODELS := pdtool/zoo
PDTOOL_NEEDS := $(STAMP)
include pdtool/cli/starter/pdtool.mk

# The checked-in example is that of README.
profiles/mnist.json: PROFILE += --batch-size 64
plans/mnist-2.yaml: PARTITION += --bandwidth 100Mbit/s
