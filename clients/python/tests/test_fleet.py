"""A fleet of real servers, without Ray: the bits of one server, pushes that some miss, and who may serve when."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import numpy as np
import pytest

from fleets import (
    BASE,
    BEHIND,
    CURRENT,
    FLAGS,
    LOST,
    PROMPTS,
    SAMPLING,
    all_bits,
    ask,
    states,
    versions,
    wait_until,
    wait_until_true,
)
from models import perturbed, random_adapter
from proxies import Proxy
from rollout_client import (
    Aborted,
    AlreadyExists,
    FailedPrecondition,
    FinishReason,
    InvalidArgument,
    Lifecycle,
    NotFound,
    SamplingParams,
    ServerProcess,
    Unavailable,
)
from rollout_client.fleet import AsyncFleet, Fleet
from serving import PUSH_MODEL, bits, wait_for


def cut_during(tensors, proxy, after):
    """Tensors one by one; the connection breaks in the middle."""
    for number, pair in enumerate(tensors.items()):
        if number == after:
            proxy.cut()
        yield pair


def test_a_fleet_gives_the_bits_of_one_server_for_any_split(fleet, servers):
    (first, second), _ = servers
    before = [server.client.status().generated_tokens for server in (first, second)]
    found = ask(fleet, top_logprobs=2, prompt_logprobs=True)
    assert all(s.client.status().generated_tokens > tokens for s, tokens in zip((first, second), before, strict=True))
    expected = ask(first.client, top_logprobs=2, prompt_logprobs=True)
    assert all_bits(found) == all_bits(expected)
    assert [g.prompt_index for g in found] == list(range(len(PROMPTS)))
    assert [g.prompt_token_ids for g in found] == PROMPTS
    assert [g.prompt_logprobs for g in found] == [g.prompt_logprobs for g in expected]
    assert [s.top_logprobs for g in found for s in g.samples] == [s.top_logprobs for g in expected for s in g.samples]
    rows = [[[token, 7]] for token, *_ in PROMPTS]
    scores, alone = (client.score(PROMPTS, prompt_logprob_token_ids=rows) for client in (fleet, first.client))
    assert [s.raw_logprobs[1:] for s in scores] == [s.raw_logprobs[1:] for s in alone]
    named = [score.token_id_logprobs for score in alone]
    assert [score.token_id_logprobs for score in scores] == named
    found = fleet.generate(PROMPTS, sampling=SamplingParams(max_tokens=1), prompt_logprob_token_ids=rows)
    assert [group.prompt_logprobs.token_id_logprobs for group in found] == named
    with pytest.raises(InvalidArgument, match=r"^logprob_token_ids\[1\]\.rows"):
        fleet.score(PROMPTS[:2], prompt_logprob_token_ids=[[], [[0]] * len(PROMPTS[1])])


def test_a_small_capacity_changes_no_bits_and_loses_nothing(servers):
    (first, _), proxies = servers
    seen = []
    with Fleet([proxy.address for proxy in proxies], capacity=1) as fleet:
        found = ask(fleet, progress=lambda *counts: seen.append(counts))
    assert all_bits(found) == all_bits(ask(first.client))
    assert seen == [(done, 30, done * SAMPLING.max_tokens) for done in range(1, 31)]


def test_prompts_with_sampling_of_their_own(fleet, servers):
    (first, _), _ = servers
    each = [SamplingParams(max_tokens=2 + i, seed=40 + i, ignore_eos=True) for i in range(len(PROMPTS))]
    expected = first.client.generate(PROMPTS, 2, each, return_text=False)
    assert all_bits(fleet.generate(PROMPTS, 2, each, return_text=False)) == all_bits(expected)
    with pytest.raises(InvalidArgument, match="9 for 10 prompts"):
        fleet.generate(PROMPTS, 2, each[1:])
    with pytest.raises(InvalidArgument, match=r"sampling\[1\]: expected SamplingParams, got dict"):
        fleet.generate(PROMPTS[:2], 2, [each[0], {}])


def test_without_a_seed_each_call_draws_its_own(fleet):
    draw = SamplingParams(max_tokens=8)
    calls = [fleet.generate([PROMPTS[0]], 2, draw, return_text=False)[0].samples for _ in range(2)]
    assert len({sample.seed for samples in calls for sample in samples}) == 4
    again = fleet.generate([PROMPTS[0]], 1, SamplingParams(max_tokens=8, seed=calls[0][1].seed), return_text=False)
    assert bits(again[0].samples[0]) == bits(calls[0][1])


def test_one_receipt_has_the_digest_of_every_replica(fleet, servers, rng):
    (first, _), _ = servers
    version = fleet.status().weight_version
    adapter, config = random_adapter(rng, BASE)
    pushes = [
        lambda: fleet.push_lora(adapter, config, version=version + 5),
        lambda: fleet.push_full(perturbed(rng, BASE).items(), transport="inline"),
        lambda: fleet.push_full(perturbed(rng, BASE), transport="shared_memory"),
        lambda: fleet.push_lora(adapter, config),
    ]
    for number, push in enumerate(pushes):
        receipt = push()
        assert receipt.weight_version == version + 5 + number == fleet.status().weight_version
        assert receipt.missed == [] and {replica.digest for replica in receipt.replicas} == {receipt.digest}
        checksums = fleet.checksum()
        assert checksums[0] == checksums[1] == first.client.checksum()
        assert versions(ask(fleet)) == {receipt.weight_version}


def test_a_push_that_is_written_reaches_all(fleet, rng):
    state = perturbed(rng, BASE)
    version = fleet.status().weight_version
    with fleet.begin_push(version=version + 1) as push:
        push.write_all(state)
    assert push.receipt.missed == [] and push.receipt.weight_version == version + 1
    changed = dict(list(perturbed(rng, state).items())[:3])
    with fleet.begin_push("delta", base_version=version + 1) as push:
        for name, tensor in changed.items():
            push.write(name, tensor, state[name])
    sums = fleet.checksum()
    assert sums[0] == sums[1]
    with pytest.raises(RuntimeError), fleet.begin_push() as push:
        push.write_all(list(state.items())[:2])
        raise RuntimeError
    assert fleet.checksum() == sums and fleet.status().weight_version == version + 2
    with pytest.raises(InvalidArgument, match="model"), fleet.begin_push() as push:
        push.write_all(list(state.items())[:2])
    assert fleet.checksum() == sums and states(fleet) == [CURRENT, CURRENT]


def test_a_replica_that_missed_an_adapter_is_out_until_it_has_it(fleet, servers, rng):
    (_, second), (_, far) = servers
    before = second.client.checksum()
    adapter, config = random_adapter(rng, BASE)
    far.cut()
    receipt = fleet.push_lora(adapter, config)
    adapter.clear()  # what the fleet keeps is its own
    assert receipt.missed == [1] and receipt.replicas[1].digest is None and receipt.replicas[1].error
    assert second.client.checksum() == before
    assert states(fleet) == [CURRENT, LOST] and versions(ask(fleet)) == {receipt.weight_version}
    far.mend()
    fleet.wait_until_ready(60)
    assert second.client.checksum() == fleet.checksum()[0] != before
    assert second.client.status().weight_version == receipt.weight_version


def test_a_replica_that_missed_a_full_push_in_the_middle_is_out_until_the_next(fleet, servers, rng):
    (first, second), (_, far) = servers
    before = second.client.checksum()
    receipt = fleet.push_full(cut_during(perturbed(rng, BASE), far, 3), transport="inline")
    assert receipt.missed == [1] and receipt.replicas[0].digest == receipt.digest
    far.mend()
    wait_until(fleet, [CURRENT, BEHIND], stuck=1)
    assert second.client.checksum() == before and not second.client.status().updating
    tokens = second.client.status().generated_tokens
    assert versions(ask(fleet)) == {receipt.weight_version}
    assert second.client.status().generated_tokens == tokens
    assert "push in full" in fleet.status().replicas[1].reason
    adapter, config = random_adapter(rng, BASE)
    assert fleet.push_lora(adapter, config).missed == [1], "it would be merged into another base"
    assert fleet.push_full(BASE).missed == [] and states(fleet) == [CURRENT, CURRENT]
    assert first.client.checksum() == second.client.checksum()


def test_a_full_push_that_was_missed_is_supplied_again_and_only_if_it_is_the_same(servers, rng):
    _, proxies = servers
    state = perturbed(rng, BASE)
    given = dict(state)
    with Fleet([proxy.address for proxy in proxies], resupply=lambda: supply(given)) as fleet:
        given = perturbed(rng, BASE)  # the trainer went on
        receipt = fleet.push_full(cut_during(state, proxies[1], 3), transport="inline")
        assert receipt.missed == [1]
        proxies[1].mend()
        wait_until(fleet, [CURRENT, BEHIND], stuck=1)
        assert "digest" in fleet.status().replicas[1].reason
        given = dict(state)
        fleet.wait_until_ready(60)
        sums = fleet.checksum()
        assert sums[0] == sums[1]


def test_below_the_quorum_the_old_policy_stays_everywhere(servers, rng):
    (first, second), proxies = servers
    before, version = first.client.checksum(), first.client.status().weight_version
    with Fleet([proxy.address for proxy in proxies], quorum=2) as fleet:
        with pytest.raises(Unavailable, match=r"needs 2 of 2 replicas, and has 1"):
            fleet.push_full(cut_during(perturbed(rng, BASE), proxies[1], 3), transport="inline")
        wait_for(first.client, lambda status: not status.updating, "rid of the push")
        wait_for(second.client, lambda status: not status.updating, "rid of the push")
        for server in (first, second):
            assert server.client.checksum() == before and server.client.status().weight_version == version
        with pytest.raises(Unavailable, match="needs 2 of 2 replicas"):
            fleet.push_lora(None)
        assert versions(ask(fleet)) == {version}
        proxies[1].mend()
        fleet.wait_until_ready(60)
        assert fleet.push_lora(None).missed == []


def test_nothing_is_served_by_an_older_version_once_a_push_has_returned(fleet, servers, rng):
    """Threads ask all the time; a push comes, which a replica may miss while it has requests."""
    _, (_, far) = servers
    adapters = [random_adapter(rng, BASE) for _ in range(6)]
    returned, failures, done = [fleet.status().weight_version], [], threading.Event()
    asked = [0]

    def hammer():
        while not done.is_set():
            least = returned[-1]
            groups = ask(fleet, PROMPTS[:4], 2)
            asked[0] += 1
            first = min(span.weight_version for g in groups for s in g.samples for span in s.weight_versions)
            if first < least:
                failures.append((first, least))
            if any(s.finish_reason is not FinishReason.LENGTH for g in groups for s in g.samples):
                failures.append(groups)

    threads = [threading.Thread(target=hammer) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number, (adapter, config) in enumerate(adapters):
            running = ("keep", "wait", "recompute")[number % 3]
            if number == 3:
                far.cut()
            returned.append(fleet.push_lora(adapter, config, running=running).weight_version)
            if number == 4:
                far.mend()
                fleet.wait_until_ready(60)
            count = asked[0]
            wait_until_true(lambda count=count: asked[0] > count + 4)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures and states(fleet) == [CURRENT, CURRENT] and asked[0] > 20


def test_requests_on_a_replica_that_misses_a_push_begin_anew_elsewhere(fleet, servers, rng):
    """The replica is cut off for pushes alone, so that its requests would continue on the old version."""
    (first, second), _ = servers
    adapter, config = random_adapter(rng, BASE)
    version = fleet.status().weight_version
    long = SamplingParams(max_tokens=1500, seed=5, ignore_eos=True)
    outputs = []
    thread = threading.Thread(target=lambda: outputs.extend(fleet.generate(PROMPTS[:4], 4, long, return_text=False)))
    with contextlib.ExitStack() as stack:
        stack.callback(second.client.begin_push("full").rollback)
        thread.start()
        for server in (first, second):
            wait_for(server.client, lambda status: status.running_samples > 0, "generating")
            server.client.pause("keep")
            stack.callback(server.client.resume)
        receipt = fleet.push_lora(adapter, config, version=version + 1)
        assert states(fleet) == [CURRENT, BEHIND]
        assert receipt.missed == [1] and "under way" in receipt.replicas[1].error
        wait_for(second.client, lambda status: status.running_samples == 0, "without requests")
    thread.join()
    samples = [sample for group in outputs for sample in group.samples]
    assert len(samples) == 16 and all(sample.finish_reason is FinishReason.LENGTH for sample in samples)
    assert {sample.weight_versions[-1].weight_version for sample in samples} == {version + 1}
    fleet.wait_until_ready(60)
    assert first.client.checksum() == second.client.checksum()


def test_a_server_that_starts_again_gets_the_policy_before_any_request(binary, rng):
    adapter, config = random_adapter(rng, BASE)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(ServerProcess(binary, PUSH_MODEL, FLAGS))
        second = stack.enter_context(ServerProcess(binary, PUSH_MODEL, FLAGS))
        proxy = stack.enter_context(Proxy(second.address))
        fleet = stack.enter_context(Fleet([first.address, proxy.address]))
        fleet.push_lora(adapter, config, name="probe")
        version = fleet.push_lora(adapter, config).weight_version
        expected = ask(fleet), ask(fleet, adapter="probe")
        long = SamplingParams(max_tokens=1500, seed=5, ignore_eos=True)
        alone = first.client.generate(PROMPTS, 1, long, return_text=False)
        outputs = []
        thread = threading.Thread(target=lambda: outputs.extend(fleet.generate(PROMPTS, 1, long, return_text=False)))
        thread.start()
        wait_for(second.client, lambda status: status.running_samples > 0, "generating")
        second.process.kill()
        third = stack.enter_context(ServerProcess(binary, PUSH_MODEL, FLAGS))
        proxy.redirect(third.address)
        thread.join()
        assert all_bits(outputs) == all_bits(alone)
        fleet.wait_until_ready(60)
        assert third.client.checksum() == first.client.checksum()
        assert third.client.status().weight_version == version
        assert [a.name for a in third.client.adapters()] == ["probe"]
        assert all_bits(ask(fleet)) == all_bits(expected[0])
        assert all_bits(ask(fleet, adapter="probe")) == all_bits(expected[1])
        fourth = stack.enter_context(ServerProcess(binary, PUSH_MODEL, FLAGS))
        proxy.redirect(fourth.address)
        third.process.kill()
        third.process.wait()
        assert all_bits(ask(fleet)) == all_bits(expected[0]), "not by the checkpoint that the new server has"
        fleet.wait_until_ready(60)
        fleet.remove_adapter("probe")
        assert fleet.adapters() == {0: [], 1: []}
        with pytest.raises(NotFound, match="probe"):
            fleet.remove_adapter("probe")
        tokens = fourth.client.status().generated_tokens
        ask(fleet)
        assert fourth.client.status().generated_tokens > tokens


def test_all_sleep_and_wake_and_one_that_comes_back_meanwhile_sleeps_too(fleet, servers, rng):
    (first, second), (_, far) = servers
    adapter, config = random_adapter(rng, BASE)
    assert set(fleet.sleep()) == {0, 1} and fleet.status().lifecycle is Lifecycle.ASLEEP
    with pytest.raises(FailedPrecondition, match="wake"):
        ask(fleet)
    with fleet.awake(["weights"]):
        version = fleet.push_lora(adapter, config).weight_version
        fleet.wake(["kv_cache"])
        assert versions(ask(fleet)) == {version}
    assert [s.client.status().lifecycle for s in (first, second)] == [Lifecycle.ASLEEP] * 2
    far.cut()
    wait_until(fleet, [CURRENT, LOST])
    second.client.wake()
    far.mend()
    wait_for(second.client, lambda status: status.lifecycle is Lifecycle.ASLEEP, "asleep again")
    fleet.wake()
    fleet.wait_until_ready(60)
    assert versions(ask(fleet)) == {version} and fleet.status().lifecycle is Lifecycle.RUNNING


def test_level_two_drops_the_policy_and_a_push_or_a_reload_brings_one(fleet, servers, rng):
    (first, second), _ = servers
    checkpoint = first.client.checksum()
    fleet.push_full(perturbed(rng, BASE))
    fleet.sleep(2)
    fleet.wake(reload=True)
    fleet.wait_until_ready(60)
    assert first.client.checksum() == second.client.checksum() == checkpoint
    assert fleet.status().weight_version == 0 and versions(ask(fleet)) == {0}
    fleet.sleep(2)
    fleet.wake()
    with pytest.raises(FailedPrecondition, match="weights"):
        ask(fleet)
    version = fleet.push_full(perturbed(rng, BASE), version=7).weight_version
    assert versions(ask(fleet)) == {version}
    fleet.sleep(2)
    fleet.wake()
    assert fleet.push_full(BASE, version=version).missed == [] and versions(ask(fleet)) == {version}


def test_requests_that_a_pause_held_run_on_the_checkpoint_after_a_reload(fleet, servers, rng):
    (first, second), _ = servers
    fleet.push_full(perturbed(rng, BASE))
    fleet.pause("keep")
    outputs = []
    thread = threading.Thread(target=lambda: outputs.extend(ask(fleet)))
    thread.start()
    wait_until_true(lambda: sum(s.client.status().held_requests for s in (first, second)) == len(PROMPTS))
    fleet.sleep(2, "keep")
    fleet.wake(reload=True)
    thread.join(60)
    assert len(outputs) == len(PROMPTS) and versions(outputs) == {0}
    assert states(fleet) == [CURRENT, CURRENT]


def test_a_sleep_waits_for_all_that_was_asked_and_refuses_during_a_push(fleet):
    outputs = []
    thread = threading.Thread(target=lambda: outputs.extend(ask(fleet, PROMPTS * 10)))
    thread.start()
    wait_until_true(lambda: sum(replica.samples for replica in fleet.status().replicas) > 0)
    fleet.sleep()
    thread.join()
    assert len(outputs) == 100 and all(s.finish_reason is FinishReason.LENGTH for g in outputs for s in g.samples)
    fleet.wake()
    with fleet.begin_push() as push:
        with pytest.raises(FailedPrecondition, match="push is open"):
            fleet.sleep()
        push.write_all(BASE)


def test_the_timeout_ends_what_runs_and_what_waits(servers):
    _, proxies = servers
    long = SamplingParams(max_tokens=1500, seed=5, ignore_eos=True)
    with Fleet([proxy.address for proxy in proxies], capacity=2) as fleet:
        outputs = fleet.generate(PROMPTS * 4, 4, long, return_text=False, timeout=0.5)
        assert states(fleet) == [CURRENT, CURRENT]
    samples = [sample for group in outputs for sample in group.samples]
    assert len(samples) == 160 and samples[-1].finish_reason is FinishReason.ABORTED and samples[-1].token_ids == []


def test_abort_ends_what_runs_and_what_waits(servers):
    _, proxies = servers
    long = SamplingParams(max_tokens=1500, seed=5, ignore_eos=True)
    with Fleet([proxy.address for proxy in proxies], capacity=2) as fleet:
        outputs = []
        asked = {"request_id": "mine", "return_text": False}
        thread = threading.Thread(target=lambda: outputs.extend(fleet.generate(PROMPTS, 2, long, **asked)))
        thread.start()
        wait_until_true(lambda: sum(replica.samples for replica in fleet.status().replicas) == 4)
        with pytest.raises(AlreadyExists, match="mine"):
            fleet.generate(PROMPTS, 1, long, **asked)
        result = fleet.abort(["mine", "other"])
        assert result.aborted == ["mine"] and result.unknown == ["other"]
        thread.join()
        samples = [sample for group in outputs for sample in group.samples]
        assert len(samples) == 20 and {sample.finish_reason for sample in samples} == {FinishReason.ABORTED}
        assert any(sample.token_ids == [] for sample in samples)
        assert [group.prompt_token_ids for group in outputs] == PROMPTS
        assert len({sample.seed for sample in samples}) == 20
        assert fleet.abort("mine").unknown == ["mine"]


def test_what_is_wrong_is_refused_as_by_one_server(fleet, servers, rng):
    _, proxies = servers
    version = fleet.status().weight_version
    with pytest.raises(InvalidArgument, match=r"prompts\[3\]"):
        ask(fleet, [*PROMPTS[:3], []])
    with pytest.raises(InvalidArgument, match=r"sequences\[1\]"):
        fleet.score([[1], []])
    with pytest.raises(TypeError, match="Did you mean 'adapter'"):
        ask(fleet, adaptor="probe")
    with pytest.raises(InvalidArgument, match="put it in a list"):
        fleet.generate("a text")
    with pytest.raises(Aborted, match="expected_version"):
        fleet.push_lora(None, expected_version=version + 9)
    with pytest.raises(FailedPrecondition, match="force_version"):
        fleet.push_lora(None, version=version)
    assert fleet.push_lora(None, version=version, force_version=True).weight_version == version
    with pytest.raises(InvalidArgument, match="nonsense"):
        fleet.push_full({"nonsense": np.zeros(3, np.float32)})
    with pytest.raises(InvalidArgument, match="expected_generation"):
        fleet.push_lora(None, name="probe", expected_generation=0)
    with pytest.raises(ZeroDivisionError):
        fleet.push_full((name, 1 / 0) for name in BASE)
    with pytest.raises(InvalidArgument, match="quorum"):
        Fleet([proxy.address for proxy in proxies], quorum=3)
    with pytest.raises(Aborted, match="weight_version"):
        ask(fleet, if_weight_version=version + 1)
    assert states(fleet) == [CURRENT, CURRENT] and versions(ask(fleet)) == {version}


def test_a_fleet_of_nobody_says_who_is_missing(servers):
    (first, _), _ = servers
    with Proxy(first.address) as proxy:
        proxy.cut()
        fleet = Fleet([proxy.address], patience=0.5)
        with contextlib.closing(fleet):
            with pytest.raises(Unavailable, match=r"0 of 1 replicas are ready.*replica 0 \(127"):
                fleet.wait_until_ready(0.5)
            with pytest.raises(Unavailable, match="no replica"):
                fleet.push_lora(None)
            with pytest.raises(Unavailable, match="no replica"):
                fleet.sleep()
        with pytest.raises(FailedPrecondition, match="closed"):
            fleet.status()


def test_the_methods_of_asyncio_do_the_same(fleet, servers, rng):
    (first, second), _ = servers
    adapter, config = random_adapter(rng, BASE)

    async def main():
        other = AsyncFleet(fleet)
        found = await other.generate(PROMPTS, 3, SAMPLING, return_text=False)
        assert all_bits(found) == all_bits(ask(first.client))
        version = (await other.push_lora(adapter, config)).weight_version
        async with other.awake():
            scores = await asyncio.gather(*(other.score([prompt]) for prompt in PROMPTS))
        assert {score.weight_version for (score,) in scores} == {version}
        await other.wake()
        async with other.begin_push("full") as push:
            await push.write_all(BASE)
        assert push.receipt.missed == []
        long = SamplingParams(max_tokens=1500, seed=5, ignore_eos=True)
        task = asyncio.ensure_future(other.generate(PROMPTS, 2, long, return_text=False))
        while not any(replica.samples for replica in (await other.status()).replicas):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    for server in (first, second):
        wait_for(server.client, lambda status: status.running_samples == 0, "idle")


def supply(state):
    yield from state.items()
