"""The asyncio client's pushes as blocking ones, so that a test is written once for both clients."""

from __future__ import annotations

import asyncio
import inspect

from rollout_client import AsyncRolloutClient


class WaitedClient:
    """An `AsyncRolloutClient` in a loop of its own, which runs while a call is waited for."""

    def __init__(self, address, **options):
        self.loop = asyncio.new_event_loop()
        self.client = self.loop.run_until_complete(self._made(address, options))

    async def _made(self, address, options):
        return AsyncRolloutClient(address, **options)

    def begin_push(self, *arguments, **options):
        return WaitedPush(self.loop, self.client.begin_push(*arguments, **options))

    def __getattr__(self, name):
        return waited(self.loop, getattr(self.client, name))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.loop.run_until_complete(self.client.close())
        self.loop.close()


class WaitedPush:
    """An `AsyncPush` of such a client."""

    def __init__(self, loop, push):
        self.loop, self.push = loop, push

    def __getattr__(self, name):
        return waited(self.loop, getattr(self.push, name))

    def __enter__(self):
        self.loop.run_until_complete(self.push.__aenter__())
        return self

    def __exit__(self, *error):
        return self.loop.run_until_complete(self.push.__aexit__(*error))


def waited(loop, member):
    """A method that waits for the coroutine which `member` gives; what is no such method as it is."""
    if not inspect.iscoroutinefunction(member):
        return member
    return lambda *arguments, **options: loop.run_until_complete(member(*arguments, **options))
