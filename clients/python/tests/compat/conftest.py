"""For tests with clients of OpenAI's API as vLLM's users have them: `make test-clients`."""

from __future__ import annotations

import os

import pytest

# No client may ask anything but our server: neither a hub, nor for a list of prices, nor to report what it has seen.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    LANGSMITH_TRACING="false",
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    OPENAI_AGENTS_DISABLE_TRACING="1",
    TOKENIZERS_PARALLELISM="false",
)

from foreign_warnings import foreign_warnings_ignored, pytest_collection, pytest_runtest_protocol  # noqa: F401 hooks
from rollout_client import ServerProcess
from scripted import write_scripted
from serving import FIXTURES, REPOSITORY, SMALL_CACHE, assert_idle

SMOLLM2 = REPOSITORY / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CALLS = (FIXTURES / "chat_template" / "qwen2.5_tools.jinja").read_text()
# After a tool's result the prompt ends with the first token of the answer.
CALLS += '{% if add_generation_prompt and messages[-1].role == "tool" %}The sum{% endif %}'
ANSWERS = [
    ["<tool_call>\n", '{"name": "add", "arguments": ', '{"a": 1, "b": 2}}', "\n</tool_call>"],
    ["The sum", " is 3."],
]
THINKS = (FIXTURES / "llama" / "chat_template.jinja").read_text() + "{# <think></think> #}"
THOUGHT = ["<think>", "One and", " two.", "</think>", "\n\nThree."]


@pytest.fixture(scope="session")
def smollm2_server(binary):
    """A server of a real model with a chat template, under the name `smollm2`."""
    if not SMOLLM2.exists():
        pytest.fail(f"no model at {SMOLLM2}: `make test-clients` gets it", pytrace=False)
    flags = ["--mem-util", "0.2", "--kv-cache-bytes", str(256 << 20), "--served-model-name", "smollm2"]
    flags.append("--enable-prompt-tokens-details")
    with ServerProcess(binary, SMOLLM2, flags) as server:
        yield server


@pytest.fixture
def smollm2(smollm2_server):
    """The URL of the real model's server, which is idle after each test."""
    yield f"http://{smollm2_server.http_address}"
    assert_idle(smollm2_server.client)


@pytest.fixture(scope="session")
def caller(binary, tmp_path_factory):
    """The URL of a server whose model, named `caller`, calls the tool `add`, and says the sum after its result."""
    model = tmp_path_factory.mktemp("models") / "caller"
    write_scripted(model, CALLS, ANSWERS)
    with ServerProcess(binary, model, [*SMALL_CACHE, "--mem-util", "0.2", "--served-model-name", "caller"]) as server:
        yield f"http://{server.http_address}"
        assert_idle(server.client)


@pytest.fixture(scope="session")
def thinker(binary, tmp_path_factory):
    """The URL of a server whose model, named `thinker`, thinks before it answers."""
    model = tmp_path_factory.mktemp("models") / "thinker"
    write_scripted(model, THINKS, [THOUGHT])
    with ServerProcess(binary, model, [*SMALL_CACHE, "--mem-util", "0.2", "--served-model-name", "thinker"]) as server:
        yield f"http://{server.http_address}"
        assert_idle(server.client)


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure():
    """Clients that leave their connections to the collector of garbage do so at the end, too."""
    foreign_warnings_ignored()
