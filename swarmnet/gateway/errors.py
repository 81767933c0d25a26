"""Error responses in OpenAI's format, made from the exceptions of a request."""

import math
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException

from swarmnet_client.batching.continuous_batching import Overloaded
from swarmnet_protocols import errors
from swarmnet_protocols.net.limits.resources import ResourceLimitReached

RETRY_S = 5
"""Default of ``Retry-After`` in seconds: the interval at which a client reads the directory."""

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a request that its client ended: it has disconnected, or has cancelled the
request. Clients repeat a request after 409 or 5xx, but not after this status."""
OVERLOADED, NO_ROUTE = "overloaded", "no_route"
"""Codes of refusals that often pass within seconds: hosts are busy, or one has just left."""
UNSUPPORTED = "unsupported"
"""Pydantic error type for an unknown parameter; its context has the ``name``."""
MAX_NAME_CHARS = 64
MAX_MESSAGE_CHARS = 400
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 408: "body_too_slow", 413: "body_too_large"}
_NOT_FOUND = "there is nothing at this path: try /v1/models, /v1/chat/completions or /v1/completions"


class RequestCancelled(errors.SwarmnetError):
    """The caller has cancelled this request by another one."""

    def __init__(self) -> None:
        super().__init__("this request was cancelled")


@dataclass
class ApiError(Exception):
    """An error response: HTTP status, and the fields of OpenAI's error object (``kind`` is its
    ``type``)."""

    status: int
    message: str
    code: str
    kind: str = "invalid_request_error"
    param: str | None = None
    retry_after_s: int | None = None

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def api_error(error: Exception) -> ApiError:
    """Return the error response for an exception. An unexpected one becomes a 500 without its
    message."""
    match error:
        case ApiError():
            return error
        case errors.SwarmnetError():
            return swarm_error(error)
        case HTTPException():
            code = _HTTP_CODES.get(error.status_code, "invalid_request")
            message = _NOT_FOUND if error.status_code == 404 else str(error.detail)
            return ApiError(error.status_code, message, code)
        case _:
            return ApiError(500, "this should not have happened", "internal_error", "server_error")


def swarm_error(error: errors.SwarmnetError) -> ApiError:
    """Return the error response for a failure of the swarm: 503 with ``Retry-After`` if a retry may
    succeed, else 500."""
    message = f"{error} ({error.hint})" if error.hint else str(error)
    if isinstance(error, RequestCancelled):
        return ApiError(CLIENT_CLOSED_REQUEST, message, "cancelled")
    if isinstance(error, errors.NoRoom):
        return ApiError(400, message, "context_length_exceeded")
    if isinstance(error, Overloaded | errors.HostsOverloaded):
        wait_s = max(1, math.ceil(error.retry_after_s))
        return ApiError(503, message, OVERLOADED, "server_error", retry_after_s=wait_s)
    if isinstance(error, errors.Unreachable):
        return ApiError(503, message, NO_ROUTE, "server_error", retry_after_s=RETRY_S)
    if isinstance(error, errors.OutOfResources):
        wait_s = (
            max(1, math.ceil(error.retry_after_s)) if isinstance(error, ResourceLimitReached) else RETRY_S
        )
        return ApiError(503, message, "out_of_resources", "server_error", retry_after_s=wait_s)
    return ApiError(500, message, "internal_error", "server_error")


def validation_error(error: ValidationError) -> ApiError:
    """Return the error response for an invalid request. It names the first invalid field and quotes
    none of its values."""
    problem = error.errors(include_url=False, include_context=True, include_input=False)[0]
    where = [str(part)[:MAX_NAME_CHARS] for part in problem["loc"]]
    if problem["type"] == UNSUPPORTED:
        path = ".".join([*where, str(problem["ctx"]["name"])[:MAX_NAME_CHARS]])
        return ApiError(400, f"Unsupported parameter: '{path}'", "unsupported_parameter", param=path)
    message = f"{'.'.join(where)}: {problem['msg']}"[:MAX_MESSAGE_CHARS]
    code = "missing_required_parameter" if problem["type"] == "missing" else "invalid_value"
    return ApiError(400, message, code, param=where[0] if where else None)
