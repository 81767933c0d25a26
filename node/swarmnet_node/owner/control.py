"""Lets the owner control a node: gRPC between processes of this machine (``local_channel.py``)."""

import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import grpc

from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_node.owner.local_channel import dialling, serving
from swarmnet_protocols.errors import (
    ConfigError,
    DeadlineExceeded,
    IncompatibleVersion,
    OutOfResources,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.wire import control_pb2
from swarmnet_protocols.wire.control_pb2 import NodeStatus

MAX_GRACE_S = 24 * 3600.0
_ANSWER_TIMEOUT_S = 5.0
_SERVICE: str = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name
_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT: ConfigError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OutOfResources,
}


class Controlled(Protocol):
    """The node that the owner controls."""

    def status(self) -> NodeStatus: ...

    def finish(self, grace_s: float) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def limits(self) -> OwnerLimits: ...

    def set_limits(self, limits: OwnerLimits) -> None:
        """Raises ``SwarmnetError`` for limits that the node cannot keep. The old limits then
        stay."""


@asynccontextmanager
async def serve(node: Controlled, data_dir: Path) -> AsyncIterator[None]:
    """Let the owner control ``node`` while the context is open. The caller holds the lock of
    ``data_dir``."""

    async def answer_status(_request: control_pb2.StatusRequest, _context: object) -> NodeStatus:
        return node.status()

    async def answer_finish(request: control_pb2.FinishRequest, context: Any) -> control_pb2.FinishReply:
        if not _is_grace(request.grace_s):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, json.dumps(["grace_s is out of range", ""]))
        node.finish(request.grace_s)
        return control_pb2.FinishReply()

    async def answer_pause(_request: control_pb2.PauseRequest, _context: object) -> control_pb2.PauseReply:
        node.pause()
        return control_pb2.PauseReply()

    async def answer_resume(_request: control_pb2.ResumeRequest, _context: object) -> control_pb2.ResumeReply:
        node.resume()
        return control_pb2.ResumeReply()

    async def answer_limits(_request: control_pb2.GetLimitsRequest, _context: object) -> control_pb2.Limits:
        return control_pb2.Limits(**asdict(node.limits()))

    async def answer_set_limits(request: control_pb2.Limits, context: Any) -> control_pb2.Limits:
        try:
            node.set_limits(limits_of(request))
        except SwarmnetError as error:
            code = grpc.StatusCode.INVALID_ARGUMENT
            if isinstance(error, OutOfResources):
                code = grpc.StatusCode.RESOURCE_EXHAUSTED
            await context.abort(code, json.dumps([str(error), error.hint]))
        return control_pb2.Limits(**asdict(node.limits()))

    methods = {
        "Status": _method(answer_status, control_pb2.StatusRequest),
        "Finish": _method(answer_finish, control_pb2.FinishRequest),
        "Pause": _method(answer_pause, control_pb2.PauseRequest),
        "Resume": _method(answer_resume, control_pb2.ResumeRequest),
        "GetLimits": _method(answer_limits, control_pb2.GetLimitsRequest),
        "SetLimits": _method(answer_set_limits, control_pb2.Limits),
    }
    async with serving(grpc.method_handlers_generic_handler(_SERVICE, methods), data_dir):
        yield


def status(data_dir: Path) -> NodeStatus:
    """Return the status of the node in ``data_dir``. Raises ``Unreachable`` without a node."""
    reply: NodeStatus = _call(data_dir, "Status", control_pb2.StatusRequest(), NodeStatus)
    return reply


def finish(data_dir: Path, grace_s: float) -> None:
    """Tell the node in ``data_dir`` to stop within ``grace_s``. Returns at once.

    Raises ``ConfigError`` for a grace out of range, and ``Unreachable`` without a node.
    """
    if not _is_grace(grace_s):
        raise ConfigError(
            f"a grace of {grace_s} s is not possible", hint=f"choose 0 to {MAX_GRACE_S:.0f} seconds"
        )
    _call(data_dir, "Finish", control_pb2.FinishRequest(grace_s=grace_s), control_pb2.FinishReply)


def pause(data_dir: Path) -> None:
    """Have the node in ``data_dir`` free its memory. Returns at once.

    Raises ``Unreachable`` without a node.
    """
    _call(data_dir, "Pause", control_pb2.PauseRequest(), control_pb2.PauseReply)


def resume(data_dir: Path) -> None:
    """End ``pause``. Returns at once. Raises ``Unreachable`` without a node."""
    _call(data_dir, "Resume", control_pb2.ResumeRequest(), control_pb2.ResumeReply)


def get_limits(data_dir: Path) -> OwnerLimits:
    """Return the limits of the node in ``data_dir``. Raises ``Unreachable`` without a node."""
    return limits_of(_call(data_dir, "GetLimits", control_pb2.GetLimitsRequest(), control_pb2.Limits))


def set_limits(data_dir: Path, limits: OwnerLimits) -> OwnerLimits:
    """Replace all limits of the node in ``data_dir``, now and after restarts.

    Returns the limits in force. Raises ``ConfigError`` or ``OutOfResources`` if the node cannot
    keep them; the old limits then stay. Raises ``Unreachable`` without a node.
    """
    return limits_of(_call(data_dir, "SetLimits", control_pb2.Limits(**asdict(limits)), control_pb2.Limits))


def limits_of(message: control_pb2.Limits) -> OwnerLimits:
    """Return the limits in a message. Raises ``ConfigError`` if they are invalid."""
    return OwnerLimits.from_fields({each.name: value for each, value in message.ListFields()})


def _is_grace(grace_s: float) -> bool:
    return math.isfinite(grace_s) and 0 <= grace_s <= MAX_GRACE_S


def _method(answer: Callable[..., Any], request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=request.FromString,
        response_serializer=lambda reply: reply.SerializeToString(),
    )


def _call(data_dir: Path, method: str, request: Any, reply: Any) -> Any:
    no_node = Unreachable(
        f"no node is running in {data_dir}",
        hint="start one with `swarmnet join SWARM`, or name its directory with --data-dir; one that downloads its model does not answer yet",
    )
    with dialling(data_dir) as found:
        if found is None:
            raise no_node
        channel, token = found
        call = channel.unary_unary(
            f"/{_SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,
        )
        try:
            return call(request, timeout=_ANSWER_TIMEOUT_S, metadata=token)
        except grpc.RpcError as error:
            raise _explain(error, data_dir, no_node) from error


def _explain(error: Any, data_dir: Path, no_node: SwarmnetError) -> SwarmnetError:
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE:
        return no_node
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(
            f"the node in {data_dir} does not answer",
            hint="it may be overloaded or stopped: try again, or end its process",
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return IncompatibleVersion(
            f"the node in {data_dir} runs another version of swarmnet",
            hint="use the version that the node was started with",
        )
    if code in _REFUSALS:
        message, hint = json.loads(error.details())
        return _REFUSALS[code](message, hint=hint)
    return SwarmnetError(f"the node in {data_dir} refused: {error.details()}")
