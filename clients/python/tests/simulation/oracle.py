"""Checks whether a fleet keeps the promises of `docs/ray.md`.

The oracle sees what the fleet sends and what callers get, and asks the fleet itself only which policy it has after a
push whose caller was cancelled.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollout_client import FinishReason, PromptOutput, SamplingParams
from rollout_client.fleet import FleetReceipt
from rollout_client.fleet._policy import Policy, digest_of_parameters
from rollout_client.fleet._requests import MAX_ATTEMPTS

from .server import CHECKPOINT, PAST, checksum_of, seed_of, token

LATE_SECONDS = 20.0
"""By which a message may be late on a slow network."""
# The fleet names a base that it has found by the digest of its parameters.
_FOUND = {digest_of_parameters({"w": checksum_of(f"{base}|None").hex()}): base for base in (CHECKPOINT, PAST)}


class Broken(AssertionError):
    """A promise was not kept."""


@dataclass(eq=False)
class Era:
    """From when to when samples of a policy may be made."""

    content: str
    version: int
    start: float
    end: float = math.inf


@dataclass(eq=False)
class Sent:
    """A request of the fleet to a server."""

    request_id: str
    address: str
    at: float
    answered: float | None = None
    died: bool = False


class Oracle:
    """Checks one run."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.eras: list[Era] = []
        self.pushed: Era | None = None
        """Of the push that is under way."""
        self.candidates: list[Era] = []
        self.is_committing: Callable[[], bool] = lambda: False
        self.sleeps = False
        """From the return of a sleep to the next wake."""
        self.sleep_failed = False
        self._told: dict[str, float] = {}
        """When servers were told to drop their policy that have not told how they are since then, by address."""
        self.requests: dict[str, list[Sent]] = defaultdict(list)
        self.cuts: list[list[float]] = []
        """From when to when something may have ended samples early, by an order."""
        self.trace: list[str] = []
        self.has_applied: dict[int, tuple[str, int]] = {}
        """What each server has after the push that is under way, or the last."""
        self._reload: Era | None = None
        """While servers may read the checkpoint again."""
        self.poison: Callable[[Any, Any], None] = lambda machine, request: None
        self.outcomes: dict[str, int] = defaultdict(int)

    def require(self, condition: bool, what: str) -> None:
        if not condition:
            raise Broken(f"at {self.clock():.3f} s: {what}")

    def note(self, what: str) -> None:
        self.trace.append(f"{self.clock():9.3f} {what}")

    # Called by the simulated network.

    def sent(self, address: str, name: str, request: Any) -> Sent:
        self.require(not self.sleeps, f"a {name} was sent while the fleet sleeps")
        self.require(not self.is_committing(), f"a {name} was sent between the first commit of a push and the last")
        self.require(
            not self.sleep_failed or address not in self._told,
            f"a {name} was sent to {address}, which was told to drop its policy and has not said if it has",
        )
        sent = Sent(getattr(request, "request_id", ""), address, self.clock())
        if sent.request_id:
            key = re.match(r"[^/]*/\d+", sent.request_id)[0]
            self.requests[key].append(sent)
            self.require(
                sum(one.died for one in self.requests[key]) < MAX_ATTEMPTS,
                f"{key} was sent once more though {MAX_ATTEMPTS} replicas were lost while they had it",
            )
        self.note(f"{name} {sent.request_id} to {address}")
        return sent

    def told_to_drop(self, address: str) -> None:
        """A sleep of level 2 is on its way to a server."""
        self._told[address] = self.clock()

    def heard(self, address: str, asked: float) -> None:
        """The status of a server has come, for which it was asked then."""
        if self._told.get(address, math.inf) <= asked:
            del self._told[address]

    def begin_sleep(self) -> None:
        self.sleep_failed, self._told = False, {}

    def end_sleep(self, *, failed: bool) -> None:
        """A sleep has returned, or has failed: then servers take no requests until they say if they have a policy."""
        self.sleeps, self.sleep_failed = not failed, failed

    def begins(self, machine: Any, request: Any) -> None:
        self.poison(machine, request)

    def answered(self, sent: Sent) -> None:
        sent.answered = self.clock()

    def applied(self, number: int, version: int, content: str) -> None:
        """A server has applied a push."""
        self.note(f"server {number} has version {version}: {content}")
        self.has_applied[number] = (content, version)
        now = self.eras[-1]
        known = [(era.content, era.version) for era in (now, *self.candidates)]
        if self.push_is_open and (content, version) not in known:
            self.candidates.append(Era(content, version, self._push_began))

    # Pushes.

    push_is_open = False
    may_repeat = False
    """Whether the policy was dropped, so that a push may bring it back with its version."""
    _push_began = 0.0

    def begin_push(self) -> None:
        self.push_is_open, self._push_began, self.candidates = True, self.clock(), []
        self.has_applied = {}

    def end_push(self, policy: Policy, expected: str | None, must: bool | None) -> None:
        """A push has ended: `must` says whether it is the fleet's policy now; None is not known to its caller."""
        now, found = self.eras[-1], content_of(policy)
        changed = (found, policy.version) != (now.content, now.version)
        self.require(must is None or changed == must, f"the policy has changed: {changed}, and should have: {must}")
        if changed:
            self.require(
                policy.version > now.version or self.may_repeat, f"version {policy.version} follows {now.version}"
            )
            self.require(expected is None or found == expected, f"the policy is {found}, and {expected} was pushed")
            now.end, self.may_repeat = self.clock(), False
            self.end_reload()
            self.eras.append(Era(found, policy.version, self._push_began))
        for era in self.candidates:  # what was not committed may have made tokens meanwhile
            if (era.content, era.version) != (found, policy.version):
                era.end = self.clock()
                self.eras.insert(0, era)
        self.push_is_open = False
        self.note(f"the policy is {found}, version {policy.version}")

    def check_receipt(self, receipt: FleetReceipt) -> None:
        """Who has the policy by a receipt has it."""
        era = self.eras[-1]
        self.require(receipt.weight_version == era.version, f"the receipt has version {receipt.weight_version}")
        digests = {replica.digest for replica in receipt.replicas} - {None}
        self.require(digests == {receipt.digest}, f"a receipt with the digests {digests}")
        for replica in receipt.replicas:
            has = self.has_applied.get(replica.number)
            self.require(
                replica.result is None or has == (era.content, era.version),
                f"by the receipt replica {replica.number} has {era.content}, version {era.version}, and it has {has}",
            )

    def begin_reload(self) -> None:
        """A wake begins after which the checkpoint serves.

        Suspended requests resume on it, server by server, before the wake returns or a failed one is repeated.
        """
        self._reload = Era(f"{CHECKPOINT}|None", 0, self.clock())
        self.eras.insert(0, self._reload)

    def end_reload(self) -> None:
        """The wake has returned, or another policy has come instead."""
        if self._reload is not None:
            self._reload.end, self._reload = self.clock(), None

    def set_policy(self, policy: Policy) -> None:
        """The fleet has found its first policy, or has gone back to the checkpoint."""
        if self.eras:
            self.eras[-1].end = self.clock()
            self.end_reload()
        self.eras.append(Era(content_of(policy), policy.version, self.clock()))

    def _allowed(self, start: float, end: float) -> list[Era]:
        open_now = self.candidates if self.push_is_open else []
        return [era for era in [*self.eras, *open_now] if era.start <= end and era.end >= start]

    # Requests.

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """While this is open, and while a message of it may be late, an order may end samples."""
        cut = [self.clock(), math.inf]
        self.cuts.append(cut)
        try:
            yield
        finally:
            cut[1] = self.clock() + LATE_SECONDS

    def check_outputs(
        self,
        request_id: str,
        *,
        begun: float,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: SamplingParams,
        timeout: float | None,
        if_version: int | None,
        outputs: list[PromptOutput],
    ) -> None:
        require = self.require
        require(len(outputs) == len(prompts), f"{len(outputs)} outputs of {len(prompts)} prompts")
        ended = timeout is not None and self.clock() >= begun + timeout
        may_be_cut = ended or any(start <= self.clock() and end >= begun for start, end in self.cuts)
        for index, (output, prompt) in enumerate(zip(outputs, prompts, strict=True)):
            where = f"{request_id}/{index}"
            require(output.prompt_index == index, f"{where}: prompt_index {output.prompt_index}")
            require(output.prompt_token_ids == list(prompt), f"{where}: another prompt, {output.prompt_token_ids}")
            require(len(output.samples) == n, f"{where}: {len(output.samples)} samples of {n}")
            attempts = self.requests.get(where, [])
            start = attempts[-1].at if attempts else begun
            for number, sample in enumerate(output.samples):
                what = f"{where} sample {number}"
                require((sample.prompt_index, sample.sample_index) == (index, number), f"{what}: has other indices")
                require(sample.seed == seed_of(params.seed, index, number), f"{what}: has another seed")
                whole = sample.finish_reason is FinishReason.LENGTH
                require(whole or may_be_cut, f"{what}: ended early without an order, {sample.finish_reason}")
                require(not whole or len(sample.token_ids) == params.max_tokens, f"{what}: is not whole")
                self._check_tokens(what, sample, tuple(prompt), start)
                self._check_version(what, sample, if_version, start)

    def _check_version(self, what: str, sample: Any, wanted: int | None, start: float) -> None:
        """A sample that is wanted by one version begins while that version serves; a later policy may continue it."""
        if wanted is not None and sample.token_ids:
            made = sample.weight_versions[0].weight_version
            began = made == wanted or any(era.version == wanted for era in self._allowed(start, self.clock()))
            self.require(began, f"{what}: {made} instead of {wanted}")

    def _check_tokens(self, what: str, sample: Any, prompt: tuple[int, ...], start: float) -> None:
        position = 0
        allowed = self._allowed(start, self.clock())
        for span in sample.weight_versions:
            self.require(span.start == position and span.end > position, f"{what}: spans {sample.weight_versions}")
            made = sample.token_ids[span.start : span.end]
            contents = [era.content for era in allowed if era.version == span.weight_version]
            self.require(bool(contents), f"{what}: version {span.weight_version} is none that may serve: {allowed}")
            # Two policies may have one version, and one span: a push repeats that of a policy that was dropped.
            fits = all(
                any(made[i] == token(sample.seed, prompt, content, span.start + i) for content in contents)
                for i in range(len(made))
            )
            self.require(fits, f"{what}: tokens of version {span.weight_version} are not those of its policy")
            position = span.end
        self.require(position == len(sample.token_ids), f"{what}: spans {sample.weight_versions}")

    def check_score(self, begun: float, version: int) -> None:
        allowed = [era.version for era in self._allowed(begun, self.clock())]
        self.require(version in allowed, f"a score by version {version}, and only {allowed} may serve")


def content_of(policy: Policy) -> str:
    """A policy of the fleet as servers name it."""
    base = policy.base if policy.base and not policy.base.startswith("+") else f"{CHECKPOINT}{policy.base}"
    for digest, name in _FOUND.items():
        base = base.replace(digest, name)
    return f"{base}|{policy.adapter}"
