"""The errors of this package: one class for each gRPC status that the server uses."""

from __future__ import annotations

import grpc


class RolloutError(Exception):
    """Base class of the errors. `str(error)` is the server's message, `code` its gRPC status."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN


class InvalidArgument(RolloutError, ValueError):
    """A field of the request is invalid; the message starts with its path, e.g. `sampling.temperature: ...`."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class ResourceExhausted(RolloutError):
    """A queue is full or memory is exhausted; retry later, or request less."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class FailedPrecondition(RolloutError):
    """The server's state does not allow this now, or a push has a version that is not above the current one."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Aborted(RolloutError):
    """Ended by `abort` or `cancel_update`, or idle for too long, or the version is not the expected one."""

    code = grpc.StatusCode.ABORTED


class NotFound(RolloutError, LookupError):
    """The named thing does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(RolloutError):
    """The name is in use, e.g. the `request_id` of a running request."""

    code = grpc.StatusCode.ALREADY_EXISTS


class DataLoss(RolloutError):
    """A push does not match its digests, or the server's checkpoint has changed since it was loaded."""

    code = grpc.StatusCode.DATA_LOSS


class Unavailable(RolloutError, ConnectionError):
    """The server cannot be reached, or is shutting down."""

    code = grpc.StatusCode.UNAVAILABLE


class Misdirected(Unavailable):
    """Something else listens at the address: an HTTP port, or a server with other TLS settings. Do not retry."""


class DeadlineExceeded(RolloutError, TimeoutError):
    """The timeout passed; the server has dropped the work. `generate` returns the tokens so far instead."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(RolloutError):
    """This client cancelled the call."""

    code = grpc.StatusCode.CANCELLED


class Unauthenticated(RolloutError, PermissionError):
    """The token is missing or invalid."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(RolloutError, PermissionError):
    """The role of the token does not permit the call."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Internal(RolloutError):
    """A bug in the client or the server, or a failure of the machine; see the server's log."""

    code = grpc.StatusCode.INTERNAL


_BY_CODE: dict[grpc.StatusCode, type[RolloutError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        ResourceExhausted,
        FailedPrecondition,
        Aborted,
        NotFound,
        AlreadyExists,
        DataLoss,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        Unauthenticated,
        PermissionDenied,
        Internal,
    )
}


_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

# The message of gRPC when the deadline passes in the client first, and that of the server.
_OWN_DEADLINE = "Deadline Exceeded"
DEADLINE_PASSED = "the deadline passed before the work was done"


def from_status(number: int, details: str) -> RolloutError:
    """The error of this gRPC status; a `RolloutError` with its `code` if it has no class of its own."""
    code = _CODES.get(number, grpc.StatusCode.UNKNOWN)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and details == _OWN_DEADLINE:
        details = DEADLINE_PASSED
    if code in _BY_CODE:
        return _BY_CODE[code](details)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        details = details or "the server has no such call: it is older than this client; update rollout-server"
    result = RolloutError(f"{code.name}: {details}")
    result.code = code
    return result


def from_rpc_error(error: grpc.RpcError) -> RolloutError:
    """The error of a failed call."""
    return from_status(error.code().value[0], error.details() or "")
