"""Generates recorded samples again and reports the differences."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from ..client import RolloutClient
from ..errors import Aborted, InvalidArgument, NotFound, PermissionDenied
from ..types import FinishReason, Sample
from ._images import ImageDirectory
from ._receipt import Receipt, SpanReceipt
from ._recorder import routing_hash, server_facts, weights_digest

# Concurrent requests: enough to fill a batch, and few enough that their replies take little memory.
_AT_ONCE = 64
_ENDED = "ended by the call's timeout or by a command to the server: replay it again with a longer timeout"


class Verdict(str, Enum):
    """The result of replaying a receipt."""

    SAME = "same"
    """The same tokens, bits of log-probabilities, and end."""
    SAME_UNTIL_PUSH = "same_until_push"
    """The tokens of the serving weights are the same; a push came in the middle of the sample."""
    DIFFERS = "differs"
    REFUSED = "refused"
    """The server rejects the request, or the request was ended early."""

    def __str__(self) -> str:
        """The plain value."""
        return self.value


@dataclass(frozen=True)
class Replayed:
    """A receipt with the result of its replay."""

    receipt: Receipt
    verdict: Verdict
    token: int | None = None
    """Index of the first token that differs; after a push in the middle, of the first token of the other weights."""
    weight_version: int | None = None
    """The version that sampled that token."""
    difference: str = ""
    """The difference at that token, or why the request was rejected."""
    reason: str = ""
    """The reason, and what to do."""


@dataclass(frozen=True)
class Report:
    """The results of a replay, and the weights that served."""

    results: list[Replayed]
    weight_version: int
    """The version that served."""
    weights: str | None
    """Digest of its weights; None if the token's role does not allow to request it."""

    @property
    def same(self) -> bool:
        """Whether each sample has the same bits, as far as the serving weights sampled it."""
        return all(r.verdict in (Verdict.SAME, Verdict.SAME_UNTIL_PUSH) for r in self.results)


@dataclass(frozen=True)
class _Present:
    """The server and the weights that serve now."""

    facts: dict[str, Any]
    is_batch_invariant: bool
    returns_routing: bool
    weight_version: int
    weights: str | None

    def has(self, span: SpanReceipt) -> bool:
        """Whether these weights sampled the span, according to the receipt."""
        if span.weights is not None and self.weights is not None:
            return span.weights == self.weights
        return span.weight_version == self.weight_version


def replay(
    client: RolloutClient,
    receipts: Iterable[Receipt],
    done: Callable[[Replayed], None] | None = None,
    *,
    images: str | os.PathLike[str] | None = None,
) -> Report:
    """Generates each sample again with its own seed, and compares all bits.

    Args:
        client: a client of a server with the weights in question.
        receipts: the receipts, for example from `read_receipts`.
        done: called with each result, in order.
        images: the directory in which the recorder kept the images of prompts.

    Raises:
        InvalidArgument: the image of a receipt is missing, or its file was changed; nothing was sent.
        Aborted: the policy was pushed during the replay.
        FailedPrecondition: the server sleeps, or has no weights.
    """
    receipts, kept = list(receipts), None if images is None else ImageDirectory(images)
    _check_images(receipts, kept)
    before = client.status()
    try:
        version, weights = weights_digest(client)
    except PermissionDenied:
        version, weights = before.weight_version, None
    info = client.info()
    returns_routing = info.routing is not None and info.routing.returned
    present = _Present(server_facts(client), info.batch_invariant, returns_routing, version, weights)
    results = []
    for result in _in_order(lambda receipt: _replayed(client, receipt, kept, present), receipts):
        results.append(result)
        if done is not None:
            done(result)
    if client.status().updates != before.updates:
        raise Aborted("a push came during the replay; repeat it while no client pushes")
    return Report(results, version, weights)


def _check_images(receipts: list[Receipt], kept: ImageDirectory | None) -> None:
    for image in {image.hash: image for receipt in receipts for image in receipt.images}.values():
        if kept is None:
            raise InvalidArgument(
                f"images: missing, but a prompt has the image {image.hash}; give images=, the directory in which the "
                "recorder kept it"
            )
        kept.read(image)


def _in_order(work: Callable[[Receipt], Replayed], receipts: list[Receipt]) -> Iterator[Replayed]:
    """Runs `_AT_ONCE` at a time."""
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        for first in range(0, len(receipts), _AT_ONCE):
            yield from pool.map(work, receipts[first : first + _AT_ONCE])
    finally:
        # After an exception the rest is not awaited: the caller closes the client, which ends its calls.
        pool.shutdown(wait=False, cancel_futures=True)


def _replayed(client: RolloutClient, receipt: Receipt, kept: ImageDirectory | None, present: _Present) -> Replayed:
    if receipt.finish_reason is FinishReason.ABORTED and not receipt.token_ids:
        return Replayed(receipt, Verdict.SAME)
    try:
        sample, routing = _again(client, receipt, kept, present.returns_routing)
    except (InvalidArgument, NotFound, Aborted) as error:
        reason = _ENDED if isinstance(error, Aborted) else _other_server(receipt, present)
        return Replayed(receipt, Verdict.REFUSED, difference=str(error), reason=reason)
    at = _first_difference(receipt, sample)
    if at is None and None not in (receipt.routing, routing) and receipt.routing != routing:
        at, difference = max(0, len(receipt.token_ids) - 1), "other experts before it or at it"
    elif at is None:
        return Replayed(receipt, Verdict.SAME)
    else:
        difference = _difference(receipt, sample, at)
    if not receipt.spans:
        return Replayed(receipt, Verdict.DIFFERS, at, None, difference, _other_server(receipt, present))
    first, span = receipt.spans[0], next((s for s in receipt.spans if at < s.end), receipt.spans[-1])
    if span is not first and present.has(first) and at == span.start:
        reason = f"version {span.weight_version} took over in the middle of the sample"
        return Replayed(receipt, Verdict.SAME_UNTIL_PUSH, at, span.weight_version, difference, reason)
    # Tokens after those of other weights depend on them, whichever weights sampled them.
    blamed = span if present.has(first) else first
    reason = _other_server(receipt, present) if present.has(blamed) else _gone(blamed, present)
    return Replayed(receipt, Verdict.DIFFERS, at, span.weight_version, difference, reason)


def _again(
    client: RolloutClient, receipt: Receipt, kept: ImageDirectory | None, returns_routing: bool
) -> tuple[Sample, str | None]:
    """The sample, and the digest of its experts if the receipt has one and the server returns them."""
    sampling = receipt.sampling
    if receipt.finish_reason is FinishReason.ABORTED:
        # The sample was aborted. No token depends on where its sample must or may end later.
        count = len(receipt.token_ids)
        sampling = replace(sampling, max_tokens=count, min_tokens=min(sampling.min_tokens, count))
    # Without a directory no receipt has images: `_check_images`.
    images = [] if kept is None else [kept.read(image) for image in receipt.images]
    (output,) = client.generate(
        [receipt.prompt_token_ids],
        1,
        sampling,
        adapter=receipt.adapter,
        images=[images],
        return_text=False,
        return_routing=returns_routing and receipt.routing is not None,
    )
    sample = output.samples[0]
    if sample.finish_reason is FinishReason.ABORTED:
        raise Aborted("it was ended before it was complete")
    return sample, routing_hash(output, sample)


def _first_difference(receipt: Receipt, sample: Sample) -> int | None:
    """Index of the first token that differs in its id, in a bit of its log-probabilities, or in ending the sample."""
    count = len(receipt.token_ids)
    for at in range(max(count, len(sample.token_ids))):
        if _at(receipt, at) != _at(sample, at):
            return at
    ends_alike = sample.finish_reason is receipt.finish_reason or receipt.finish_reason is FinishReason.ABORTED
    return None if ends_alike else max(0, count - 1)


def _at(made: Receipt | Sample, at: int) -> tuple[int, bytes, bytes] | None:
    if at >= len(made.token_ids):
        return None
    return made.token_ids[at], made.logprobs[at].tobytes(), made.raw_logprobs[at].tobytes()


def _difference(receipt: Receipt, sample: Sample, at: int) -> str:
    was, now = _at(receipt, at), _at(sample, at)
    if now is None:
        return f"missing ({sample.finish_reason}), was {receipt.token_ids[at]}"
    if was is None:
        return f"now {sample.token_ids[at]}, was missing ({receipt.finish_reason})"
    if was == now:
        return f"now ends the sample by {sample.finish_reason}, ended it by {receipt.finish_reason}"
    if was[0] != now[0]:
        return f"now {now[0]} ({_shown(sample.raw_logprobs[at])}), was {was[0]} ({_shown(receipt.raw_logprobs[at])})"
    raw = was[2] != now[2]
    made = [made.raw_logprobs[at] if raw else made.logprobs[at] for made in (sample, receipt)]
    return f"{'raw ' if raw else ''}log-probability now {_shown(made[0])}, was {_shown(made[1])}"


def _shown(value: np.float32) -> str:
    """The shortest digits that identify a float32."""
    return str(value)


def _gone(span: SpanReceipt, present: _Present) -> str:
    was = f"version {span.weight_version}" + (f" ({span.weights[:12]}…)" if span.weights else "")
    now = f"version {present.weight_version}" + (f" ({present.weights[:12]}…)" if present.weights else "")
    return f"made by the weights of {was}, but the server has {now}: push the recorded ones again"


def _other_server(receipt: Receipt, present: _Present) -> str:
    """Why the same weights gave a different result."""
    changed = [
        f"{name} {receipt.server.get(name)!r} (now {value!r})"
        for name, value in present.facts.items()
        if receipt.server.get(name) != value
    ]
    if changed:
        return f"made by a server with {', '.join(changed)}"
    if not present.is_batch_invariant:
        return "made by a server without batch invariance (--attention flash, or --all-reduce nccl)"
    if receipt.adapter is not None:
        return f"made with generation {receipt.adapter_generation} of the adapter {receipt.adapter!r}: push it again"
    if any(span.weights is None for span in receipt.spans) or present.weights is None:
        return "made by weights of the same version that may differ: their digests are unknown"
    return "made by the same weights on the same server: the receipt was changed, or this is a bug; please report it"
