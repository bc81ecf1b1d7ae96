"""A call of `generate` that is larger than a message may be is sent in parts, one after the other."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ._channel import generate_timeouts
from ._seeds import prompt_seed
from .errors import InvalidArgument
from .types import FinishReason, Sample, StreamEvent, Summary

MAX_MESSAGE_BYTES = 64 << 20
"""The largest message that a server takes."""

# Room in a message for its fields other than prompts and sampling.
_OTHER_BYTES = 64 << 10
# Room for the tags and lengths of a prompt and its sampling.
_TAG_BYTES = 32

_PATH = re.compile(r"^prompts\[(\d+)\]")


class Parts:
    """The messages of one call, in order. Each sample has the seed that it has in one message.

    Iterates over pairs of a message, and the seconds in which its stream must end (None: no limit). Events and errors
    of the stream have indices of prompts in the message; `whole` and `whole_errors` give them those in the call. After
    a sample was aborted, the samples of further messages are aborted too.
    """

    def __init__(self, request: Any, time_limit: float | None) -> None:
        """Takes the `GenerateRequest` of the call, whose samples end after `time_limit` seconds.

        Raises:
            InvalidArgument: a prompt alone is larger than a message.
        """
        self._request, self._time_limit, self._started = request, time_limit, time.monotonic()
        self._first, self._aborted = 0, False
        self._firsts = _firsts(request)

    def __iter__(self) -> Iterator[tuple[Any, float | None]]:
        """Makes each message when the one before has ended."""
        request, prompts = self._request, list(self._request.prompts)
        ends = [*self._firsts[1:], len(prompts)]
        if len(ends) > 1:
            request.ClearField("prompts")
        for first, end in zip(self._firsts, ends, strict=True):
            self._first = first
            if len(ends) > 1:
                request = self._part(prompts[first:end])
            limit, deadline = generate_timeouts(self._left(), None)
            if limit is not None:
                request.time_limit_seconds = limit
            yield request, deadline

    def whole(self, event: StreamEvent) -> StreamEvent:
        """An event of the current message as one of the call."""
        if isinstance(event, Sample) and event.finish_reason is FinishReason.ABORTED:
            self._aborted = True
        if self._first == 0 or isinstance(event, Summary):
            return event
        return replace(event, prompt_index=self._first + event.prompt_index)

    @contextmanager
    def whole_errors(self) -> Iterator[None]:
        """Raises an error that names a prompt of the current message with its index in the call."""
        try:
            yield
        except InvalidArgument as error:
            if self._first == 0:
                raise
            text = _PATH.sub(lambda path: f"prompts[{self._first + int(path[1])}]", str(error))
            raise InvalidArgument(text) from error

    def _left(self) -> float | None:
        """Seconds in which the samples of the next message must end."""
        if self._aborted:
            return 0.0
        if self._time_limit is None or self._first == 0:
            return self._time_limit
        return max(self._started + self._time_limit - time.monotonic(), 0.0)

    def _part(self, prompts: list[Any]) -> Any:
        part = type(self._request)()
        part.CopyFrom(self._request)
        part.prompts.extend(prompts)
        sampling = part.sampling
        if self._first and sampling.HasField("seed"):
            for index, prompt in enumerate(part.prompts, self._first):
                prompt.sampling.CopyFrom(sampling)
                prompt.sampling.seed = prompt_seed(sampling.seed, index)
        return part


def _firsts(request: Any) -> list[int]:
    """Indices of the prompts with which messages begin that each have as many prompts as fit."""
    sampling = request.sampling.ByteSize()
    room = MAX_MESSAGE_BYTES - _OTHER_BYTES - sampling
    firsts, used = [0], 0
    for index, prompt in enumerate(request.prompts):
        size = prompt.ByteSize() + sampling + _TAG_BYTES
        if size > room:
            raise InvalidArgument(
                f"prompts[{index}]: has {size} bytes with its images, more than the {room} of a message; send fewer or "
                "smaller images"
            )
        if used + size > room:
            firsts, used = [*firsts, index], 0
        used += size
    return firsts
