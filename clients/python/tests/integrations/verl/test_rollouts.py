"""verl's own clients and adapter interface on real Ray, against real servers: what a step of its trainers does."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import peft
import pytest
import torch
from replicas import (
    GREEDY,
    MODEL,
    PROMPT,
    SAMPLING,
    Rollouts,
    adapted_model,
    base_model,
    changed,
    in_time,
    logprob_difference,
    model_config,
    rollout_config,
    server_alone,
    versions,
)
from verl.utils.profiler import ProfilerConfig
from verl.workers.rollout.replica import RolloutMode

from rollout_client import FailedPrecondition, InvalidArgument, RolloutError, ServerProcess
from serving import SMALL_CACHE, held, resident_bytes, wait_for

LONG = {**SAMPLING, "max_tokens": 400}
# As verl asks a teacher.
SCORED = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}


def test_verl_finds_the_rollout_by_its_name_alone():
    """In a process of its own, which imports nothing of this package by itself."""
    code = """
import sys, verl
assert "rollout_client.verl.adapter" not in sys.modules, "imported before it is used"
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
print(get_rollout_class("rollout_server").__name__, get_rollout_replica_class("rollout_server").__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["ServerAdapter", "RolloutServerReplica"], done.stderr


def test_a_pushed_adapter_samples_with_the_log_probabilities_of_transformers(rollouts):
    model = adapted_model(seed=1)
    in_time(rollouts.push(model, step=3))

    async def group():
        return await asyncio.gather(*[rollouts.generate() for _ in range(8)])

    outputs = in_time(group())
    assert max(logprob_difference(model, output, 0.8) for output in outputs) < 1e-4
    assert max(logprob_difference(base_model(), output, 0.8) for output in outputs) > 0.01, "the adapter changes them"
    assert len({tuple(output.token_ids) for output in outputs}) == 8, "the samples of a group are no clones"
    for output in outputs:
        assert output.stop_reason == "completed" and len(output.token_ids) == 24
        assert versions(output) == (3, 3) and output.extra_fields["global_steps"] == 3
    # Pushed anew, merged into the base again and not into what served.
    in_time(rollouts.push(changed(model, seed=2), step=4))
    output = in_time(rollouts.generate())
    assert logprob_difference(model, output, 0.8) < 1e-4 and versions(output) == (4, 4)
    # verl pushes again without a step, after other models have used the memory.
    in_time(rollouts.push(model, step=None))
    assert versions(in_time(rollouts.generate())) == (4, 4)


@pytest.mark.parametrize(
    "sampling",
    [{"top_p": 0.9}, {"top_p": 0.9, "temperature": 1.0, "repetition_penalty": 1.3}],
    ids=["another temperature", "temperature 1"],
)
def test_log_probabilities_are_the_trainers_where_filters_are_on(rollouts, sampling):
    """Of the whole vocabulary, as a trainer computes them, also of samples that were interrupted."""
    model = adapted_model(seed=11)
    in_time(rollouts.push(model, step=70))
    sampling = {**LONG, **sampling}
    _, outputs, late = in_time(interrupted(rollouts, sampling))
    for output in [*outputs, late]:
        assert len(output.log_probs) == 400
        assert logprob_difference(model, output, sampling["temperature"]) < 1e-4


def test_a_teacher_scores_the_tokens_of_a_student(running):
    """As verl's AsyncTeacherLLMServerManager asks; the row of a token has the next one."""

    async def steps():
        server = server_alone(rollout_config(None, {"addresses": [running.address]}), RolloutMode.STANDALONE)
        await server.launch_server()
        output = await server.generate(PROMPT, dict(SCORED), "scored")
        for given, media in [({"prompt_logprobs": 5}, {}), ({}, {"image_data": [b"x"]})]:
            with pytest.raises(InvalidArgument, match="a teacher scores the given tokens only"):
                await server.generate(PROMPT, {**SCORED, **given}, "refused", **media)
        return output.extra_fields

    fields = in_time(steps())
    expected = running.client.score([PROMPT])[0].raw_logprobs
    assert fields["prompt_ids"] == [[token] for token in [*PROMPT[1:], 0]]
    assert fields["prompt_logprobs"] == [[value] for value in [*expected[1:], 0.0]]


def test_full_weights_come_from_generators_of_both_kinds(full_rollouts):
    rollouts = full_rollouts
    model = changed(base_model(), seed=5)

    async def gathered():
        for pair in model.state_dict().items():
            await asyncio.sleep(0)
            yield pair

    async def steps():
        await rollouts.adapter.release()
        await rollouts.adapter.resume(["weights"])
        await rollouts.adapter.update_weights(gathered(), global_steps=1)
        await rollouts.adapter.resume(["kv_cache"])
        return await rollouts.generate()

    output = in_time(steps())
    assert logprob_difference(model, output, 0.8) < 1e-4 and versions(output) == (1, 1)
    changed(model, seed=6)
    in_time(rollouts.adapter.update_weights(iter(model.state_dict().items()), global_steps=2))
    output = in_time(rollouts.generate())
    assert logprob_difference(model, output, 0.8) < 1e-4 and versions(output) == (2, 2)


def test_a_base_that_verl_sends_first_is_what_adapters_are_merged_into(full_rollouts):
    """`load_format=dummy`: verl does not rely on the server's checkpoint."""
    rollouts = full_rollouts
    base = changed(base_model(), seed=7)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)

    def base_tensors():
        for name, tensor in model.base_model.model.state_dict().items():
            if "lora_" not in name:
                module = name.removesuffix(".weight").replace(".base_layer", "")
                wrapped = module.endswith(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
                yield (f"{module}.base_layer.weight" if wrapped and name.endswith(".weight") else name), tensor

    async def steps():
        config = model.peft_config["default"].to_dict()
        await rollouts.adapter.update_weights(base_tensors(), peft_config=config, base_sync_done=False, global_steps=3)
        changed(model, seed=8)
        await rollouts.push(model, step=3)
        return await rollouts.generate()

    output = in_time(steps())
    assert logprob_difference(model, output, 0.8) < 1e-4 and versions(output) == (3, 3)


def test_every_rank_takes_all_tensors_and_a_push_that_fails_leaves_the_policy(rollouts, monkeypatch):
    in_time(rollouts.push(adapted_model(seed=3), step=10))
    before = rollouts.direct.checksum()
    taken = []

    def tensors():
        for i in range(5):
            taken.append(i)
            yield f"model.layers.{i}.nonsense.weight", torch.zeros(2, 2)

    with pytest.raises(InvalidArgument, match="nonsense"):
        in_time(rollouts.adapter.update_weights(tensors(), global_steps=11))
    assert taken == list(range(5)), "other ranks gather with this one until the end"
    assert rollouts.direct.checksum() == before and rollouts.direct.status().weight_version == 10
    assert versions(in_time(rollouts.generate())) == (10, 10)
    taken.clear()
    monkeypatch.setattr(rollouts.adapter, "is_leader_rank", False)
    in_time(rollouts.adapter.update_weights(tensors(), global_steps=11))
    assert taken == list(range(5)), "a rank that does not push gathers too"
    with pytest.raises(NotImplementedError, match=r"wire_format='delta_flush'.*delta_sharded"):
        in_time(rollouts.adapter.update_weights(tensors(), wire_format="delta_flush"))


async def interrupted(rollouts, sampling, between=None):
    """Groups that verl ends in the middle and sends again, with or without a push in between."""
    running = [asyncio.create_task(rollouts.generate_on(sampling=sampling)) for _ in range(4)]
    start = await asyncio.to_thread(rollouts.direct.status)
    await asyncio.to_thread(
        wait_for, rollouts.direct, lambda s: s.generated_tokens > start.generated_tokens + 40, "generating"
    )
    result = await rollouts.replica.abort_all_requests()
    late = asyncio.create_task(rollouts.generate_on(sampling=sampling))
    if between is not None:
        await between()
    assert not any(task.done() for task in [*running, late])
    await rollouts.replica.resume_generation()
    return result, await asyncio.gather(*running), await late


def test_samples_that_were_interrupted_go_on_as_if_they_were_not(rollouts):
    model = adapted_model(seed=4)
    in_time(rollouts.push(model, step=20))
    sampling = {**GREEDY, "max_tokens": 400}
    whole = in_time(rollouts.generate_on(sampling=sampling))
    result, outputs, late = in_time(interrupted(rollouts, sampling))
    assert result["aborted_count"] == len(result["request_ids"]) == 4
    for output in [*outputs, late]:
        assert output.token_ids == whole.token_ids and output.log_probs == whole.log_probs
        assert output.stop_reason == whole.stop_reason == "length" and versions(output) == (20, 20)


def test_samples_that_a_push_interrupts_say_which_policies_made_them(rollouts):
    old, new = adapted_model(seed=5), adapted_model(seed=6)
    in_time(rollouts.push(old, step=30))
    _, outputs, late = in_time(interrupted(rollouts, LONG, between=lambda: rollouts.push(new, step=31)))
    assert versions(late) == (31, 31) and logprob_difference(new, late, 0.8) < 1e-4
    assert len({tuple(output.token_ids) for output in outputs}) == 4
    for output in outputs:
        assert versions(output) == (30, 31) and len(output.token_ids) == 400
        by_policy = [token_differences(model, output) for model in (old, new)]
        cut = next(i for i, difference in enumerate(by_policy[0]) if difference > 1e-3)
        assert 0 < cut < 400, "some tokens are of the old policy and some of the new one"
        assert max(by_policy[0][:cut]) < 1e-4
        # The first of the new policy may be as likely under both; the rest is its own.
        assert max(by_policy[1][cut:]) < 1e-4


@torch.no_grad()
def token_differences(model, output):
    ids = torch.tensor([PROMPT + output.token_ids])
    logits = model(ids).logits[0, len(PROMPT) - 1 : -1] / 0.8
    expected = logits.log_softmax(-1).gather(-1, ids[0, len(PROMPT) :, None])[:, 0]
    return (torch.tensor(output.log_probs) - expected).abs().tolist()


def test_requests_that_come_during_an_abort_may_be_turned_away(rollouts):
    in_time(rollouts.push(adapted_model(seed=7), step=40))

    async def steps():
        await rollouts.replica.abort_all_requests(reject_request=True)
        refused = await rollouts.generate()
        # A second abort declares anew what becomes of those that come.
        await rollouts.replica.abort_all_requests()
        waiting = asyncio.create_task(rollouts.generate())
        await rollouts.replica.resume_generation()
        return refused, await waiting

    refused, waited = in_time(steps())
    assert refused.stop_reason == "aborted" and refused.token_ids == [] and versions(refused) == (40, 40)
    assert waited.stop_reason == "completed" and len(waited.token_ids) == 24


def test_an_asynchronous_step_aborts_gives_the_cache_back_pushes_and_goes_on(rollouts):
    """The order of verl's CheckpointEngineManager, and that of its colocated asynchronous trainer."""
    in_time(rollouts.push(adapted_model(seed=8), step=50))
    new = adapted_model(seed=9)

    async def push_with_cache_released():
        await rollouts.replica.release_kv_cache()
        assert rollouts.direct.status().asleep.resident == ["weights"]
        await rollouts.push(new, step=51)
        await rollouts.replica.resume_kv_cache()

    _, outputs, late = in_time(interrupted(rollouts, LONG, push_with_cache_released))
    assert {versions(output) for output in outputs} == {(50, 51)} and versions(late) == (51, 51)

    async def push_with_all_asleep():
        await rollouts.replica.sleep()
        await rollouts.adapter.resume(["weights"])
        await rollouts.push(new, step=52)
        await rollouts.adapter.resume(["kv_cache"])

    _, outputs, late = in_time(interrupted(rollouts, LONG, push_with_all_asleep))
    assert {versions(output) for output in outputs} == {(51, 52)} and versions(late) == (52, 52)


def test_asleep_it_holds_no_memory_and_says_so_to_whoever_asks(rollouts):
    in_time(rollouts.push(adapted_model(seed=10), step=60))
    before = in_time(rollouts.generate(sampling=GREEDY))
    awake = rollouts.direct.status().memory.entries
    in_time(rollouts.replica.sleep())
    status = rollouts.direct.status()
    assert status.asleep.level == 1, "what the adapter is merged into is kept"
    assert not {"weights", "kv_cache"} & held(status)
    assert awake["weights"] > 0 and awake["kv_cache"] > 60 << 20
    with pytest.raises(FailedPrecondition, match="asleep"):
        in_time(rollouts.generate())
    in_time(rollouts.replica.wake_up())
    after = in_time(rollouts.generate(sampling=GREEDY))
    assert after.token_ids == before.token_ids and after.log_probs == before.log_probs


def test_full_weights_are_gone_in_a_sleep_until_they_are_pushed(full_rollouts):
    rollouts, model = full_rollouts, base_model()
    in_time(rollouts.adapter.update_weights(iter(model.state_dict().items()), global_steps=4))
    awake = resident_bytes(rollouts.pid)
    in_time(rollouts.adapter.release())
    status = rollouts.direct.status()
    assert status.asleep.level == 2 and not {"weights", "spare_weights", "kv_cache"} & held(status)
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert resident_bytes(rollouts.pid) < awake - weights
    in_time(rollouts.replica.wake_up())
    with pytest.raises(FailedPrecondition, match="push"):
        in_time(rollouts.generate())
    in_time(rollouts.adapter.update_weights(iter(model.state_dict().items()), global_steps=5))
    assert logprob_difference(model, in_time(rollouts.generate()), 0.8) < 1e-4


def test_a_server_of_its_own_machine_does_not_sleep_and_stays_when_its_actor_ends(running):
    async def steps():
        server = server_alone(rollout_config(None, {"addresses": [running.address]}), RolloutMode.STANDALONE)
        await server.launch_server()
        await server.sleep()
        asleep = running.client.status().asleep
        await server.wake_up()
        output = await server.generate(PROMPT, dict(SAMPLING), "alone")
        return asleep, output, await server.get_server_address()

    asleep, output, address = in_time(steps())
    assert asleep is None and len(output.token_ids) == 24
    assert ":".join(address) == running.address


def test_the_file_of_the_token_may_be_the_servers_own(binary, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("generate samples-only-0123456789\ncontrol controls-all-0123456789\n")
    flags = [*SMALL_CACHE, "--mem-util", "0.1", "--auth-token-file", str(tokens)]

    async def steps(address):
        server = server_alone(rollout_config(None, {"addresses": [address], "token_file": str(tokens)}))
        await server.launch_server()
        await server.clear_kv_cache()
        return await server.generate(PROMPT, dict(SAMPLING), "alone")

    with ServerProcess(binary, MODEL, flags, token="controls-all-0123456789") as process:
        assert len(in_time(steps(process.address)).token_ids) == 24


def test_a_profile_is_a_trace_of_the_time_between_its_start_and_its_end(running, tmp_path):
    profiler = ProfilerConfig(enable=True, save_path=str(tmp_path / "profiles"))

    async def steps():
        server = server_alone(rollout_config(None, {"addresses": [running.address]}, profiler=profiler))
        await server.launch_server()
        await server.set_global_steps(7)
        await server.start_profile()
        await server.generate(PROMPT, dict(SAMPLING), "profiled")
        await server.stop_profile()

    in_time(steps())
    events = json.loads((tmp_path / "profiles" / "rollout_server_replica0_step7.json").read_text())
    assert {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "engine"}} in events
    assert {event["tid"] for event in events if event["ph"] == "X"} <= {1, 2}
    assert sum(event["args"].get("sampled_tokens", 0) for event in events) >= 24


def test_full_determinism_gives_the_same_group_again(running):
    async def steps():
        config = rollout_config(None, {"addresses": [running.address]}, full_determinism=True)
        server = server_alone(config, RolloutMode.STANDALONE)
        await server.launch_server()
        return [
            await asyncio.gather(*[server.generate(PROMPT, dict(SAMPLING), f"det-{i}") for i in range(6)])
            for _ in range(2)
        ]

    first, second = in_time(steps())
    assert [output.token_ids for output in first] == [output.token_ids for output in second]
    assert [output.log_probs for output in first] == [output.log_probs for output in second]
    assert len({tuple(output.token_ids) for output in first}) == 6


@pytest.mark.parametrize(
    ("options", "settings", "words"),
    [
        ({"binary": "/nowhere/rollout-server"}, {}, ["binary: no executable at /nowhere/rollout-server"]),
        ({"nonsense": 1}, {}, ["replica 0", "--nonsense"]),
        ({"tp": 3}, {}, ["replica 0", "--tp", "3"]),
        ({}, {"gpu_memory_utilization": 0.0001}, ["replica 0", "--mem-util"]),
        ({"addresses": ["127.0.0.1:1"]}, {}, ["127.0.0.1:1"]),
    ],
)
def test_a_start_that_fails_says_why(binary, options, settings, words):
    options = options if "binary" in options or "addresses" in options else {"binary": str(binary), **options}
    with pytest.raises(RolloutError) as caught:
        in_time(server_alone(rollout_config(None, options, **settings)).launch_server())
    assert all(word in str(caught.value) for word in words), caught.value


def test_errors_of_a_start_come_through_ray_and_ranks_that_there_are_not_are_refused(cluster, binary):
    with pytest.raises(RolloutError, match=r"replica 2: the server ended(.|\n)*--tp"):
        in_time(Rollouts(rollout_config(binary, {"binary": str(binary), "tp": 3}), model_config(), rank=2).start())
    with pytest.raises(InvalidArgument, match="tensor_model_parallel_size=2: a rollout-server runs on one machine"):
        in_time(Rollouts(rollout_config(binary, tensor_model_parallel_size=2), model_config()).start())


def test_other_media_and_unknown_parameters_are_refused(rollouts):
    for media, message in [
        ({"video_data": [b"x"]}, "video_data: rollout-server takes token ids and images only"),
        ({"image_data": [b"x"]}, "image_data: .*qwen2 takes no images, or verl has no processor for it"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            in_time(rollouts.generate(**media))
    with pytest.raises(InvalidArgument, match="no such parameter"):
        in_time(rollouts.generate(sampling={"best_of": 2}))
