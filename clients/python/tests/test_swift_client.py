"""The client for ms-swift against real servers, with a stand-in for ms-swift's template: no torch is needed here."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fake_server import completion, summary
from models import IN_MEMORY, INTERNVL_IN_MEMORY, checksums, merged, perturbed, random_adapter, read_model, renamed
from rollout_client import (
    Aborted,
    FailedPrecondition,
    FinishReason,
    InvalidArgument,
    Lifecycle,
    Misdirected,
    Pixels,
    RolloutError,
    SamplingParams,
    ServerProcess,
    Unauthenticated,
    Unavailable,
    _proto,
)
from rollout_client._served_names import served_parameters
from rollout_client.process import free_port
from rollout_client.swift import RolloutVLLMClient
from serving import FIXTURES, PUSH_MODEL, SMALL_CACHE, no_room, server, wait_for

FLOAT32 = ["--dtype", "float32"]
CONFIG = {"max_tokens": 8, "temperature": 0.9, "top_k": -1, "top_p": 1.0, "min_p": None, "stop": [], "n": 1}


class Encoder:
    """Prompts are token ids already, answers are (id, sample)."""

    stop_token_ids = ()
    num_hidden_layers = 3

    def encode(self, request):
        return SimpleNamespace(
            request_id=request["uuid"],
            prompt=request["messages"],
            images=request.get("images", ()),
            template_inputs=None,
        )

    def stops(self, words):
        return list(words), list(self.stop_token_ids)

    def output(self, request, prompt_token_ids, sample, routed_experts):
        return (request.request_id, sample) if routed_experts is None else (request.request_id, routed_experts)


def connected(*processes, takes_adapters=True, **options):
    """A client for ms-swift of these servers, as a trainer has it."""
    ports = [process.address.rpartition(":")[2] for process in processes]
    client = RolloutVLLMClient(None, ["127.0.0.1"] * len(ports), [int(port) for port in ports], **options)
    client.takes_adapters, client.encoder = takes_adapters, Encoder()
    client.close_communicator()
    client.init_communicator("cpu")
    return client


def bucket(tensors):
    """Metadata and bytes as ms-swift's `FlattenedTensorBucket` makes them."""
    metadatas, parts, end = [], [], 0
    for name, array in tensors.items():
        start, end = end, end + array.nbytes
        metadatas.append(
            SimpleNamespace(name=name, dtype=f"torch.{array.dtype}", shape=array.shape, start_idx=start, end_idx=end)
        )
        parts.append(np.frombuffer(array.tobytes(), np.uint8))
    return metadatas, np.concatenate(parts)


def halves(tensors):
    names = list(tensors)
    return [{name: tensors[name] for name in part} for part in (names[: len(names) // 2], names[len(names) // 2 :])]


def synchronise(client, tensors):
    """Sends a whole policy, as the first synchronisation of ms-swift does."""
    for part in halves(tensors):
        client.update_flattened_params(*bucket(part))
    client.process_weights_after_loading()


def requests(prompts):
    return [{"messages": list(prompt), "uuid": f"chatcmpl-{i}"} for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def vision(binary):
    """A float32 server of a model that takes images."""
    with ServerProcess(binary, FIXTURES / "qwen2_5_vl", [*SMALL_CACHE, "--mem-util", "0.2", *FLOAT32]) as process:
        yield process


@pytest.fixture(scope="module")
def two(binary):
    """Two float32 servers of one model."""
    flags = [*SMALL_CACHE, "--mem-util", "0.2", *FLOAT32]
    with ServerProcess(binary, PUSH_MODEL, flags) as first, ServerProcess(binary, PUSH_MODEL, flags) as second:
        yield first, second


@pytest.fixture
def pair(two):
    """Both at the base, which is the checkpoint's."""
    base = read_model(PUSH_MODEL, np.float32)
    for process in two:
        process.client.push_full(base)
    return *two, base


def test_a_policy_comes_in_buckets_and_reaches_all_servers(pair, rng):
    first, second, base = pair
    state = perturbed(rng, base)
    client = connected(first, second, takes_adapters=False)
    assert client.get_engine_type()["enable_lora"] is client.enable_lora is False
    before = first.client.checksum()
    part, rest = halves(state)
    client.update_flattened_params(*bucket(part))
    assert first.client.checksum() == before, "nothing is applied before the last bucket"
    client.update_flattened_params(*bucket(rest))
    client.process_weights_after_loading()
    client.reset_prefix_cache()
    client.reset_encoder_cache()
    assert first.client.checksum() == second.client.checksum() == checksums(state, "float32")
    assert client.get_model_state_keys() == [parameter.name for parameter in first.client.parameters()]


def test_a_policy_comes_one_parameter_at_a_time_too(pair, rng):
    first, _, base = pair
    state = perturbed(rng, base)
    client = connected(first, takes_adapters=False)
    for name, array in state.items():
        client.update_named_param(f"base_model.model.{name}", array)
    client.process_weights_after_loading()
    assert first.client.checksum() == checksums(state, "float32")


@pytest.mark.parametrize("flattened", [True, False])
def test_an_adapter_is_merged_by_all_servers(pair, rng, flattened):
    first, second, base = pair
    client = connected(first, second)
    assert client.get_engine_type()["enable_lora"] is client.enable_lora is True
    synchronise(client, base)
    for _ in range(2):
        tensors, config = random_adapter(rng, base)
        if flattened:
            client.update_adapter_flattened_param(config, *bucket(tensors))
        else:
            client.update_adapter_param(config, tensors)
        expected = checksums(base | merged(base, tensors, config), "float32")
        assert first.client.checksum() == second.client.checksum() == expected


def test_the_base_below_an_adapter_is_compared_not_pushed(pair, rng):
    first, _, base = pair
    tensors, config = random_adapter(rng, base)
    first.client.push_lora(tensors, config)
    client = connected(first)
    updates = first.client.status().updates
    named = {f"base_model.model.{name.replace('_proj.', '_proj.base_layer.')}": array for name, array in base.items()}
    quantised = {"model.layers.0.mlp.up_proj.weight": np.zeros(3, np.uint8)}
    synchronise(client, named | quantised)
    assert first.client.status().updates == updates + 1, "only the adapter of an earlier training was taken out"
    assert first.client.checksum() == checksums(base, "float32")


def test_another_base_below_an_adapter_is_an_error_that_says_what_to_do(pair, rng, monkeypatch):
    first, second, base = pair
    other = base | {"model.norm.weight": base["model.norm.weight"] + 1}
    client = connected(first, second)
    message = (
        r"1 parameters differ, first model\.norm\.weight \(float32 here, float32 there\).*--model.*ROLLOUT_PUSH_BASE=1"
    )
    with pytest.raises(FailedPrecondition, match=message):
        synchronise(client, other)
    monkeypatch.setenv("ROLLOUT_PUSH_BASE", "1")
    synchronise(client, other)
    tensors, config = random_adapter(rng, base)
    client.update_adapter_param(config, tensors)
    expected = checksums(other | merged(other, tensors, config), "float32")
    assert first.client.checksum() == second.client.checksum() == expected


@pytest.mark.parametrize(("name", "in_memory", "changed", "served"), [
    ("qwen2_5_vl", IN_MEMORY, "visual.blocks.1.attn.qkv.bias", "visual.blocks.1.attn.v_proj.bias"),
    ("internvl3", INTERNVL_IN_MEMORY, *["vision_tower.encoder.layer.1.attention.v_proj.bias"] * 2),
    (
        "internvl3-chat",
        {"": ""},
        "vision_model.encoder.layers.1.attn.qkv.bias",
        "vision_tower.encoder.layer.1.attention.v_proj.bias",
    ),
    ("phi3", {"": ""}, "model.layers.1.self_attn.qkv_proj.weight", "model.layers.1.self_attn.v_proj.weight"),
    ("phi3", {"": ""}, "model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ("qwen_v1", {"": ""}, "transformer.h.1.attn.c_attn.bias", "model.layers.1.self_attn.v_proj.bias"),
    ("qwen_v1", {"": ""}, "transformer.h.0.mlp.w1.weight", "model.layers.0.mlp.up_proj.weight"),
])  # fmt: skip
def test_the_base_of_a_model_is_compared_by_its_names_in_memory(binary, name, in_memory, changed, served):
    state = {key: array.copy() for key, array in read_model(FIXTURES / name, np.float32).items()}
    with ServerProcess(binary, FIXTURES / name, [*SMALL_CACHE, *FLOAT32]) as process:
        client, trained = connected(process), renamed(in_memory, state)
        names = dict(part for key, array in trained.items() for part in served_parameters(key, array))
        assert names.keys() == process.client.checksum().keys(), "every parameter is compared"
        synchronise(client, trained)
        state[changed][-1] += 1
        with pytest.raises(FailedPrecondition, match=f"1 parameters differ, first {re.escape(served)} "):
            synchronise(client, trained)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_the_experts_of_a_layer_are_compared_one_by_one(as_bytes):
    state = read_model(FIXTURES / "qwen3_moe", np.float32)
    experts = "model.layers.0.mlp.experts"
    weights = [[state[f"{experts}.{i}.{part}_proj.weight"] for part in ("gate", "up", "down")] for i in range(8)]
    in_memory = {
        "gate_up_proj": np.stack([np.concatenate(parts[:2]) for parts in weights]),
        "down_proj": np.stack([parts[2] for parts in weights]),
    }
    found = {}
    for name, array in in_memory.items():
        tensor = (array.tobytes(), "float32", array.shape) if as_bytes else array
        found |= dict(served_parameters(f"{experts}.{name}", tensor))
    if as_bytes:
        found = {name: np.frombuffer(data, dtype).reshape(shape) for name, (data, dtype, shape) in found.items()}
    assert found.keys() == {name for name in state if name.startswith(experts)}
    for name, array in found.items():
        np.testing.assert_array_equal(array, state[name], name)


def test_a_base_of_which_the_server_knows_no_name_is_not_taken_for_compared(pair):
    first, _, base = pair
    with pytest.raises(
        FailedPrecondition, match=r"none of .* parameters by name, first text\.model\.embed_tokens\.weight"
    ):
        synchronise(connected(first), {f"text.{name}": array for name, array in base.items()})


def test_a_push_that_fails_raises_no_attribute_error_and_never_happened(pair, rng):
    # ms-swift takes an AttributeError for a client of another version, and sends the bucket again in another way.
    first, second, base = pair
    before = first.client.checksum()
    client = connected(first, second, takes_adapters=False)
    metadatas, data = bucket(perturbed(rng, base))
    del metadatas[-1].dtype
    with pytest.raises(RuntimeError, match="dtype"):
        client.update_flattened_params(metadatas, data)
    client.process_weights_after_loading()
    with pytest.raises(InvalidArgument, match=r"model\.norm\.weight"):
        synchronise(client, base | {"model.norm.weight": np.zeros(3, np.float32)})
    with pytest.raises(RuntimeError, match="items"):
        client.update_adapter_param({}, None)
    for process in (first, second):
        assert process.client.checksum() == before
        wait_for(process.client, lambda status: not status.updating, "free of the push")
    synchronise(client, base)


def test_samples_come_in_the_order_of_the_requests_with_their_ids(pair):
    first, second, _ = pair
    client = connected(first, second)
    prompts = [(1, 2, 3), (4, 5), (1, 2, 3), (6,), (4, 5), (1, 2, 3)]
    answers = client.infer(requests(prompts), CONFIG, use_tqdm=False)
    assert [request_id for request_id, _ in answers] == [f"chatcmpl-{i}" for i in range(len(prompts))]
    for prompt, (_, sample) in zip(prompts, answers, strict=True):
        # Which request draws the end of the sequence is another one in each run.
        whole = sample.finish_reason is FinishReason.LENGTH
        assert len(sample.token_ids) == CONFIG["max_tokens"] if whole else sample.finish_reason is FinishReason.EOS
        score = first.client.score([[*prompt, *sample.token_ids]], sampling=SamplingParams(temperature=0.9))[0]
        assert np.array_equal(sample.logprobs, np.array(score.logprobs[len(prompt) :], np.float32))
    finished = [process.client.status().finished_requests for process in (first, second)]
    assert all(finished), "both servers work"
    assert client.infer([], CONFIG) == []


@pytest.mark.parametrize("temperature", [0.9, 1.0])
def test_log_probabilities_are_of_all_tokens_where_filters_are_on(pair, temperature):
    first, _, _ = pair
    config = CONFIG | {"temperature": temperature, "top_p": 0.8}
    prompt = (1, 2, 3)
    for _, sample in connected(first).infer(requests([prompt] * 4), config):
        sequence = [*prompt, *sample.token_ids]
        score = first.client.score([sequence], sampling=SamplingParams(temperature=temperature))[0]
        assert np.abs(sample.logprobs - np.float32(score.logprobs[len(prompt) :])).max() < 1e-5


@pytest.mark.parametrize("prompts", [[(1, 2, 3)] * 6, [(1, 2, 3)] * 6 + [(9,)]], ids=["equal groups", "others too"])
def test_equal_requests_are_no_clones(pair, prompts):
    first, _, _ = pair
    answers = connected(first).infer(requests(prompts), CONFIG)
    assert len({tuple(sample.token_ids) for _, sample in answers[:6]}) == 6
    again = [tuple(s.token_ids) for _, s in connected(first).infer(requests(prompts), CONFIG | {"seed": 5})]
    assert again == [tuple(s.token_ids) for _, s in connected(first).infer(requests(prompts), CONFIG | {"seed": 5})]


def test_requests_that_differ_by_their_images_are_other_prompts(vision, rng):
    client = connected(vision)
    pictures = [Pixels.of(rng.integers(0, 256, (28, 56, 3), dtype=np.uint8)) for _ in range(2)]
    sent = [{"images": [picture], **request} for picture in pictures for request in requests([[5, 514, 6]] * 2)]
    answers = client.infer(sent, CONFIG)
    for picture, pair_of_answers in zip(pictures, (answers[:2], answers[2:]), strict=True):
        for _, sample in pair_of_answers:
            score = vision.client.score([[5, 514, 514, 6, *sample.token_ids]], images=[[picture]])[0]
            assert np.array_equal(np.float32(score.raw_logprobs[4:]), sample.raw_logprobs)


def test_every_field_of_a_request_is_used_or_refused(pair):
    first, _, _ = pair
    client = connected(first)
    client.encoder.stop_token_ids = range(250)
    none = {"max_tokens": None, "temperature": None, "top_k": None, "top_p": None, "repetition_penalty": None}
    _, sample = client.infer(requests([(1, 2)]), none)[0]
    assert sample.token_ids[-1] < 250, "no limit but the model's length, and the template's stop words"
    _, sample = client.infer(requests([(1, 2)]), CONFIG | {"top_k": 1, "repetition_penalty": 1.2})[0]
    params = SamplingParams(temperature=0.9, top_k=1, repetition_penalty=1.2, stop_token_ids=range(250), max_tokens=8)
    greedy = first.client.generate([[1, 2]], sampling=params, return_text=False)[0].samples[0]
    assert sample.token_ids == greedy.token_ids
    for name, value in {"n": 2, "num_beams": 4, "best_of": 3, "prompt_logprobs": 0, "top_logprobs": 5}.items():
        with pytest.raises(InvalidArgument, match=f"^{name}: {value}"):
            client.infer(requests([(1, 2)]), CONFIG | {name: value})
    with pytest.raises(InvalidArgument, match="adapter_request"):
        client.infer(requests([(1, 2)]), CONFIG, adapter_request="x")
    client.encoder = None
    with pytest.raises(RolloutError, match=r"install\(\)"):
        client.infer(requests([(1, 2)]), CONFIG)


def test_samples_that_somebody_ends_are_an_error(fake):
    fake.answers["GetStatus"] = lambda request, context: _proto.GET_STATUS.response(lifecycle=1)
    fake.answers["GetInfo"] = lambda request, context: _proto.GET_INFO.response(max_model_len=64)
    fake.answers["Generate"] = lambda request, context: [completion(finish_reason=5), summary()]
    with pytest.raises(Aborted, match="ended by another client"):
        connected(fake).infer(requests([(1, 2, 3)]), CONFIG)


def test_a_trainer_that_replays_experts_gets_those_of_prompt_and_sample(fake):
    """In all layers, also those without experts."""
    routing = {"layers": [0, 2], "top_k": 1, "experts": 8, "returned": True}
    fake.answers["GetStatus"] = lambda request, context: _proto.GET_STATUS.response(lifecycle=1)
    fake.answers["GetInfo"] = lambda request, context: _proto.GET_INFO.response(max_model_len=64, routing=routing)
    rows = {"layers": 2, "top_k": 1}
    of_prompt = rows | {"experts": bytes([1, 2, 3, 4, 5, 6])}
    of_sample = rows | {"experts": bytes([7, 0]), "first_token": 3}

    def generate(request, context):
        if request.return_routing:
            yield _proto.GENERATE.response(prompt_routing={"routing": of_prompt})
        yield completion(token_ids=[8, 9], **({"routing": of_sample} if request.return_routing else {}))
        yield summary()

    fake.answers["Generate"] = generate
    client = connected(fake)
    ((_, sample),) = client.infer(requests([(1, 2, 3)]), CONFIG)
    assert sample.token_ids == [8, 9] and sample.routing is None
    client.return_routing = True
    ((_, experts),) = client.infer(requests([(1, 2, 3)]), CONFIG)
    assert experts[:, :, 0].tolist() == [[1, 0, 2], [3, 0, 4], [5, 0, 6], [7, 0, 0]]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("takes_adapters", [True, False], ids=["adapter", "full"])
def test_servers_sleep_between_rollouts_and_wake_for_a_push(binary, rng, level, takes_adapters):
    base = read_model(PUSH_MODEL, np.float32)
    with server(binary, PUSH_MODEL, *FLOAT32) as control:
        client = connected(control, takes_adapters=takes_adapters)
        synchronise(client, base)
        for _ in range(2):
            client.sleep(level)
            assert control.status().lifecycle is Lifecycle.ASLEEP
            if takes_adapters:
                tensors, config = random_adapter(rng, base)
                client.update_adapter_param(config, tensors)
                state = base | merged(base, tensors, config)
            else:
                state = perturbed(rng, base)
                synchronise(client, state)
            assert control.status().asleep.resident == ["weights"], "the cache sleeps while the policy comes"
            client.infer(requests([(1, 2)]), CONFIG)
            assert control.status().lifecycle is Lifecycle.RUNNING
            assert control.checksum() == checksums(state, "float32")
        if level == 1:
            client.sleep(level)
            client.infer(requests([(1, 2)]), CONFIG)
            assert control.checksum() == checksums(state, "float32"), "without a push the policy is the same"


def test_a_policy_that_does_not_fit_beside_the_old_one_takes_its_place_while_the_server_sleeps(binary, rng):
    with server(binary, PUSH_MODEL, *no_room(binary), *FLOAT32) as control:
        client = connected(control, takes_adapters=False)
        client.sleep(1)
        state = perturbed(rng, read_model(PUSH_MODEL, np.float32))
        synchronise(client, state)
        client.infer(requests([(1, 2)]), CONFIG)
        assert control.checksum() == checksums(state, "float32")


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_that_a_killed_training_left_asleep_wakes(binary, level):
    base = read_model(PUSH_MODEL, np.float32)
    with server(binary, PUSH_MODEL, *FLOAT32) as control:
        control.sleep(level)
        client = connected(control)
        synchronise(client, base)
        client.infer(requests([(1, 2)]), CONFIG)
        assert control.checksum() == checksums(base, "float32")


def test_addresses(pair):
    first, _, _ = pair
    port = int(first.address.rpartition(":")[2])
    for arguments in ((None, ["0.0.0.0"], [port]), ([f"http://localhost:{port}"],), ([f"localhost:{port}"],)):
        assert RolloutVLLMClient(*arguments, group_ports=[51216]).get_model_state_keys()
    with pytest.raises(InvalidArgument, match="1 ports for 2 hosts"):
        RolloutVLLMClient(None, ["a", "b"], [8000])
    with pytest.raises(InvalidArgument, match=r"vllm_server_base_url: 'http://localhost' .* http://HOST:50051"):
        RolloutVLLMClient(["http://localhost"])


def test_a_wrong_port_says_so(pair):
    first, _, _ = pair
    with pytest.raises(Misdirected, match=r"a port of HTTP; name that of gRPC.*--vllm_server_port"):
        RolloutVLLMClient([f"http://{first.http_address}"])
    with pytest.raises(Misdirected, match=r"does not speak TLS.*ROLLOUT_TLS_CA"):
        RolloutVLLMClient([f"https://{first.address}"])
    port = free_port()
    with pytest.raises(Unavailable, match=f"127.0.0.1:{port} does not answer"):
        RolloutVLLMClient([f"http://127.0.0.1:{port}"], connection_timeout=0.2)


def test_a_token_comes_from_the_file_that_the_environment_names(binary, tmp_path, monkeypatch):
    tokens = tmp_path / "tokens"
    tokens.write_text("generate only-samples-0123456789\ncontrol controls-all-0123456789\n")
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--auth-token-file", str(tokens)]
    with ServerProcess(binary, PUSH_MODEL, flags, token="controls-all-0123456789") as process:
        monkeypatch.setenv("ROLLOUT_TOKEN_FILE", str(tokens))
        client = connected(process, takes_adapters=False)
        base = read_model(PUSH_MODEL)
        synchronise(client, {name: array.astype(np.float32) for name, array in base.items()})
        assert len(client.infer(requests([(1, 2)] * 3), CONFIG)) == 3
        monkeypatch.delenv("ROLLOUT_TOKEN_FILE")
        with pytest.raises(Unauthenticated, match=f"{process.address}: .*ROLLOUT_TOKEN_FILE"):
            connected(process)
        monkeypatch.setenv("ROLLOUT_TOKEN_FILE", str(tmp_path / "none"))
        with pytest.raises(InvalidArgument, match=f"token file {tmp_path}/none: No such file"):
            connected(process)


def run(code, *path):
    """What a Python process without vLLM prints."""
    script = f"import sys; sys.path[:0] = {[str(entry) for entry in path]}\n{code}"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_the_stand_in_for_vllm_is_there_only_without_vllm(tmp_path):
    (tmp_path / "vllm.py").write_text("__version__ = 'real'")
    code = """
from rollout_client.swift._vllm_stub import install_stub
print(install_stub())
import importlib.util, vllm
print(vllm.__version__, importlib.util.find_spec("vllm") is not None)
"""
    assert run(code, tmp_path) == ["False", "real", "True"]
    installed, version, found = run(code)
    assert (installed, found) == ("True", "True")
    assert tuple(map(int, version.split("."))) >= (0, 10, 2), "below it ms-swift has no importance sampling"


def test_the_launcher_says_what_it_is_for():
    command = [sys.executable, "-m", "rollout_client.swift"]
    for arguments, status, text in (
        (["--help"], 0, "--vllm_server_port"),
        ([], 2, "usage"),
        (["sft"], 1, "swift sft"),
        (["rlhf"], 1, "rollout-client[swift]"),
    ):
        result = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert result.returncode == status and text in result.stdout + result.stderr, result
