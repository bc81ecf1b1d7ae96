"""A fleet in the simulation: some seeds, and what the simulation has found in the fleet, each as a short script."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rollout_client
from rollout_client import SamplingParams, Unavailable
from rollout_client.fleet import AsyncFleet, ReplicaState
from simulation.planted import PACKAGE, PLANTED, SOURCE
from simulation.run import Run, run
from simulation.workload import POISON, Interrupted

ADAPTER = ({"w": np.ones(4, np.float32)}, '{"r": 1}')
CURRENT = [ReplicaState.CURRENT] * 3


@pytest.mark.parametrize("seed", range(12))
def test_a_fleet_keeps_its_promises_whatever_goes_wrong(seed):
    run(seed)


def test_a_fleet_keeps_its_promises_for_new_seeds():
    for _ in range(6):
        run(random.randrange(1 << 32))  # the error names the seed


def test_a_seed_repeats_a_run_in_another_process():
    source = Path(rollout_client.__file__).parents[1]
    paths = os.pathsep.join([str(source), str(Path(__file__).parent)])
    program = "from simulation.run import run; print([run(seed).digest for seed in (2, 5)])"
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(found) == 1


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.breaks)
def test_the_place_of_each_planted_bug_is_there_once(bug):
    assert (SOURCE / PACKAGE / bug.file).read_text().count(bug.before) == 1
    assert bug.before != bug.after


class Script(Run):
    """A run that does what a test says, and ends as the others."""

    def __init__(self, script, past="fresh", capacity=512):
        super().__init__(0)
        self.script, self.past, self.capacity = script, past, capacity

    async def _live(self):
        await self._open(tells_instance=True, quorum=None, capacity=self.capacity, patience=60.0, resupply=None)
        await self.script(self, AsyncFleet(self.fleet))
        await self._check_rest()
        await self._close([])

    def states(self):
        return [replica.state for replica in self.fleet._core.replica_set.replicas]

    async def restart(self, number):
        self.network.machines[number].kill()
        await asyncio.sleep(2.0)
        self.network.machines[number].start()
        await asyncio.sleep(1.0)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_awaited_push_is_committed_and_rolled_back_outside_of_a_with_block(end):
    async def script(run, fleet):
        push = fleet.begin_push(transport="inline")
        await push.write("w", np.ones(4, np.float32))
        await getattr(push, end)()
        assert (await fleet.status()).weight_version == (end == "commit")

    Script(script).execute()


@pytest.mark.parametrize("one_is_lost", [False, True])
def test_a_push_that_was_dropped_lets_the_next_begin(one_is_lost):
    async def script(run, fleet):
        def drop(fleet):
            push = fleet.begin_push(transport="inline")
            if one_is_lost:
                run.network.machines[1].break_connections()
                run.pause(1.0)
            push.write("w", np.ones(4, np.float32))

        await run._threaded(drop, None)
        await run.push_has_ended()
        await run.until_settled(30.0)
        assert (await fleet.push_lora(*ADAPTER, transport="inline")).missed == []
        assert not any(machine.process.session for machine in run.network.machines)

    Script(script).execute()


def test_a_new_fleet_wakes_servers_that_a_killed_trainer_left_asleep():
    async def script(run, fleet):
        assert run.states() == CURRENT
        (output,) = await fleet.generate([[1]], return_text=False)
        assert output.samples[0].weight_versions[0].weight_version == 7

    Script(script, past="asleep").execute()


def test_a_fleet_learns_its_checkpoint_after_it_found_another_policy():
    async def script(run, fleet):
        await fleet.sleep(2)
        await fleet.wake(reload=True)
        await fleet.push_lora(*ADAPTER, transport="inline")
        await run.restart(1)
        await run.until_settled(60.0)
        assert run.states() == CURRENT
        assert len({machine.process.policy for machine in run.network.machines}) == 1

    Script(script, past="pushed").execute()


def test_a_prompt_that_ends_its_server_ends_no_more_than_four():
    async def script(run, fleet):
        prompts = [[POISON], *([i] for i in range(11))]
        with pytest.raises(Unavailable, match="4 replicas were lost while they had it"):
            await fleet.generate(prompts, sampling=SamplingParams(max_tokens=40), return_text=False)
        deaths = [line for line in run.oracle.trace if " dies of " in line]
        assert len(deaths) == 4, deaths
        await run.until_settled(60.0)

    Script(script).execute()


def answer_late(run, name, seconds):
    """The next call of this name is done at once on each server, and its answer comes so much later."""

    def of(process):
        handler = getattr(process, name)

        async def late(request):
            setattr(process, name, handler)
            answer = await handler(request)
            await asyncio.sleep(seconds)
            return answer

        setattr(process, name, late)

    for machine in run.network.machines:
        of(machine.process)


def test_a_status_from_before_a_push_does_not_make_a_replica_forget_it():
    async def script(run, fleet):
        answer_late(run, "get_status", 8.0)
        await asyncio.sleep(3.0)  # they are asked meanwhile
        old = {"w": np.zeros(4, np.float32)}
        await fleet.push_delta(old, ADAPTER[0], base_version=0, transport="inline")
        for number in (0, 2):  # no other can prove what it holds
            run.network.machines[number].kill()
        await asyncio.sleep(20.0)
        assert run.states()[1] is ReplicaState.CURRENT, run.fleet._core.replica_set.describe()

    Script(script).execute()


def test_a_status_from_before_a_commit_does_not_say_that_it_was_not_applied():
    async def script(run, fleet):
        answer_late(run, "get_status", 8.0)
        await asyncio.sleep(3.0)
        run.network.weather.lost_commit_reply = 1.0
        with pytest.raises(Unavailable, match="failed on all replicas"):
            await fleet.push_full(ADAPTER[0], transport="inline")
        run.network.weather.lost_commit_reply = 0.0
        await asyncio.sleep(12.0)
        with pytest.raises(Unavailable, match="0 can take it"):  # all have applied it, and no base of the fleet's
            await fleet.push_lora(*ADAPTER, transport="inline")

    Script(script).execute()


def test_a_checkpoint_that_was_read_again_serves_though_replicas_told_of_it_before_the_wake_had_ended():
    async def script(run, fleet):
        await fleet.push_lora(*ADAPTER, transport="inline")
        await fleet.sleep(2)
        answer_late(run, "wake", 5.0)
        await fleet.wake(reload=True)
        await asyncio.sleep(10.0)
        assert run.states() == CURRENT, run.fleet._core.replica_set.describe()
        (output,) = await fleet.generate([[1]], return_text=False)
        assert output.samples[0].weight_versions[0].weight_version == 0

    Script(script).execute()


def test_a_replica_that_has_started_again_unseen_misses_what_cannot_be_merged_into_its_checkpoint():
    async def script(run, fleet):
        await fleet.push_delta({"w": np.zeros(4, np.float32)}, ADAPTER[0], base_version=0, transport="inline")
        run.network.machines[0].kill()
        run.network.machines[0].start()
        receipt = await fleet.push_lora(*ADAPTER, transport="inline")
        assert receipt.missed == [0], receipt
        assert "started again" in receipt.replicas[0].error

    Script(script).execute()


@pytest.mark.parametrize("reload", [False, True])
def test_no_adapter_is_merged_into_what_an_interrupted_sleep_has_dropped(reload):
    async def script(run, fleet):
        await fleet.push_full({"w": np.zeros(4, np.float32)}, transport="inline")
        for machine in run.network.machines:  # their answers are late
            machine.slow = 300.0 if machine.number else 1.0
        with pytest.raises(Interrupted):
            await run._awaited(lambda fleet: fleet.sleep(2, "keep"), 0.2)
        for machine in run.network.machines:
            machine.slow = 1.0
        if reload:
            await fleet.wake(reload=True)
            assert run.fleet._core.replica_set.policy.version == 1
        full = run.fleet._core.replica_set.policy.base
        try:
            await fleet.push_lora(*ADAPTER, transport="inline")
        except Unavailable:  # fewer than the quorum still have the base
            assert run.fleet._core.replica_set.policy.adapter is None
        await asyncio.sleep(30.0)
        current = run.fleet._core.replica_set.numbers(ReplicaState.CURRENT)
        assert {run.network.machines[number].process.content[0] for number in current} <= {full}
        assert (await fleet.push_full({"w": np.ones(4, np.float32)}, transport="inline")).missed == []
        await run.until_settled(60.0)
        assert run.states() == CURRENT

    Script(script).execute()


def test_requests_that_are_cancelled_while_they_wait_leave_no_task():
    async def script(run, fleet):
        await fleet.pause("keep")
        waiting = [asyncio.ensure_future(fleet.generate([[i]], return_text=False)) for i in range(30)]
        await asyncio.sleep(1.0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await fleet.resume()  # the end of the script counts the tasks

    Script(script, capacity=1).execute()


def test_a_group_that_waited_for_a_reload_accepts_the_version_of_the_checkpoint():
    async def script(run, fleet):
        await fleet.push_lora(*ADAPTER, transport="inline")
        long = SamplingParams(max_tokens=1000)
        running = asyncio.ensure_future(fleet.generate([[1], [2], [3]], 1, long, timeout=2.0, return_text=False))
        await asyncio.sleep(1.0)
        asked = fleet.generate([[4]], request_id="waiting", return_text=False)
        waiting = asyncio.ensure_future(asked)  # for room
        await asyncio.sleep(0.1)
        await fleet.sleep(2, "keep")
        await running
        await fleet.wake(reload=True)
        (output,) = await asyncio.wait_for(waiting, 60.0)
        assert len(run.oracle.requests["waiting/0"]) == 1
        assert output.samples[0].weight_versions[0].weight_version == 0

    Script(script, capacity=1).execute()


def test_a_fleet_that_slept_is_not_paused_after_its_wake():
    async def script(run, fleet):
        await fleet.push_lora(*ADAPTER, transport="inline")
        await fleet.pause("keep")
        await fleet.sleep(1, "keep")
        await fleet.wake()
        await run.restart(0)  # it follows the fleet when it catches up
        await run.until_settled(60.0)
        assert not any(machine.process.paused for machine in run.network.machines)

    Script(script).execute()


def test_a_held_group_moves_when_its_version_will_not_come():
    async def script(run, fleet):
        await fleet.push_lora(*ADAPTER, transport="inline")
        await fleet.pause("keep")
        held = asyncio.ensure_future(fleet.generate([[1]], return_text=False))
        await asyncio.sleep(1.0)
        await fleet.sleep(2, "keep")
        await fleet.wake(reload=True)
        (output,) = await asyncio.wait_for(held, 60.0)
        assert output.samples[0].weight_versions[0].weight_version == 0

    Script(script).execute()


def test_a_current_replica_that_loses_its_weights_catches_up():
    async def script(run, fleet):
        process = run.network.machines[1].process
        process.whole = False  # as after a push in place that was interrupted
        await asyncio.sleep(10.0)
        assert process.whole and run.states() == CURRENT, run.fleet._core.replica_set.describe()

    Script(script).execute()


def test_a_current_replica_that_sleeps_alone_is_woken():
    async def script(run, fleet):
        process = run.network.machines[1].process
        process.asleep = 1
        await asyncio.sleep(10.0)
        assert process.asleep is None and run.states() == CURRENT, run.fleet._core.replica_set.describe()

    Script(script).execute()


@pytest.mark.parametrize("reload", [False, True])
def test_a_kept_request_runs_on_by_the_policy_after_a_sleep_that_discarded_its_own(reload):
    async def script(run, fleet):
        await fleet.push_full({"w": np.zeros(4, np.float32)}, transport="inline")
        asked = fleet.generate([[1]], 1, SamplingParams(max_tokens=500), return_text=False)
        kept = asyncio.ensure_future(asked)
        await asyncio.sleep(1.0)
        await fleet.sleep(2, "keep")
        await fleet.wake(reload=reload)
        if not reload:
            await asyncio.sleep(10.0)
            assert run.states() == CURRENT, run.fleet._core.replica_set.describe()
            await fleet.push_full(ADAPTER[0], transport="inline")
        (output,) = await kept
        assert [span.weight_version for span in output.samples[0].weight_versions] == [1, 0 if reload else 2]

    Script(script).execute()
