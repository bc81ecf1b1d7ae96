"""A server as its clients see it: policies, pushes, sleep, pause and requests, without a model.

The tokens of a sample are a pure function of its seed, its prompt, the policy and the position.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc
import xxhash

from rollout_client import _proto

CHECKPOINT, PAST = "checkpoint", "full:past"
"""Bases that servers may have when the fleet finds them."""
IDLE_SECONDS = 60.0
"""`--update-idle-seconds`."""
LORA, FULL, DELTA = 1, 2, 3
KEEP, RECOMPUTE, WAIT, ABORT = 1, 2, 3, 4
DRAIN_WAIT, DRAIN_ABORT, DRAIN_KEEP = 1, 2, 3
LENGTH, ABORTED = 4, 5
RUNNING, SHUTTING_DOWN, PAUSED, ASLEEP, WEIGHTS_MISSING = 1, 2, 3, 4, 5
WEIGHTS, KV_CACHE = 1, 2


class RpcError(grpc.RpcError):
    """How a call ended."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{code}: {details}")
        self._code, self._details = grpc.StatusCode[code], details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


def mixed(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def token(seed: int, prompt: tuple[int, ...], content: str, position: int) -> int:
    """The token that a policy samples."""
    return mixed(seed, prompt, content, position) % (1 << 30)


def checksum_of(content: str) -> bytes:
    """Of the one parameter that a policy has here."""
    return hashlib.sha256(content.encode()).digest()


def seed_of(seed: int, prompt_index: int, sample_index: int) -> int:
    """The seed of one sample of a request, as `proto/` describes it."""
    word = (1 << 64) - 1
    if prompt_index:
        seed = (seed + prompt_index * 0xD1B54A32D192ED03) & word
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            seed = ((seed ^ seed >> 33) * factor) & word
        seed ^= seed >> 33
    if sample_index:
        seed = (seed + sample_index * 0x9E3779B97F4A7C15) & word
        seed = ((seed ^ seed >> 30) * 0xBF58476D1CE4E5B9) & word
        seed = ((seed ^ seed >> 27) * 0x94D049BB133111EB) & word
        seed ^= seed >> 31
    return seed


def content_after(content: tuple[str, str | None], kind: int, digest: str) -> tuple[str, str | None]:
    """The base and the adapter after a push."""
    base, adapter = content
    if kind == LORA:
        return base, digest
    return (f"full:{digest}" if kind == FULL else f"{base}+{adapter}+{digest}"), None


def digest_of_push(tensors: dict[str, bytes]) -> bytes:
    """Of the digests of its tensors, by name."""
    return xxhash.xxh3_128(b"".join(tensors[name] for name in sorted(tensors))).digest()


@dataclass(eq=False)
class Running:
    """A request on a server."""

    name: str
    begun: bool = False
    aborted: bool = False


@dataclass(eq=False)
class Session:
    """A push on a server."""

    header: Any
    number: int
    touched: float
    committed: bool = False
    names: list[str] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    data: dict[int, bytearray] = field(default_factory=dict)


class Process:
    """One life of a server, from its start to its end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, awake: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`awake` waits while the process is stopped."""
        self.loop, self.awake, self.begun = loop, awake, loop.time()
        self.version, self.content = 0, (CHECKPOINT, None)
        self.whole, self.paused, self.draining, self.shutting_down = True, False, 0, False
        self.asleep: int | None = None
        self.resident: list[int] = []
        self.pending = False
        self.updates = self.sessions = 0
        self.session: Session | None = None
        self.requests: dict[str, Running] = {}
        self.step_seconds = 0.02
        self.order_seconds = 0.0
        """How long its engine does nothing but sleep, or wake."""
        self._busy_until = 0.0
        self.refuse_header: tuple[str, str] | None = None
        self.lies = b""
        self.on_apply: Callable[[Process, int], None] = lambda process, kind: None
        self._changed: list[asyncio.Future] = []

    @property
    def policy(self) -> str:
        return f"{self.content[0]}|{self.content[1]}"

    @property
    def lifecycle(self) -> int:
        if self.shutting_down:
            return SHUTTING_DOWN
        if self.asleep is not None:
            return ASLEEP
        return WEIGHTS_MISSING if not self.whole else PAUSED if self.paused else RUNNING

    def change(self) -> None:
        """Wakes what waits for another state."""
        changed, self._changed = self._changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)

    async def until(self, condition: Callable[[], bool], deadline: float | None = None) -> None:
        while not condition() and (deadline is None or self.loop.time() < deadline):
            future = self.loop.create_future()
            self._changed.append(future)
            left = None if deadline is None else max(deadline - self.loop.time(), 0.0)
            await asyncio.wait({future}, timeout=left)
        await self.awake()

    async def generate(self, request: Any) -> AsyncIterator[Any]:
        self._check_request()
        if request.request_id in self.requests:
            raise RpcError("ALREADY_EXISTS", f"request_id: {request.request_id!r} is running already")
        running = self.requests[request.request_id] = Running(request.request_id)
        try:
            deadline = None
            if request.HasField("time_limit_seconds"):
                deadline = self.loop.time() + request.time_limit_seconds
            await self._admitted(running, request, deadline)
            answer = _proto.GENERATE.response
            for index, prompt in enumerate(request.prompts):
                yield answer(prompt={"prompt_index": index, "token_ids": prompt.tokens.ids})
            samples = [
                (index, sample, seed_of(request.sampling.seed, index, sample), tuple(prompt.tokens.ids), [])
                for index, prompt in enumerate(request.prompts)
                for sample in range(request.n)
            ]
            made: list[int] = []
            while len(made) < request.sampling.max_tokens and not running.aborted:
                if deadline is not None and self.loop.time() >= deadline:
                    break
                await asyncio.sleep(self.step_seconds)
                await self.until(lambda: self._steps or running.aborted, deadline)
                if not self._steps or running.aborted:
                    continue
                made.append(self.version)
                for *_, seed, prompt, tokens in samples:
                    tokens.append(token(seed, prompt, self.policy, len(tokens)))
            finish = LENGTH if len(made) == request.sampling.max_tokens else ABORTED
            for index, sample, seed, _, tokens in samples:
                yield answer(
                    completion={
                        "prompt_index": index,
                        "sample_index": sample,
                        "token_ids": tokens,
                        "logprobs": [-1.0] * len(tokens),
                        "raw_logprobs": [-1.0] * len(tokens),
                        "finish_reason": finish,
                        "seed": seed,
                        "weight_versions": spans(made),
                    }
                )
            yield answer(summary={"request_id": request.request_id})
        finally:
            self.requests.pop(request.request_id, None)
            self.change()

    async def score(self, request: Any) -> AsyncIterator[Any]:
        self._check_request()
        running = self.requests[f"score-{id(request)}"] = Running("")
        try:
            await self._admitted(running, request, None)
            await asyncio.sleep(self.step_seconds)
            await self.until(lambda: self._steps or running.aborted)
            if running.aborted:
                raise RpcError("ABORTED", "the request was aborted")
            for index, sequence in enumerate(request.sequences):
                values = [float("nan"), *[-1.0] * (len(sequence.ids) - 1)]
                score = {"raw_logprobs": values, "logprobs": values, "weight_version": self.version}
                yield _proto.SCORE.response(score=score, sequence_index=index)
        finally:
            self.requests.pop(f"score-{id(request)}", None)
            self.change()

    async def abort(self, request: Any) -> Any:
        names = [r.name for r in self.requests.values() if r.name] if request.all else request.request_ids
        if request.all:
            for running in self.requests.values():
                running.aborted = True
        found = [name for name in names if name in self.requests]
        for name in found:
            self.requests[name].aborted = True
        self.change()
        unknown = [] if request.all else [name for name in names if name not in found]
        return _proto.ABORT.response(aborted=found, unknown=unknown)

    async def get_info(self, request: Any) -> Any:
        return _proto.GET_INFO.response(model="simulated", max_num_seqs=256)

    async def get_status(self, request: Any) -> Any:
        await self._rest_of_order()
        status = _proto.GET_STATUS.response(
            lifecycle=self.lifecycle,
            weight_version=self.version,
            uptime_seconds=self.loop.time() - self.begun,
            updating=self.session is not None,
            updates=self.updates,
            running_requests=len(self.requests),
            held_requests=sum(not running.begun for running in self.requests.values()),
        )
        if self.session is not None:
            status.update.id, status.update.kind = self.session.number, self.session.header.kind
        if self.asleep is not None:
            status.asleep.level, status.asleep.pending_update = self.asleep, self.pending
            status.asleep.resident.extend(self.resident)
        return status

    async def sleep(self, request: Any) -> Any:
        if request.level == 1 and not self.whole:
            raise RpcError("FAILED_PRECONDITION", "level 1 keeps the policy, and there is none")
        await self._drain(request.mode)
        self.asleep, self.resident = request.level, []
        if request.level > 1:
            self.whole, self.pending, self.content = False, False, (CHECKPOINT, None)
        self.change()
        await self._obey()
        return _proto.SLEEP.response(released=[{"tag": WEIGHTS, "bytes": 1}], resident_bytes=1)

    async def wake(self, request: Any) -> Any:
        tags = list(request.tags) or [WEIGHTS, KV_CACHE]
        reload = request.reload and WEIGHTS in tags and not self.whole
        if reload and self.session is not None:
            raise RpcError("FAILED_PRECONDITION", "an update is under way, and will bring the policy")
        if self.asleep is not None:
            self.resident = sorted({*self.resident, *tags})
            if WEIGHTS in self.resident:
                self.pending = False
        if reload:
            self.whole, self.version, self.content = True, 0, (CHECKPOINT, None)
        if self.asleep is not None and self.resident == [WEIGHTS, KV_CACHE]:
            self.asleep, self.paused = None, False
        self.change()
        await self._obey()
        return _proto.WAKE.response(lifecycle=self.lifecycle)

    async def pause(self, request: Any) -> Any:
        self._check_order()
        await self._drain(request.mode)
        self._check_order()
        self.paused = True
        return _proto.PAUSE.response()

    async def resume(self, request: Any) -> Any:
        self._check_order()
        self.paused = False
        self.change()
        return _proto.RESUME.response()

    async def reset_prefix_cache(self, request: Any) -> Any:
        return _proto.RESET_PREFIX_CACHE.response(blocks=1)

    async def cancel_update(self, request: Any) -> Any:
        self.session = None
        return _proto.CANCEL_UPDATE.response()

    async def list_parameters(self, request: Any) -> Any:
        return _proto.LIST_PARAMETERS.response(parameters=[{"name": "w", "shape": [4], "dtype": 1}])

    async def checksum(self, request: Any) -> Any:
        if self.asleep is not None and WEIGHTS not in self.resident:
            raise RpcError("FAILED_PRECONDITION", "the weights are asleep; call Wake first")
        if not self.whole:
            raise RpcError("FAILED_PRECONDITION", "the weights are missing; push a complete policy first")
        found = {"name": "w", "sha256": checksum_of(self.policy)}
        return _proto.CHECKSUM.response(weight_version=self.version, parameters=[found])

    async def list_adapters(self, request: Any) -> Any:
        return _proto.LIST_ADAPTERS.response()

    def begin(self, header: Any) -> Session:
        """The header of a push has come."""
        if self.shutting_down:
            raise RpcError("UNAVAILABLE", "the server is shutting down")
        if self.session is not None:
            raise RpcError("ABORTED", "another update is under way")
        self._check_version(header)
        weights_asleep = self.asleep is not None and WEIGHTS not in self.resident
        if header.kind != LORA and weights_asleep:
            raise RpcError("FAILED_PRECONDITION", "the weights are asleep; wake the weights first")
        if header.kind == DELTA and not self.whole:
            raise RpcError("FAILED_PRECONDITION", "a DELTA changes a policy, and there is none")
        if self.refuse_header is not None:
            refused, self.refuse_header = self.refuse_header, None
            raise RpcError(*refused)
        self.sessions += 1
        self.session = Session(header, self.sessions, self.loop.time())
        self.declare(self.session, header.tensors)
        return self.session

    def declare(self, session: Session, tensors: Any) -> None:
        for tensor in tensors:
            session.names.append(tensor.name)
            session.digests.append(tensor.digest)

    def write(self, session: Session, chunk: Any) -> None:
        session.data.setdefault(chunk.tensor, bytearray())[chunk.offset :] = chunk.data

    async def commit(self, session: Session) -> Any:
        """Applies a push; its receipt."""
        for index, digest in enumerate(session.digests):
            if xxhash.xxh3_128(bytes(session.data.get(index, b""))).digest() != digest:
                raise RpcError("DATA_LOSS", f"{session.names[index]}: its bytes are not those of its digest")
        self._check_version(session.header)
        session.committed = True
        if session.header.running == WAIT:
            await self._drain(DRAIN_WAIT)
        elif session.header.running == ABORT:
            await self._drain(DRAIN_ABORT)
        if self.session is not session:
            raise RpcError("ABORTED", "the update was ended")
        digest = digest_of_push(dict(zip(session.names, session.digests, strict=True)))
        if self.lies:
            self.lies, digest = b"", xxhash.xxh3_128(digest + self.lies).digest()
        header = session.header
        now = self.version + 1 if not header.HasField("new_version") else header.new_version
        self.version, self.content = now, content_after(self.content, header.kind, digest.hex())
        self.updates, self.whole, self.session = self.updates + 1, True, None
        self.pending = self.asleep is not None and WEIGHTS not in self.resident
        self.on_apply(self, header.kind)
        self.change()
        return _proto.UPDATE.response(
            weight_version=now,
            digest=digest,
            parameters=len(session.names),
            bytes=sum(map(len, session.data.values())),
            pending=self.pending,
        )

    def drop(self, session: Session) -> None:
        """The sender of a push is gone."""
        if self.session is session:
            self.session = None

    def shut_down(self) -> None:
        """As SIGTERM: what runs ends with the tokens so far, and nothing else begins."""
        self.shutting_down = True
        for running in self.requests.values():
            running.aborted = True
        self.change()

    @property
    def _steps(self) -> bool:
        return not self.paused and self.asleep is None and self.whole

    def _check_request(self) -> None:
        if self.shutting_down:
            raise RpcError("UNAVAILABLE", "the server is shutting down")
        if self.asleep is not None:
            raise RpcError("FAILED_PRECONDITION", "the server is asleep; call Wake and send the request again")
        if not self.whole:
            raise RpcError("FAILED_PRECONDITION", "the weights are missing")

    def _check_order(self) -> None:
        if self.asleep is not None or not self.whole:
            raise RpcError("FAILED_PRECONDITION", "the server is asleep, or its weights are missing")

    def _check_version(self, header: Any) -> None:
        if header.HasField("expected_version") and header.expected_version != self.version:
            raise RpcError("ABORTED", f"expected_version: the policy has version {self.version}")
        may_repeat = header.force_version or not self.whole or not header.HasField("new_version")
        if not may_repeat and header.new_version <= self.version:
            raise RpcError("FAILED_PRECONDITION", f"new_version: {header.new_version} is not above {self.version}")

    async def _obey(self) -> None:
        """An order takes its time, also if its caller has left."""
        self._busy_until = self.loop.time() + self.order_seconds
        await self._rest_of_order()

    async def _rest_of_order(self) -> None:
        await asyncio.sleep(max(self._busy_until - self.loop.time(), 0.0))

    async def _admitted(self, running: Running, request: Any, deadline: float | None) -> None:
        """Waits until a request may begin."""

        def may_begin() -> bool:
            waits = request.HasField("min_weight_version") and self.version < request.min_weight_version
            return running.aborted or (self._steps and not self.draining and not waits)

        await self.until(may_begin, deadline)
        if request.HasField("if_weight_version") and request.if_weight_version != self.version:
            raise RpcError("ABORTED", f"if_weight_version: the policy has version {self.version}")
        running.begun = True
        if not may_begin():  # the time limit has passed
            running.aborted = True

    async def _drain(self, mode: int) -> None:
        if mode == DRAIN_ABORT:
            for running in self.requests.values():
                running.aborted = True
            self.change()
        if mode == DRAIN_KEEP:
            return
        self.draining += 1
        try:
            await self.until(lambda: not any(running.begun for running in self.requests.values()))
        finally:
            self.draining -= 1
            self.change()


def spans(made: list[int]) -> list[dict[str, int]]:
    """Which versions have made which tokens."""
    found: list[dict[str, int]] = []
    for position, version in enumerate(made):
        if found and found[-1]["weight_version"] == version:
            found[-1]["end"] = position + 1
        else:
            found.append({"weight_version": version, "start": position, "end": position + 1})
    return found
