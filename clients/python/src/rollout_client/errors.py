"""What can go wrong, one class per gRPC status that the server uses."""

from __future__ import annotations

import grpc


class RolloutError(Exception):
    """Base of all errors of this package. `str(error)` is the server's message, `code` its gRPC status."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN


class InvalidArgument(RolloutError, ValueError):
    """A field of the request is wrong; the message starts with its path, e.g. `sampling.temperature: ...`."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class ResourceExhausted(RolloutError):
    """A queue or the memory ceiling says no; trying later, or asking for less, can help."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class FailedPrecondition(RolloutError):
    """The server's lifecycle forbids this now, or a push has a version that goes back or repeats."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Aborted(RolloutError):
    """Ended by an order (`abort`, `cancel_update`) or for idleness, or the version is not the one insisted on."""

    code = grpc.StatusCode.ABORTED


class NotFound(RolloutError, LookupError):
    """No such thing."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(RolloutError):
    """The name is taken, e.g. a `request_id` that is still running."""

    code = grpc.StatusCode.ALREADY_EXISTS


class DataLoss(RolloutError):
    """The bytes of a push are not those that its digest says, or the server's checkpoint is not what it loaded."""

    code = grpc.StatusCode.DATA_LOSS


class Unavailable(RolloutError, ConnectionError):
    """The server cannot be reached, or is shutting down."""

    code = grpc.StatusCode.UNAVAILABLE


class Misdirected(Unavailable):
    """Something else answers there: a port of HTTP, a server with other TLS. Trying again does not help."""


class DeadlineExceeded(RolloutError, TimeoutError):
    """The timeout passed; the server has dropped the work. `generate` returns what there is instead."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(RolloutError):
    """This side cancelled the call."""

    code = grpc.StatusCode.CANCELLED


class Unauthenticated(RolloutError, PermissionError):
    """The token is missing or wrong."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(RolloutError, PermissionError):
    """The token has a role that may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Internal(RolloutError):
    """A bug, on either side, or the machine; the server's log says more."""

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

# What gRPC says where the deadline passes on this side first, and the words that the server has for the same.
_OWN_DEADLINE = "Deadline Exceeded"
DEADLINE_PASSED = "the deadline passed before the work was done"


def from_status(number: int, details: str) -> RolloutError:
    """The typed error of this gRPC status. One without a class of its own keeps its code on a `RolloutError`."""
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
    """The typed error of a failed call."""
    return from_status(error.code().value[0], error.details() or "")
