"""One run: three servers, a fleet, its clients and the faults, all from one integer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import hashlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc

from rollout_client import (
    RolloutError,
    _async_connection,
    _channel,
    _connection,
    _convert,
    _progress,
    _pusher,
    _senders,
    aio,
    client,
)
from rollout_client.fleet import (
    AsyncFleet,
    Fleet,
    ReplicaState,
    _core,
    _fanout,
    _loop,
    _pushes,
    _replica,
    _replica_set,
    _requests,
)
from rollout_client.fleet._core import Core
from rollout_client.fleet._replica import ResolvedEndpoint
from rollout_client.fleet._router import Assignment

from .network import Channel, Machine, Network, Weather
from .oracle import Oracle, content_of
from .push_stream import PushStream
from .scheduler import Condition, Event, Executor, Scheduler, Thread, VirtualLoop, by_serial, threading_of
from .server import CHECKPOINT, PAST
from .workload import POISON, Faults, Generator, Interrupted, Trainer

REPLICAS = 3
CALM_SECONDS = 400.0
"""In which all replicas catch up once nothing goes wrong any more: twice the longest timeouts between the two."""

by_serial(Assignment)


@dataclass
class Result:
    """Of one run."""

    seed: int
    trace: list[str]
    outcomes: Counter[str]
    faults: Counter[str]
    seconds: float
    """Of virtual time."""
    turns: int

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()


class Endpoint:
    """Where a simulated server is, as Ray tells of it."""

    def __init__(self, machine: Machine, *, tells_instance: bool) -> None:
        self.machine, self.tells_instance = machine, tells_instance

    async def resolve(self) -> ResolvedEndpoint:
        process = self.machine.process
        instance = f"{process.begun}" if self.tells_instance and process is not None else ""
        return ResolvedEndpoint(self.machine.address, instance)


class _FanOutPusher(_pusher.Pusher):
    """Marks the streams of the fleet's pushes."""

    def start(self, timeout: float | None) -> Any:
        stream = super().start(timeout)
        stream.of_push = True
        return stream


class _FanOutClient(client.RolloutClient):
    """A client of the fleet's pushes."""

    def __init__(self, address: str, **options: Any) -> None:
        super().__init__(address, **options)
        self._pusher = _FanOutPusher(self._connection, self._segments)


class Run:
    """Everything of one run."""

    def __init__(self, seed: int) -> None:
        self.seed, rng = seed, Random(seed)
        self.rng = rng
        self.problems: list[str] = []
        self.loops: list[VirtualLoop] = []
        self.scheduler = Scheduler(Random(rng.getrandbits(64)))
        self.clock = self.scheduler.monotonic
        self.oracle = Oracle(self.clock)
        self.names = Random(rng.getrandbits(64))
        self.think, self.calm = rng.choice([0.2, 1.0, 5.0]), rng.choice([2.0, 10.0, 30.0])
        self.may_lie, self.poison = rng.random() < 0.2, rng.random() < 0.1
        self.lied = False
        self.past = rng.choices(["fresh", "pushed", "paused", "asleep"], [6, 2, 1, 1])[0]
        self.supply: dict[str, Any] = {}
        self.fleet: Fleet | None = None

    def execute(self) -> Result:
        """Runs it to its end.

        Raises:
            AssertionError: a promise was not kept.
        """
        gc.disable()  # it would run at other times in another process
        with self._simulated():
            try:
                self.scheduler.run(self._main)
            finally:
                self.scheduler.close()
                for loop in self.loops:
                    loop.close()
                gc.enable()
        assert not self.problems, self.problems
        return Result(
            self.seed,
            self.oracle.trace,
            Counter(self.oracle.outcomes),
            self.network.faults,
            self.scheduler.now,
            self.scheduler.turns,
        )

    @contextlib.contextmanager
    def _simulated(self) -> Iterator[None]:
        """Puts the clock, the threads and the network in place of the real ones."""
        scheduler = self.scheduler
        Condition.scheduler = Executor.scheduler = scheduler
        clock = SimpleNamespace(monotonic=scheduler.monotonic, perf_counter=scheduler.monotonic)
        changes: list[tuple[Any, str, Any]] = [
            (module, "time", clock)
            for module in (_core, _pushes, _replica, _requests, _replica_set, _progress, _senders, aio, client)
        ]
        changes += [
            (_loop, "threading", threading_of(scheduler)),
            (_fanout, "ThreadPoolExecutor", Executor),
            (concurrent.futures._base, "threading", SimpleNamespace(Condition=Condition, Event=Event, Lock=Condition)),
            (asyncio, "new_event_loop", self._new_loop),
            (_pusher, "ClientStream", PushStream),
            (_core, "RolloutClient", _FanOutClient),
            (_requests, "secrets", SimpleNamespace(randbits=self.names.getrandbits)),
            (_requests, "new_request_id", lambda: f"r{self.names.getrandbits(48)}"),
            (_convert, "new_request_id", lambda: f"r{self.names.getrandbits(48)}"),
            (_channel, "explained", lambda error, address, tls: error),
        ]
        changes += [(module, "make_channel", self._channel) for module in (_async_connection, _connection)]
        with contextlib.ExitStack() as stack:
            for module, name, value in changes:
                stack.enter_context(mock.patch.object(module, name, value))
            yield

    def _new_loop(self) -> VirtualLoop:
        self.loops.append(VirtualLoop(self.scheduler, self.problems.append))
        return self.loops[-1]

    def _channel(self, library: Any, address: str, tls: object) -> Channel:
        return Channel(self.network, address, blocks=library is grpc)

    def _main(self) -> None:
        rng = self.rng
        world = asyncio.new_event_loop()
        self.network = PushStream.network = Network(self.scheduler, world, Random(rng.getrandbits(64)), self.oracle)
        streams = self.network.streams
        self.oracle.is_committing = lambda: any(stream.of_push and stream.is_committing for stream in streams)
        self.oracle.poison = self._poison
        living = Thread(self.scheduler, world.run_forever, "world")
        living.start()
        machines = [Machine(number, f"server-{number}:50051", self.network) for number in range(REPLICAS)]
        self.network.machines = machines
        for machine in machines:
            machine.start()
        self._prepare_servers()
        loop = asyncio.new_event_loop()
        loop.run_until_complete(self._live())
        asyncio.run_coroutine_threadsafe(self._end_world(), world).result()
        world.call_soon_threadsafe(world.stop)
        living.join()
        threads = [thread.name for thread in self.scheduler.threads if thread.name != "main"]
        self.oracle.require(not threads, f"threads are left: {threads}")

    async def _end_world(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _prepare_servers(self) -> None:
        """Sometimes servers have a past."""
        past = self.past
        for machine in self.network.machines:
            process = machine.process
            if past in ("pushed", "asleep"):
                process.version, process.content, process.updates = 7, (PAST, None), 7
            if past == "asleep":
                process.asleep = 1
            process.paused = past == "paused"

    def _poison(self, machine: Machine, request: Any) -> None:
        prompts = getattr(request, "prompts", ())
        if prompts and prompts[0].tokens.ids[0] == POISON:
            for sent in self.oracle.requests[request.request_id.rpartition("/")[0] or request.request_id]:
                sent.died = True
            key = "/".join(request.request_id.split("/")[:2])
            self.oracle.requests[key][-1].died = True
            self.oracle.note(f"server {machine.number} dies of {request.request_id}")
            machine.kill()
            self.network.world.call_later(2.0, lambda: machine.process or machine.start())

    async def _open(self, *, tells_instance: bool, **options: Any) -> None:
        """Begins a fleet over the servers, and waits for it."""
        endpoints = [Endpoint(machine, tells_instance=tells_instance) for machine in self.network.machines]
        connection = {"timeout": None, "token": None, "tls": None, "segment_mode": 0o600}
        self.fleet = object.__new__(Fleet)
        self.fleet._core = Core(endpoints, connection, **options)
        await AsyncFleet(self.fleet).wait_until_ready(60.0)
        self.oracle.set_policy(self.fleet._core.replica_set.policy)
        await self.until_settled(30.0)

    async def _live(self) -> None:
        rng, network = self.rng, self.network
        await self._open(
            tells_instance=rng.random() < 0.5,
            quorum=rng.choice([None, None, 1, 3]),
            capacity=rng.choice([1, 4, 512]),
            patience=rng.choice([5.0, 60.0, 300.0]),
            resupply=self._resupply if rng.random() < 0.5 else None,
        )
        if rng.random() < 0.8:
            network.weather = self._weather()
            faults = Faults(self, Random(rng.getrandbits(64)))
            troubled = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(faults.work(), network.world))
        else:
            faults = troubled = None
        trainer = Trainer(self, Random(rng.getrandbits(64)))
        working = [asyncio.ensure_future(trainer.work(rng.randint(3, 12)))]
        for number in range(rng.randint(1, 4)):
            generator = Generator(self, Random(rng.getrandbits(64)), number)
            working.append(asyncio.ensure_future(generator.work(rng.randint(3, 15))))
        if rng.random() < 0.15:
            await asyncio.sleep(rng.uniform(0, 60))
            await self._close(working)
        else:
            await self._until_done(working)
            if faults is not None:
                faults.ended = True
                await troubled
            await self._recover(trainer)
            await self._check_rest()
            await self._close([])
        if faults is not None:
            faults.ended = True
            await troubled
        await asyncio.sleep(90.0)
        self._check_world()

    async def _close(self, working: list[asyncio.Future]) -> None:
        """Closes the fleet; pending calls raise an error."""
        loop = self.fleet._core.loop._loop
        await AsyncFleet(self.fleet).close()
        self.oracle.require(not asyncio.all_tasks(loop), f"tasks are left: {asyncio.all_tasks(loop)}")
        self.oracle.note("the fleet is closed")
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        for task in working:
            if not task.cancelled() and isinstance(task.exception(), AssertionError):
                raise task.exception()

    async def _until_done(self, working: list[asyncio.Future]) -> None:
        """Waits for the clients; the first that fails ends the run."""
        done, _ = await asyncio.wait(working, timeout=8000.0, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        self.oracle.require(len(done) == len(working), "a client waits and nothing will end it")

    async def _recover(self, trainer: Trainer) -> None:
        """Nothing goes wrong any more: the fleet is whole again, first as far as it promises without a push."""
        network, oracle, fleet = self.network, self.oracle, self.fleet
        network.weather = Weather()
        oracle.note("calm")
        for machine in network.machines:
            machine.cut, machine.slow = False, 1.0
            machine.set_stopped(False)
            if machine.process is None:
                machine.start()
            machine.process.lies, machine.process.refuse_header = b"", None
        while len(fleet._core.replica_set.numbers(ReplicaState.LOST)) == REPLICAS:  # an order needs one of them
            await asyncio.sleep(1.0)
        await AsyncFleet(fleet).wake()
        await self.resumed()
        trainer._note_policy()
        await asyncio.sleep(10.0)  # time for the fleet to check replicas that restarted unnoticed
        await self.until_settled(CALM_SECONDS)
        policy = fleet._core.replica_set.policy
        for machine, replica in zip(network.machines, fleet._core.replica_set.replicas, strict=True):
            process = machine.process
            # A policy that was dropped comes back with a push; until then no server has its version.
            same = process.policy == content_of(policy) and process.whole
            same = same and (process.version == policy.version or not fleet._core.replica_set.dropped)
            serves = (process.policy, process.version)
            wrong = process.whole and serves != (content_of(policy), policy.version)
            oracle.require(
                not wrong or replica.state is not ReplicaState.CURRENT,
                f"replica {replica.number} is current, and serves {serves} instead of {policy}",
            )
            fresh = process.content == (CHECKPOINT, None) and content_of(policy).startswith(f"{CHECKPOINT}|")
            catches_up = fresh and process.whole and policy.adapter is not None
            oracle.require(
                replica.state is ReplicaState.CURRENT or not (same or catches_up),
                f"replica {replica.number} ({process.policy}, {process.version}) could serve, and is {replica.state}: "
                f"{replica.reason}",
            )
        await trainer.push("full", whole=True)
        await AsyncFleet(fleet).wait_until_ready(CALM_SECONDS)
        status = await AsyncFleet(fleet).status()
        oracle.require(
            all(replica.state is ReplicaState.CURRENT for replica in status.replicas),
            f"after a full push: {fleet._core.replica_set.describe()}",
        )
        contents = {machine.process.policy for machine in network.machines}
        oracle.require(contents == {oracle.eras[-1].content}, f"the servers have {contents}")
        self.poison = False
        await Generator(self, Random(self.seed), 99).generate("last", checked=True)

    async def until_settled(self, seconds: float) -> None:
        """Waits until all replicas are current, or for so long."""
        for _ in range(int(seconds)):
            if len(self.fleet._core.replica_set.numbers(ReplicaState.CURRENT)) == REPLICAS:
                return
            await asyncio.sleep(1.0)

    async def _check_rest(self) -> None:
        """Nothing of what was asked is left in the fleet."""
        await asyncio.sleep(5.0)
        replica_set, requests, require = self.fleet._core.replica_set, self.fleet._core.requests, self.oracle.require
        require(not replica_set.push_is_open and self.fleet._core.pushes._open is None, "a push holds the turn")
        require(not replica_set.updating.locked(), "the turn is held")
        require(replica_set.router._closed == 0, f"the gate is closed {replica_set.router._closed} times")
        require(replica_set.router.waiting == 0, "a group waits")
        require(not any(route.assignments for route in replica_set.router.routes), "a assignment is left")
        require(not requests._calls and requests._idle.is_set(), "a call is left")
        require(not requests.draining, "calls are refused")
        fewest = math.inf
        for _ in range(100):
            await asyncio.sleep(0.1)
            fewest = min(fewest, len(asyncio.all_tasks(self.fleet._core.loop._loop)))
        require(fewest <= 2 * REPLICAS, f"{fewest} tasks are left, and the watches are {2 * REPLICAS}")

    def _check_world(self) -> None:
        """Nothing of what the fleet has asked is left on the servers."""
        require, network = self.oracle.require, self.network
        require(not network.streams, "a push is left open")
        for machine in network.machines:
            if machine.process is not None:
                require(machine.process.session is None, f"server {machine.number} has an open push")
                require(not machine.process.requests, f"server {machine.number} runs {machine.process.requests}")

    def _weather(self) -> Weather:
        rng = self.rng
        weather = Weather()
        for name in Weather.__dataclass_fields__:
            if rng.random() < 0.4:
                worst = {"cut_push": 0.15, "lost_commit_reply": 0.5, "corrupt": 0.15}.get(name, 0.01)
                setattr(weather, name, rng.uniform(0, worst))
        return weather

    def _resupply(self) -> dict[str, Any]:
        return self.supply

    # For the workload.

    def pause(self, seconds: float) -> None:
        """As `time.sleep` in a simulated thread."""
        self.scheduler.block(lambda wake: None, seconds)

    async def called(
        self,
        rng: Random,
        use: Callable[[AsyncFleet], Awaitable[Any]],
        plain: Callable[[Fleet], Any],
        often: float = 0.25,
        seconds: Sequence[float] = (0.02, 0.5, 10.0),
    ) -> Any:
        """Calls the fleet from a thread, or awaits the asyncio fleet; so often the caller gives up after seconds."""
        timeout = rng.expovariate(1 / rng.choice(seconds)) if rng.random() < often else None
        if rng.random() < 0.5:
            return await self._threaded(plain, timeout)
        return await self._awaited(use, timeout)

    async def uninterrupted(self, use: Callable[[Any], Any]) -> Any:
        return await self._awaited(use, None)

    async def _awaited(self, use: Callable[[AsyncFleet], Awaitable[Any]], timeout: float | None) -> Any:
        task = asyncio.ensure_future(use(AsyncFleet(self.fleet)))
        # The trainer itself may be cancelled while it waits; then the error of its call is read by no one.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait({task}, timeout=timeout)
        if not task.done():
            self.oracle.note("its caller is cancelled")
            task.cancel()
            await asyncio.wait({task})
        if task.cancelled():
            raise Interrupted
        return task.result()

    async def _threaded(self, plain: Callable[[Fleet], Any], timeout: float | None) -> Any:
        def call() -> tuple[Any, BaseException | None]:
            try:
                return plain(self.fleet), None
            except BaseException as error:
                return None, error

        thread = Thread(self.scheduler, call, "client")
        thread.start()
        future = asyncio.wrap_future(thread.future)
        await asyncio.wait({future}, timeout=timeout)
        if not future.done():
            self.oracle.note("its caller is interrupted")
            self.scheduler.interrupt(thread)
        result, error = await future
        if isinstance(error, KeyboardInterrupt):
            error.__traceback__ = None  # whose frames hold a push that was dropped
            del error
            raise Interrupted
        if error is not None:
            raise error
        return result

    async def push_has_ended(self) -> None:
        """Waits until the fleet has ended a push whose sender is gone."""
        for attempt in range(3000):
            if attempt == 10:  # what refers to nothing but itself
                gc.collect()
            if not self.fleet._core.replica_set.push_is_open or self.fleet._core.loop._closed:
                return
            await asyncio.sleep(0.1)
        self.oracle.require(False, "a push whose sender is gone holds its turn")

    async def resumed(self) -> None:
        """Resumes, whatever goes wrong meanwhile."""
        for _ in range(10):  # servers without weights refuse it until the next push
            if self.fleet._core.loop._closed:
                return
            try:
                await AsyncFleet(self.fleet).resume()
                return
            except RolloutError as error:
                self.oracle.note(f"resume: {type(error).__name__}: {error}")
                await asyncio.sleep(2.0)

    def check_asleep(self, slept: dict[int, Any]) -> None:
        """The replicas that a sleep names are asleep."""
        for number in slept:
            process = self.network.machines[number].process
            awake = process is not None and process.asleep is None and self.clock() - process.begun > 60.0
            self.oracle.require(not awake, f"server {number} is awake after a sleep")


def run(seed: int) -> Result:
    """One run.

    Raises:
        AssertionError: a promise was not kept; with the seed.
    """
    simulation = Run(seed)
    try:
        return simulation.execute()
    except BaseException as error:
        if not isinstance(error, Exception):
            raise
        trace = "\n".join(simulation.oracle.trace[-60:])
        raise AssertionError(f"{trace}\nseed {seed}: {type(error).__name__}: {error}") from error
