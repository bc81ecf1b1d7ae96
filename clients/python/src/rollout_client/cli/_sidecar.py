"""The proxy of `rollout sidecar`: forwards the server's HTTP routes, and implements one itself."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import grpc
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from .._adapter_directory import CONFIG, read_adapter
from .._tls import Tls, TlsFiles
from ..client import RolloutClient
from ..errors import Aborted, RolloutError
from ._origins import AllowedHosts

LOAD = "/v1/load_lora_adapter"

_MAX_ORDER_BYTES = 1 << 20  # a name and a path
_OF_ONE_CONNECTION = frozenset(
    {
        "connection",
        "expect",
        "host",  # forwarded only together with Origin
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# The statuses of the server's own HTTP port.
_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.DEADLINE_EXCEEDED: HTTPStatus.REQUEST_TIMEOUT,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.CONFLICT,
    grpc.StatusCode.ABORTED: HTTPStatus.CONFLICT,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    grpc.StatusCode.DATA_LOSS: HTTPStatus.UNPROCESSABLE_ENTITY,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
}


class Sidecar:
    """Forwards requests, and pushes adapters from local directories."""

    def __init__(
        self, client: RolloutClient, upstream: str, token: str | None, tls: Tls | None, hosts: AllowedHosts
    ) -> None:
        """Reads the files of `tls`; does not connect yet.

        Args:
            client: the client that pushes adapters.
            upstream: `host:port` of the server's HTTP port.
            token: token for requests without one.
            tls: TLS settings, if the server uses TLS.
            hosts: host names by which clients may reach the sidecar.
        """
        self.upstream = f"{'http' if tls is None else 'https'}://{upstream}"
        self._client = client
        self._token = token
        self._hosts = hosts
        self._tls = None if tls is None else TlsFiles(tls)
        if self._tls is not None:
            self._tls.context.set_alpn_protocols(["http/1.1"])
        self._loads = asyncio.Lock()  # the server receives one push at a time
        self._session: ClientSession | None = None

    def application(self) -> web.Application:
        """The routes."""
        application = web.Application(client_max_size=_MAX_ORDER_BYTES, middlewares=[self._guard])
        application.cleanup_ctx.append(self._connections)
        application.router.add_post(LOAD, self._load)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        return application

    async def _connections(self, _: web.Application) -> AsyncIterator[None]:
        secured = True if self._tls is None else self._tls.context
        # No limit on connections, because the trainer chooses their number, or on the time of a completion.
        connector = TCPConnector(limit=0, ssl=secured)
        async with ClientSession(connector=connector, timeout=ClientTimeout(), auto_decompress=False) as session:
            self._session = session
            yield

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Rejects requests that a web page of another origin may have sent, because they would get the token."""
        why = self._hosts.refusal(request.headers)
        if why is not None:
            return _error(HTTPStatus.FORBIDDEN, why, "PermissionDenied")
        if not request.raw_path.startswith("/"):
            return _error(HTTPStatus.BAD_REQUEST, f"target {request.raw_path[:100]!r}: must be a path")
        # Browsers send bodies of other types to another origin without a preflight request.
        if request.body_exists and request.content_type != "application/json":
            given = request.headers.get("Content-Type", "")[:100]
            return _error(HTTPStatus.BAD_REQUEST, f"content-type: {given!r} is not application/json")
        return await handler(request)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        answer: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method,
                self.upstream + request.raw_path,
                headers=self._headers(request),
                data=request.content if request.body_exists else None,
                allow_redirects=False,
                server_hostname=None if self._tls is None else self._tls.server_name,
            ) as found:
                answer = web.StreamResponse(status=found.status, reason=found.reason)
                answer.headers.extend(_end_to_end(found.headers))
                await answer.prepare(request)
                async for part in found.content.iter_any():
                    await answer.write(part)
        except ClientError as error:
            if answer is None:
                return _error(HTTPStatus.BAD_GATEWAY, f"the server at {self.upstream} does not answer: {error}")
            # Part of the response has been sent, or the trainer has disconnected: abort the connection.
            if request.transport is not None:
                request.transport.abort()
            return answer
        await answer.write_eof()
        return answer

    def _headers(self, request: web.Request) -> list[tuple[str, str]]:
        headers = _end_to_end(request.headers)
        # The server compares Host with Origin. Without Origin, Host is the server's own, which a proxy in front of it
        # may need for routing.
        if "Origin" in request.headers:
            headers += [("Host", host) for host in request.headers.getall("Host", [])[:1]]
        if self._token is not None and "Authorization" not in request.headers:
            headers.append(("Authorization", f"Bearer {self._token}"))
        return headers

    async def _load(self, request: web.Request) -> web.Response:
        """Implements the server's route with a directory of this machine."""
        try:
            order = json.loads(await request.read())
            name, path, in_place = order["lora_name"], order["lora_path"], order.get("load_inplace") or False
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            name = path = in_place = None
        if not (isinstance(name, str) and isinstance(path, str) and isinstance(in_place, bool) and name and path):
            return _error(HTTPStatus.BAD_REQUEST, "Both 'lora_name' and 'lora_path' must be provided, as texts.")
        try:
            async with self._loads:
                await asyncio.to_thread(self._push, name, path, in_place)
        except _Taken:
            return _error(
                HTTPStatus.BAD_REQUEST,
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
            )
        except _Missing:
            return _error(
                HTTPStatus.NOT_FOUND,
                f"Loading lora {name} failed: No adapter found for {path}: it has no {CONFIG} on the sidecar's machine",
            )
        except RolloutError as error:
            status = _STATUSES.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
            return _error(status, str(error), type(error).__name__)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    def _push(self, name: str, path: str, in_place: bool) -> None:
        if not in_place and self._is_resident(name):
            raise _Taken
        if not (Path(path) / CONFIG).is_file():
            raise _Missing
        tensors, config = read_adapter(path)
        try:
            generation = None if in_place else 0
            self._client.push_lora(tensors, config, name=name, expected_generation=generation, evict=True)
        except Aborted:
            if not in_place and self._is_resident(name):  # another client has taken the name meanwhile
                raise _Taken from None
            raise

    def _is_resident(self, name: str) -> bool:
        return any(adapter.name == name and not adapter.retired for adapter in self._client.adapters())


class _Taken(Exception):
    """An adapter with this name is already resident."""


class _Missing(Exception):
    """The directory has no adapter, or does not exist."""


async def serve(sidecar: Sidecar, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serves until SIGTERM.

    Args:
        sidecar: the sidecar.
        host, port: address to listen on; port 0 picks a free one.
        ready: called with the `host:port` on which it listens.

    Raises:
        OSError: it cannot listen on the address.
    """
    # When a client disconnects, its request ends on the server too.
    runner = web.AppRunner(sidecar.application(), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        listening = runner.addresses[0]
        ready(f"[{listening[0]}]:{listening[1]}" if ":" in listening[0] else f"{listening[0]}:{listening[1]}")
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        await ended.wait()
    finally:
        await runner.cleanup()


def _end_to_end(headers: Any) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in _OF_ONE_CONNECTION]


def _error(status: HTTPStatus, message: str, kind: str = "") -> web.Response:
    kind = "BadRequest" if status == HTTPStatus.BAD_REQUEST else kind or status.phrase.replace(" ", "")
    body = {"message": message, "type": f"{kind}Error", "param": None, "code": status.value}
    return web.json_response({"error": body}, status=status)
