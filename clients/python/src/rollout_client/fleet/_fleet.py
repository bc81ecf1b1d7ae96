"""The blocking fleet and the asyncio one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from .._segment import OWNER_ONLY
from .._tls import TlsInput
from ._async_methods import AsyncFleetMethods
from ._core import CAPACITY, PATIENCE_SECONDS, Core
from ._methods import FleetMethods
from ._pusher import Resupply
from ._replica import FixedEndpoint


class Fleet(FleetMethods):
    """Several servers of the same model, used as one. Threads may share it; it does not survive `fork`.

    Prompts are spread over the replicas, each with all its samples on one of them. Outputs come back in order, with the
    bits that one server gives for the same seed. A push reaches all replicas: once it has returned, no replica serves
    an older policy. The methods are those of `RolloutClient`, with the same errors.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        timeout: float | None = None,
        token: str | None = None,
        *,
        tls: TlsInput = None,
        segment_mode: int = OWNER_ONLY,
        quorum: int | None = None,
        capacity: int = CAPACITY,
        patience: float = PATIENCE_SECONDS,
        resupply: Resupply | None = None,
    ) -> None:
        """Starts to look for the replicas; `wait_until_ready` waits for them.

        Args:
            addresses: `host:port` of each replica's server. The fleet neither starts nor restarts servers.
            timeout, token, tls, segment_mode: as for `RolloutClient`, for all replicas.
            quorum: how many replicas must take a push. With fewer, the push fails and the policy stays as it was. None
                is half of them, rounded up.
            capacity: samples that a replica is given at once. Further prompts wait in this process for the first
                replica with room.
            patience: seconds that requests wait when no replica can be reached, before they raise `Unavailable`.
            resupply: returns the tensors of the last full push again (a mapping, or pairs one by one), for a replica
                that missed it. It is called in a thread of its own while training continues, and must return what was
                pushed, which is checked by digest. With None, such a replica waits for the next full push.
        """
        self._core = Core(
            [FixedEndpoint(address) for address in addresses],
            {"timeout": timeout, "token": token, "tls": tls, "segment_mode": segment_mode},
            quorum=quorum,
            capacity=capacity,
            patience=patience,
            resupply=resupply,
        )

    def close(self) -> None:
        """Ends the calls and the connections; the servers keep running."""
        self._core.close()


class AsyncFleet(AsyncFleetMethods):
    """A fleet with methods to await, in any event loop. The fleet itself can be used at the same time.

    Cancelling a task that waits for a request aborts it on the servers; one that waits for a push ends the push.
    """

    def __init__(self, fleet: Fleet) -> None:
        """Uses this fleet; `close` closes it."""
        self.fleet = fleet
        self._core = fleet._core

    async def close(self) -> None:
        """As `Fleet.close`."""
        await asyncio.to_thread(self.fleet.close)
