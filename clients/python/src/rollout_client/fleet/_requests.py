"""Requests of a fleet. Each prompt is a group on one replica, and moves to another if that one is lost."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from .._channel import call_timeout, generate_timeouts
from .._convert import new_request_id
from .._fields import of_each
from .._progress import SampleProgress
from .._seeds import prompt_seed, sample_seed
from ..aio import AsyncRolloutClient
from ..errors import (
    DEADLINE_PASSED,
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    RolloutError,
    Unavailable,
)
from ..options import GenerateOptions, ScoreOptions, refuse_unknown
from ..types import (
    AbortResult,
    Chat,
    FinishReason,
    Lifecycle,
    PromptInput,
    PromptOutput,
    Sample,
    SamplingInput,
    SamplingParams,
    Score,
    TokenIds,
)
from ._replica import Replica
from ._replica_set import ReplicaSet
from ._router import Assignment
from .types import ReplicaState

MAX_ATTEMPTS = 4
"""A group whose replicas were lost this many times may be the cause, so it fails."""

_ABORT_AGAIN_SECONDS = 0.05

# The options that have a list for each prompt or sequence of the call.
_OF_EACH = ("prompt_logprob_token_ids", "images", "routing")

# The path in an error of a server, which has only one prompt or sequence of the call.
_FIRST = re.compile(r"^(prompts|sequences|images|routing|logprob_token_ids(?=\[0\]\.rows))\[0\]")

_T = TypeVar("_T")


@dataclass(eq=False)
class FleetCall:
    """One call of `generate` or `score`, with any number of groups."""

    request_id: str
    deadline: float | None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by an abort: groups that have not started do not start any more."""
    running: dict[str, Replica] = field(default_factory=dict)
    """The replicas of the running requests for samples, by request id."""

    def left(self) -> float:
        """Seconds to the deadline; infinity without one."""
        return math.inf if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)


class AssignmentRevoked(Exception):
    """The group must leave its replica, and is sent again."""


class CallEnded(Exception):
    """The call was aborted, or its deadline passed, before the group started."""


class Requests:
    """Generates and scores on the current replicas."""

    def __init__(self, replica_set: ReplicaSet, patience: float, timeout: float | None) -> None:
        """Has no calls yet.

        Args:
            replica_set: the replicas.
            patience: seconds that a group waits for a replica when none is current.
            timeout: seconds for each call that does not set its own; None means no limit.
        """
        self._replica_set, self._patience, self._timeout = replica_set, patience, timeout
        self._calls: dict[str, FleetCall] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        """Whether calls are being ended so that the fleet can sleep; new ones are rejected."""

    @property
    def rests(self) -> bool:
        """Whether the fleet sleeps, or is about to sleep."""
        return self.draining or self._replica_set.asleep is not None

    async def generate(
        self, prompts: Sequence[PromptInput], n: int, sampling: SamplingInput, options: GenerateOptions
    ) -> list[PromptOutput]:
        """As `Fleet.generate`."""
        refuse_unknown("generate", options, GenerateOptions)
        if isinstance(prompts, str):
            raise InvalidArgument("prompts: expected a list of prompts, got a single prompt; put it in a list")
        if len(prompts) == 0:
            raise InvalidArgument("prompts: is empty; give at least one prompt")
        each, options = _sampling_of_prompts(len(prompts), sampling), dict(options)
        limit, _ = generate_timeouts(options.pop("timeout", None), self._timeout)
        progress = SampleProgress(len(prompts) * n, options.pop("progress", False))
        lists = {name: of_each(options.pop(name, ()), len(prompts), name) for name in _OF_EACH}

        async def group(index: int, prompt: PromptInput) -> PromptOutput:
            params = each[index]

            async def send(client: AsyncRolloutClient, request_id: str, version: int) -> PromptOutput:
                own = {"request_id": request_id, "timeout": call.left()} | _of_one(lists, index)
                asked = _versioned(options, version) | own
                (output,) = await client.generate([prompt], n, params, **asked)
                return output

            try:
                output = await self._place(call, index, n, send, _was_cut)
            except CallEnded:
                output = _unbegun(prompt, n, params.seed)
            for sample in output.samples:
                progress.add(sample)
            return _numbered(output, index)

        with self._call(options.pop("request_id", None), limit) as call, progress:
            return await _gather([group(index, prompt) for index, prompt in enumerate(prompts)])

    async def score(self, sequences: Sequence[TokenIds], options: ScoreOptions) -> list[Score]:
        """As `Fleet.score`."""
        refuse_unknown("score", options, ScoreOptions)
        sequences, options = list(sequences), dict(options)
        if not sequences:
            raise InvalidArgument("sequences: is empty; give at least one sequence")
        limit = call_timeout(options.pop("timeout", None), self._timeout)
        lists = {name: of_each(options.pop(name, ()), len(sequences), name) for name in _OF_EACH}

        async def one(index: int, sequence: TokenIds) -> Score:
            async def send(client: AsyncRolloutClient, request_id: str, version: int) -> Score:
                asked = _versioned(options, version) | {"timeout": call.left()} | _of_one(lists, index)
                (score,) = await client.score([sequence], **asked)
                return score

            try:
                return await self._place(call, index, 1, send, None)
            except CallEnded:
                if call.ended.is_set():
                    raise Aborted("the call was ended by an order to the fleet") from None
                raise DeadlineExceeded(DEADLINE_PASSED) from None

        with self._call(None, limit) as call:
            return await _gather([one(index, sequence) for index, sequence in enumerate(sequences)])

    async def abort(self, request_ids: str | Iterable[str], *, all: bool) -> AbortResult:
        """As `Fleet.abort`."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        if bool(ids) == all:
            raise InvalidArgument("request_ids: name the requests to abort, or pass all=True, but not both")
        calls = [self._calls[name] for name in (self._calls if all else ids) if name in self._calls]
        unknown = [name for name in ids if name not in self._calls]
        for call in calls:
            call.ended.set()
        running: dict[Replica, dict[str, FleetCall]] = {}
        for call in calls:
            for request_id, replica in call.running.items():
                running.setdefault(replica, {})[request_id] = call
        sent = [_abort_on(replica, requests) for replica, requests in running.items()]
        if all:  # also requests of other clients, and scores, which have no id
            sent += [r.client.abort(all=True) for r in self._replica_set.replicas if r.state is not ReplicaState.LOST]
        for result in await asyncio.gather(*sent, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, Unavailable):
                raise result
        return AbortResult([call.request_id for call in calls], unknown)

    async def drain(self) -> None:
        """Rejects new calls, and waits until all have ended. The caller must reset `draining`."""
        self.draining = True
        await self._idle.wait()

    def end_all(self) -> None:
        """Stops all groups that have not started."""
        for call in self._calls.values():
            call.ended.set()

    @contextmanager
    def _call(self, request_id: str | None, limit: float | None) -> Iterator[FleetCall]:
        """A call that may take `limit` seconds, from its start to its end."""
        if self.rests:
            raise FailedPrecondition("the fleet sleeps, or is about to sleep; call wake first")
        if request_id in self._calls:
            raise AlreadyExists(f"request_id: {request_id!r} is running already")
        deadline = None if limit is None else time.monotonic() + limit
        call = FleetCall(request_id if request_id is not None else new_request_id(), deadline)
        self._calls[call.request_id] = call
        self._idle.clear()
        try:
            yield call
        finally:
            del self._calls[call.request_id]
            if not self._calls:
                self._idle.set()

    async def _place(
        self,
        call: FleetCall,
        index: int,
        samples: int,
        send: Callable[[AsyncRolloutClient, str, int], Awaitable[_T]],
        was_cut: Callable[[_T], bool] | None,
    ) -> _T:
        """Runs a group on a replica, and on another one if that is lost.

        Args:
            call: of the group.
            index: of the group in the call.
            samples: in the group.
            send: sends the request with this id, and with the fleet's version as minimum, through a client.
            was_cut: whether a result was aborted; None for requests that have no id on the server.
        """
        lost: list[str] = []
        attempt = 0
        while len(lost) < MAX_ATTEMPTS:
            attempt += 1
            assignment = await self._assign(call, samples)
            assignment.version = self._replica_set.policy.version
            replica = self._replica_set.replicas[assignment.route.number]
            request_id = f"{call.request_id}/{index}" + (f"/{attempt}" if attempt > 1 else "")
            if was_cut is not None:
                call.running[request_id] = replica
            try:
                result = await self._until_revoked(assignment, send(replica.client, request_id, assignment.version))
                if (
                    was_cut is not None
                    and was_cut(result)
                    and not call.ended.is_set()
                    and call.left() > 0
                    and not await self._answers(replica)
                ):
                    raise Unavailable("the server was shut down")
                return result
            except AssignmentRevoked:
                if replica.state is ReplicaState.LOST:
                    lost.append(f"replica {replica.number}: {replica.reason}")
            except RolloutError as error:
                if isinstance(error, InvalidArgument):
                    raise InvalidArgument(_FIRST.sub(rf"\g<1>[{index}]", str(error))) from error
                if isinstance(error, FailedPrecondition) and self.rests:
                    continue  # the server sleeps already: the group waits, or ends, as one that has not started
                if not isinstance(error, Unavailable) and await self._answers(replica):
                    raise
                self._replica_set.mark_suspect(
                    replica, error if isinstance(error, Unavailable) else Unavailable(str(error))
                )
                lost.append(f"replica {replica.number}: {error}")
            finally:
                call.running.pop(request_id, None)
                self._replica_set.router.release(assignment)
        raise Unavailable(f"prompts[{index}]: {MAX_ATTEMPTS} replicas were lost while they had it: {'; '.join(lost)}")

    async def _assign(self, call: FleetCall, samples: int) -> Assignment:
        """Waits for a replica with room for a group.

        Raises:
            CallEnded: the call was ended first.
            RolloutError: no replica is current, and none can become current by itself.
            Unavailable: no replica became current in time.
        """
        replica_set, begun = self._replica_set, time.monotonic()
        assignment = asyncio.ensure_future(replica_set.router.assign(samples))
        ended = asyncio.ensure_future(call.ended.wait())
        try:
            while not assignment.done():
                if call.ended.is_set() or call.left() == 0:
                    raise CallEnded
                if replica_set.none_current_since is not None:
                    if (error := replica_set.permanent_error()) is not None:
                        raise error
                    if time.monotonic() - max(begun, replica_set.none_current_since) >= self._patience:
                        raise Unavailable(
                            f"no replica can be reached for {self._patience:g} s: {replica_set.describe()}"
                        )
                changed = asyncio.ensure_future(replica_set.changed.wait())
                try:
                    await asyncio.wait(
                        {assignment, ended, changed},
                        timeout=min(call.left(), self._patience),
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                finally:
                    changed.cancel()
            return assignment.result()
        except BaseException:
            if assignment.done() and not assignment.cancelled():
                replica_set.router.release(assignment.result())
            raise
        finally:
            assignment.cancel()
            ended.cancel()

    async def _until_revoked(self, assignment: Assignment, sent: Awaitable[_T]) -> _T:
        """The result, unless the assignment is revoked first; later results are dropped.

        Raises:
            AssignmentRevoked: the assignment was revoked.
        """
        request, revoked = asyncio.ensure_future(sent), asyncio.ensure_future(assignment.revoked.wait())
        try:
            await asyncio.wait({request, revoked}, return_when=asyncio.FIRST_COMPLETED)
            if assignment.revoked.is_set():
                raise AssignmentRevoked
            return request.result()
        finally:
            revoked.cancel()
            if not request.done():
                request.cancel()
            await asyncio.gather(request, revoked, return_exceptions=True)

    async def _answers(self, replica: Replica) -> bool:
        """Whether a replica can be reached and keeps serving; the fleet is awake."""
        try:
            status = await replica.ask()
        except RolloutError:
            return False
        return status.lifecycle is not Lifecycle.SHUTTING_DOWN and status.asleep is None


async def _gather(groups: list[Awaitable[_T]]) -> list[_T]:
    """Waits for all groups; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(group) for group in groups]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _abort_on(replica: Replica, requests: dict[str, FleetCall]) -> AbortResult:
    """Aborts requests on one replica, repeatedly while it does not know one, which may still be on its way."""
    while True:
        result = await replica.client.abort(requests)
        requests = {name: requests[name] for name in result.unknown if requests[name].running.get(name) is replica}
        if not requests:
            return result
        await asyncio.sleep(_ABORT_AGAIN_SECONDS)


def _of_one(lists: Mapping[str, Sequence[Any]], index: int) -> dict[str, Any]:
    """The options with the lists of one prompt or sequence."""
    return {name: [given[index]] for name, given in lists.items()}


def _versioned(options: dict[str, Any], version: int) -> dict[str, Any]:
    """The options with the fleet's version as minimum, so that a server that restarted unnoticed holds the request."""
    exact = options.get("if_weight_version")
    if exact is not None and exact < version:
        raise Aborted(f"if_weight_version: {exact} is not the fleet's policy; that is version {version}")
    return options | {"min_weight_version": max(options.get("min_weight_version") or 0, version)}


def _was_cut(output: PromptOutput) -> bool:
    return any(sample.finish_reason is FinishReason.ABORTED for sample in output.samples)


def _numbered(output: PromptOutput, index: int) -> PromptOutput:
    """The output of a prompt that was alone in its request, with this index."""
    logprobs = output.prompt_logprobs
    return replace(
        output,
        prompt_index=index,
        samples=[replace(sample, prompt_index=index) for sample in output.samples],
        prompt_logprobs=None if logprobs is None else replace(logprobs, prompt_index=index),
    )


def _sampling_of_prompts(count: int, sampling: SamplingInput) -> list[SamplingParams]:
    """The parameters of each prompt, with the seed that it uses alone, so that samples do not depend on the routing."""
    if sampling is None or isinstance(sampling, SamplingParams):
        given, seed = sampling or SamplingParams(), None if sampling is None else sampling.seed
        seed = secrets.randbits(64) if seed is None else int(seed)
        return [replace(given, seed=prompt_seed(seed, index)) for index in range(count)]
    if len(sampling) != count:
        raise InvalidArgument(f"sampling: {len(sampling)} for {count} prompts; give one for all, or one for each")
    for index, params in enumerate(sampling):
        if not isinstance(params, SamplingParams):
            raise InvalidArgument(f"sampling[{index}]: expected SamplingParams, got {type(params).__name__}")
    return [replace(params, seed=secrets.randbits(64)) if params.seed is None else params for params in sampling]


def _unbegun(prompt: PromptInput, n: int, seed: int) -> PromptOutput:
    """The output of a group that was ended before it started: samples without tokens; a text has no token ids."""
    none = np.zeros(0, np.float32)
    samples = [
        Sample(0, i, [], none, none, "", FinishReason.ABORTED, [], sample_seed(seed, i), 0, [], []) for i in range(n)
    ]
    is_text = isinstance(prompt, (str, Chat)) or (len(prompt) > 0 and isinstance(prompt[0], Mapping))
    return PromptOutput(0, [] if is_text else [int(token) for token in prompt], samples, None)
