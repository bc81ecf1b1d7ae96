"""The clients of a fleet and the faults around it, drawn from a seed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from rollout_client import Cancelled, FailedPrecondition, RolloutError, SamplingParams
from rollout_client.errors import Aborted, DataLoss, DeadlineExceeded, Unavailable
from rollout_client.fleet import AsyncFleet, Fleet, PartialCommit

from .oracle import content_of
from .server import DELTA, FULL, LORA, content_after, digest_of_push

if TYPE_CHECKING:
    from .run import Run

KINDS = {"lora": LORA, "full": FULL, "delta": DELTA}
POISON = 666
"""A prompt that begins with this ends the server that runs it."""
# The errors that faults, lifecycle calls and deadlines may cause. A request that ends with another one is a failure.
REQUEST_ERRORS = (Unavailable, FailedPrecondition, DeadlineExceeded, Cancelled, Aborted, DataLoss)


class Interrupted(Exception):
    """The caller was cancelled, or interrupted."""


class Trainer:
    """Gives orders and pushes, one after the other, as one trainer does."""

    def __init__(self, run: Run, rng: Random) -> None:
        self.run, self.rng, self.oracle = run, rng, run.oracle
        self.state = {"w": np.zeros(4, np.float32)}
        self.names = itertools.count()
        self.asked: list[asyncio.Future[None]] = []
        """Requests that were to run as an order came."""

    @property
    def fleet(self) -> Fleet:
        return self.run.fleet

    async def work(self, actions: int) -> None:
        """Does so many things."""
        rng = self.rng
        deeds = [self.push] * 8 + [self.push_bit_by_bit] * 3 + [self.sleep] * 3 + [self.pause, self.abort, self.look]
        try:
            for _ in range(actions):
                await asyncio.sleep(rng.expovariate(1 / self.run.think))
                await self._do(rng.choice(deeds))
            await asyncio.gather(*self.asked)
        finally:
            for task in self.asked:
                task.cancel()

    async def _do(self, deed: Callable[[], Awaitable[None]]) -> None:
        self.oracle.note(f"trainer: {deed.__name__}")
        try:
            await deed()
        except (RolloutError, Interrupted) as error:
            self.oracle.note(f"trainer: {type(error).__name__}: {error}")
            self.oracle.outcomes[f"{deed.__name__}: {type(error).__name__}"] += 1
        else:
            self.oracle.outcomes[f"{deed.__name__}: done"] += 1

    async def interruptible(self, use: Callable[[AsyncFleet], Awaitable[Any]], plain: Callable[[Fleet], Any]) -> Any:
        """Calls the fleet or the asyncio fleet; sometimes the caller is gone before the end."""
        return await self.run.called(self.rng, use, plain)

    # Pushes.

    async def push(self, kind: str | None = None, *, whole: bool = False) -> None:
        """A push in one call."""
        kind, options = kind or self.rng.choices(["lora", "full", "delta"], [5, 2, 2])[0], self._options()
        new = self._tensors()
        given: tuple[Any, ...] = ()
        if kind == "lora":
            use = lambda fleet: fleet.push_lora(new, '{"r": 1}', **options)  # noqa: E731
        elif kind == "full":
            use = lambda fleet: fleet.push_full(new, **options)  # noqa: E731
        else:
            given = (self.state, new, self.oracle.eras[-1].version)
            options.pop("version", None)
            use = lambda fleet: fleet.push_delta(given[0], given[1], base_version=given[2], **options)  # noqa: E731
        if whole:
            options = {"transport": "inline"}
            await self._pushed(kind, new, lambda: self.run.uninterrupted(use))
        else:
            await self._pushed(kind, new, lambda: self.interruptible(use, use))

    async def push_bit_by_bit(self) -> None:
        """A push that is written, and committed, rolled back, or left alone."""
        rng, options, new = self.rng, self._options(), self._tensors()
        kind = rng.choice(["lora", "full"])
        end = rng.choices(["commit", "rollback", "raise", "drop", "cancel"], [4, 1, 1, 2, 1])[0]
        config = '{"r": 1}' if kind == "lora" else None

        def plain(fleet: Fleet) -> Any:
            push = fleet.begin_push(kind, config, **options)
            self.run.pause(rng.uniform(0, 3))
            if end == "drop":
                push.write("w", new["w"])
                return None
            with push:
                push.write("w", new["w"])
                self.run.pause(rng.uniform(0, 3))
                if end == "rollback":
                    push.rollback()
                elif end == "raise":
                    raise Interrupted("the trainer's own error")
                elif end == "cancel":
                    fleet.cancel_update()
            return push.receipt

        async def use(fleet: AsyncFleet) -> Any:
            async with fleet.begin_push(kind, config, **options) as push:
                await push.write("w", new["w"])
                await asyncio.sleep(rng.uniform(0, 3))
                if end in ("rollback", "drop"):
                    await push.rollback()
                elif end == "raise":
                    raise Interrupted("the trainer's own error")
                elif end == "cancel":
                    await fleet.cancel_update()
            return push.receipt

        await self._pushed(kind, new, lambda: self.interruptible(use, plain))

    def _options(self) -> dict[str, Any]:
        rng = self.rng
        options: dict[str, Any] = {
            "running": rng.choices(["keep", "recompute", "wait", "abort"], [6, 2, 2, 1])[0],
            "transport": "inline",
        }
        if rng.random() < 0.2:
            options["timeout"] = rng.choice([0.05, 2.0, 30.0])
        if rng.random() < 0.2:
            options["version"] = self.oracle.eras[-1].version + rng.randint(0, 3)
        return options

    def _tensors(self) -> dict[str, Any]:
        return {"w": np.array([self.rng.random() for _ in range(4)], np.float32) + next(self.names)}

    async def _pushed(self, kind: str, new: dict[str, Any], push: Callable[[], Awaitable[Any]]) -> None:
        oracle, fleet = self.oracle, self.fleet
        now = fleet._core.replica_set.policy
        expected = None
        if kind != "delta":  # whose payload is not the tensor
            digest = digest_of_push({"w": xxhash.xxh3_128(new["w"].tobytes()).digest()})
            content = content_after((now.base, now.adapter), KINDS[kind], digest.hex())
            expected = content_of(type(now)(0, *content))
        oracle.begin_push()
        must: bool | None = None
        try:
            with oracle.cutting():
                receipt = await push()
            must = receipt is not None
        except PartialCommit as error:
            must, receipt = True, error.receipt
            raise
        except Cancelled:
            receipt = None  # by `close`, or by the trainer itself
            raise
        except (RolloutError, ValueError):
            must, receipt = False, None
            raise
        except BaseException:
            receipt = None
            raise
        finally:
            await self.run.push_has_ended()
            policy = fleet._core.replica_set.policy
            if self.run.lied:
                expected = None
            oracle.end_push(policy, expected, must)
            if oracle.eras[-1].content == expected or must:
                self.state = new
                if kind == "full":
                    self.run.supply = new
            if receipt is not None:
                oracle.check_receipt(receipt)

    # Orders.

    async def order(self, use: Callable[[AsyncFleet], Awaitable[Any]]) -> Any:
        """Calls the fleet or the asyncio fleet; often the caller is gone while servers have the order."""
        return await self.run.called(self.rng, use, use, often=0.4, seconds=(0.005, 0.02, 0.5, 2.0))

    async def sleep(self) -> None:
        """Sleep, some time later wake, and what a trainer does around it."""
        rng, oracle, run = self.rng, self.oracle, self.run
        level, mode = rng.choice([1, 2]), rng.choice(["wait", "abort", "keep"])
        absent = rng.choice(run.network.machines) if rng.random() < 0.3 else None
        if absent is not None:  # it misses the sleep, and the wake
            oracle.note(f"server {absent.number} is cut off")
            absent.cut = True
            absent.break_connections()
            await asyncio.sleep(1.0)
        if rng.random() < 0.7:
            await self._ask()
        order = lambda fleet: fleet.sleep(level, mode)  # noqa: E731
        try:
            with oracle.cutting():
                oracle.begin_sleep()
                slept = await self.order(order)
            oracle.end_sleep(failed=False)
            run.check_asleep(slept)
        except (RolloutError, Interrupted):
            oracle.end_sleep(failed=True)
            if level == 2 and rng.random() < 0.4:  # before anybody has looked at the replicas
                await self.push("lora")
            raise
        finally:
            self._note_policy()
            await self._wake(level)
            if absent is not None:
                absent.cut = False

    async def _ask(self) -> None:
        """Requests that run now."""
        generator = Generator(self.run, Random(self.rng.getrandbits(64)), 50 + len(self.asked))
        self.asked.append(asyncio.ensure_future(generator.generate(f"asked-{len(self.asked)}")))
        await asyncio.sleep(self.rng.uniform(0.0, 0.2))

    async def _wake(self, level: int) -> None:
        rng, oracle = self.rng, self.oracle
        await asyncio.sleep(rng.uniform(0, 8))
        self.oracle.sleeps = False
        reload = level == 2 and rng.random() < 0.5
        if reload and self.fleet._core.replica_set.dropped:  # a policy that survived a failed sleep keeps serving
            oracle.begin_reload()
        for _ in range(20):
            wake = lambda fleet: fleet.wake(None, reload=reload)  # noqa: E731
            try:
                with oracle.cutting():
                    await self.order(wake)
                self._note_policy()
                oracle.end_reload()
                break
            except (RolloutError, Interrupted) as error:
                oracle.note(f"trainer: wake: {type(error).__name__}: {error}")
                await asyncio.sleep(2.0)
            finally:
                self._note_policy()
        if level == 2 and not reload:
            await self.push(rng.choice(["lora", "full"]))

    def _note_policy(self) -> None:
        """A sleep of level 2 and a reload have changed the policy."""
        now, policy = self.oracle.eras[-1], self.fleet._core.replica_set.policy
        if (now.content, now.version) != (content_of(policy), policy.version):
            self.oracle.require(content_of(policy).startswith("checkpoint|None"), f"an order has made it {policy}")
            self.oracle.set_policy(policy)
        self.oracle.may_repeat |= self.fleet._core.replica_set.dropped

    async def pause(self) -> None:
        mode = self.rng.choice(["wait", "abort", "keep"])
        order = lambda fleet: fleet.pause(mode)  # noqa: E731
        try:
            with self.oracle.cutting():
                await self.order(order)
            await asyncio.sleep(self.rng.uniform(0, 8))
        finally:
            await self.run.resumed()

    async def abort(self) -> None:
        order = lambda fleet: fleet.abort(all=True)  # noqa: E731
        with self.oracle.cutting():
            await self.order(order)

    async def look(self) -> None:
        looks = [
            lambda fleet: fleet.status(),
            lambda fleet: fleet.checksum(),
            lambda fleet: fleet.info(),
            lambda fleet: fleet.adapters(),
            lambda fleet: fleet.parameters(),
            lambda fleet: fleet.reset_prefix_cache(),
        ]
        look = self.rng.choice(looks)
        await self.order(look)


class Generator:
    """Asks for samples, one call after the other."""

    def __init__(self, run: Run, rng: Random, number: int) -> None:
        self.run, self.rng, self.number = run, rng, number

    async def work(self, calls: int) -> None:
        for call in range(calls):
            await asyncio.sleep(self.rng.expovariate(1 / self.run.think))
            await (self.score() if self.rng.random() < 0.15 else self.generate(f"g{self.number}-{call}"))

    async def generate(self, name: str, *, poison: bool = False, checked: bool = False) -> None:
        """One call: it ends once, with samples of a policy that may serve, or with an error that says why not."""
        rng, run, oracle = self.rng, self.run, self.run.oracle
        count, n = rng.randint(1, 6), rng.choice([1, 1, 2, 4])
        prompts = [[rng.randrange(100) for _ in range(rng.randint(1, 4))] for _ in range(count)]
        if poison or (run.poison and rng.random() < 0.1):
            prompts[0][0] = POISON
        params = SamplingParams(max_tokens=rng.choice([1, 3, 8, 40]), seed=rng.getrandbits(64))
        version = oracle.eras[-1].version if oracle.eras else 0
        options: dict[str, Any] = {"request_id": name, "return_text": False}
        timeout = rng.choice([None, None, 0.3, 5.0, 60.0])
        if rng.random() < 0.1:
            options["min_weight_version"], timeout = version + rng.randint(0, 1), 20.0
        elif rng.random() < 0.1:
            options["if_weight_version"] = version - rng.randint(0, 1) if version else 0
        if checked:
            options, timeout = {"request_id": name, "return_text": False}, 600.0
        use = lambda fleet: fleet.generate(prompts, n, params, timeout=timeout, **options)  # noqa: E731
        begun = run.clock()
        oracle.note(f"{name}: generate {count} x {n} x {params.max_tokens} {options} {timeout}")
        try:
            outputs = await (run.uninterrupted(use) if checked else run.called(rng, use, use))
        except Interrupted:
            oracle.outcomes["generate: interrupted"] += 1
            return
        except REQUEST_ERRORS as error:
            oracle.note(f"{name}: {type(error).__name__}: {error}")
            oracle.outcomes[f"generate: {type(error).__name__}"] += 1
            oracle.require(not checked, f"{name} failed though all is well: {error!r}")
            return
        oracle.note(f"{name}: done")
        oracle.outcomes["generate: done"] += 1
        oracle.check_outputs(
            name,
            begun=begun,
            prompts=prompts,
            n=n,
            params=params,
            timeout=timeout,
            if_version=options.get("if_weight_version"),
            outputs=outputs,
        )

    async def score(self) -> None:
        run, oracle, begun = self.run, self.run.oracle, self.run.clock()
        use = lambda fleet: fleet.score([[1, 2, 3], [4, 5]], timeout=120.0)  # noqa: E731
        try:
            scores = await run.called(self.rng, use, use)
        except Interrupted:
            return
        except REQUEST_ERRORS as error:
            oracle.outcomes[f"score: {type(error).__name__}"] += 1
            return
        oracle.outcomes["score: done"] += 1
        for score in scores:
            oracle.check_score(begun, score.weight_version)


class Faults:
    """Causes faults, in the world's loop."""

    def __init__(self, run: Run, rng: Random) -> None:
        self.run, self.rng = run, rng
        self.ended = False

    async def work(self) -> None:
        rng, run = self.rng, self.run
        kinds = [
            self.kill,
            self.restart,
            self.shut_down,
            self.cut,
            self.stop,
            self.reset,
            self.refuse,
            self.lie,
            self.slow,
            self.move,
        ]
        chosen = rng.sample(kinds, rng.randint(1, len(kinds)))
        while not self.ended:
            await asyncio.sleep(rng.expovariate(1 / run.calm))
            if self.ended:
                return
            fault, machine = rng.choice(chosen), rng.choice(run.network.machines)
            run.oracle.note(f"fault: {fault.__name__} of server {machine.number}")
            run.network.faults[fault.__name__] += 1
            await fault(machine)

    async def kill(self, machine: Any) -> None:
        machine.kill()
        await asyncio.sleep(self.rng.choice([self.rng.uniform(0.3, 1), self.rng.uniform(1, 20)]))
        if machine.process is None:
            machine.start()

    async def restart(self, machine: Any) -> None:
        """So soon that only a call that runs notices it."""
        machine.kill()
        await asyncio.sleep(0.3)
        if machine.process is None:
            machine.start()

    async def shut_down(self, machine: Any) -> None:
        if machine.process is not None:
            machine.process.shut_down()
            await asyncio.sleep(self.rng.uniform(0, 1.5))
            await self.kill(machine)

    async def cut(self, machine: Any) -> None:
        machine.cut = True
        machine.break_connections()
        await asyncio.sleep(self.rng.uniform(0, 20))
        machine.cut = False

    async def reset(self, machine: Any) -> None:
        machine.break_connections()

    async def stop(self, machine: Any) -> None:
        machine.set_stopped(True)
        await asyncio.sleep(self.rng.choice([1.0, 15.0, 80.0]) * self.rng.random())
        machine.set_stopped(False)

    async def refuse(self, machine: Any) -> None:
        if machine.process is not None:
            machine.process.refuse_header = ("RESOURCE_EXHAUSTED", "no memory for the update")

    async def lie(self, machine: Any) -> None:
        if machine.process is not None and self.run.may_lie:
            machine.process.lies, self.run.lied = bytes([machine.number]), True

    async def slow(self, machine: Any) -> None:
        machine.slow = 20.0
        await asyncio.sleep(self.rng.uniform(0, 20))
        machine.slow = 1.0

    async def move(self, machine: Any) -> None:
        """Its server starts on another node."""
        self.run.oracle.note(f"server {machine.number} moves")
        machine.kill()
        await asyncio.sleep(self.rng.uniform(1, 10))
        machine.address = f"server-{machine.number}-{self.rng.getrandbits(16)}:50051"
        machine.start()
