"""Lets the owner watch and control a command that runs for long: gRPC between processes of this
machine (``local_channel.py``)."""

import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

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
from swarmnet_protocols.net.limits.resources import ResourceManager
from swarmnet_protocols.wire import control_pb2
from swarmnet_protocols.wire.control_pb2 import Empty, FinishRequest, NodeStatus, PauseRequest

MAX_GRACE_S = 24 * 3600.0
MAX_PAUSE_S = 10 * 365 * 24 * 3600.0
"""Longest pause for a time, ten years. A longer time is probably a typing error."""
_ANSWER_TIMEOUT_S = 5.0
_SERVICE = control_pb2.DESCRIPTOR.services_by_name["Control"]
_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT: ConfigError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OutOfResources,
}


class Watched(Protocol):
    """The peer of a command that runs for long. Its owner watches and stops it."""

    @property
    def resources(self) -> ResourceManager:
        """Resources that other peers hold here."""

    def status(self) -> NodeStatus: ...

    def finish(self, grace_s: float) -> None: ...


@runtime_checkable
class Controlled(Watched, Protocol):
    """The node or worker that the owner controls."""

    def pause(self, for_s: float = ...) -> None: ...

    def resume(self) -> None: ...

    def limits(self) -> OwnerLimits: ...

    def set_limits(self, limits: OwnerLimits) -> None:
        """Raises ``SwarmnetError`` for limits that the node cannot keep. The old limits then
        stay."""


@asynccontextmanager
async def serve(peer: Watched, data_dir: Path) -> AsyncIterator[None]:
    """Let the owner watch ``peer``, and control it if it is a node, while the context is open.

    The caller holds the lock of ``data_dir``.
    """

    async def answer_status(_request: Empty, _context: object) -> NodeStatus:
        return peer.status()

    async def answer_finish(request: FinishRequest, context: Any) -> Empty:
        if not _is_possible(request.grace_s):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, json.dumps(["grace_s is out of range", ""]))
        peer.finish(request.grace_s)
        return Empty()

    answers: dict[str, Callable[..., Any]] = {"Status": answer_status, "Finish": answer_finish}
    if isinstance(peer, Controlled):
        answers |= _control(peer)
    methods = {name: _method(name, answers.get(name, _refuse)) for name in _SERVICE.methods_by_name}
    async with serving(grpc.method_handlers_generic_handler(_SERVICE.full_name, methods), data_dir):
        yield


async def _refuse(_request: object, context: Any) -> None:
    reasons = [
        "this command neither hosts nor trains: it cannot pause or change its limits",
        "stop it: swarmnet finish",
    ]
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, json.dumps(reasons))


def _control(node: Controlled) -> Mapping[str, Callable[..., Any]]:
    """Return the answers of a node to commands about pauses and limits."""

    async def answer_pause(request: PauseRequest, context: Any) -> Empty:
        if not _is_possible(request.for_s, MAX_PAUSE_S):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, json.dumps(["for_s is out of range", ""]))
        node.pause(request.for_s or math.inf)
        return Empty()

    async def answer_resume(_request: Empty, _context: object) -> Empty:
        node.resume()
        return Empty()

    async def answer_limits(_request: Empty, _context: object) -> control_pb2.Limits:
        return control_pb2.Limits(json=node.limits().to_json())

    async def answer_set_limits(request: control_pb2.Limits, context: Any) -> control_pb2.Limits:
        try:
            node.set_limits(OwnerLimits.from_json(request.json))
        except SwarmnetError as error:
            code = grpc.StatusCode.INVALID_ARGUMENT
            if isinstance(error, OutOfResources):
                code = grpc.StatusCode.RESOURCE_EXHAUSTED
            await context.abort(code, json.dumps([str(error), error.hint]))
        return control_pb2.Limits(json=node.limits().to_json())

    return {
        "Pause": answer_pause,
        "Resume": answer_resume,
        "GetLimits": answer_limits,
        "SetLimits": answer_set_limits,
    }


def status(data_dir: Path) -> NodeStatus:
    """Return the status of the command that runs in ``data_dir``. Raises ``Unreachable`` if none
    does."""
    found: NodeStatus = _call(data_dir, "Status", Empty())
    return found


def finish(data_dir: Path, grace_s: float) -> None:
    """Tell the command in ``data_dir`` to stop within ``grace_s``. Returns at once.

    Raises ``ConfigError`` for a grace out of range, and ``Unreachable`` if none runs there.
    """
    if not _is_possible(grace_s):
        raise ConfigError(
            f"a grace of {grace_s} s is not possible", hint=f"choose 0 to {MAX_GRACE_S:.0f} seconds"
        )
    _call(data_dir, "Finish", FinishRequest(grace_s=grace_s))


def pause(data_dir: Path, for_s: float = 0.0) -> None:
    """Have the node in ``data_dir`` free its memory for this long; 0: until ``resume``. Returns at
    once.

    Raises ``ConfigError`` for a time out of range, and ``Unreachable`` without a node.
    """
    _call(data_dir, "Pause", PauseRequest(for_s=for_s))


def resume(data_dir: Path) -> None:
    """End ``pause``. Returns at once.

    Without a node, or while it restarts for the pause, end the stored pause. Raises ``Unreachable``
    without a node and a pause.
    """
    try:
        _call(data_dir, "Resume", Empty())
    except Unreachable as error:
        from swarmnet_node.owner.machine import PAUSE_NAME

        try:
            (data_dir / PAUSE_NAME).unlink()
        except OSError:  # there is no pause
            raise error from None


def get_limits(data_dir: Path) -> OwnerLimits:
    """Return the limits of the node in ``data_dir``. Raises ``Unreachable`` without a node."""
    return OwnerLimits.from_json(_call(data_dir, "GetLimits", Empty()).json)


def set_limits(data_dir: Path, limits: OwnerLimits) -> OwnerLimits:
    """Replace all limits of the node in ``data_dir``, now and after restarts.

    Returns the limits in force. Raises ``ConfigError`` or ``OutOfResources`` if the node cannot
    keep them; the old limits then stay. Raises ``Unreachable`` without a node.
    """
    request = control_pb2.Limits(json=limits.to_json())
    return OwnerLimits.from_json(_call(data_dir, "SetLimits", request).json)


def _is_possible(seconds: float, most_s: float = MAX_GRACE_S) -> bool:
    return math.isfinite(seconds) and 0 <= seconds <= most_s


def _method(name: str, answer: Callable[..., Any]) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=GetMessageClass(_SERVICE.methods_by_name[name].input_type).FromString,
        response_serializer=_serialize,
    )


def _call(data_dir: Path, method: str, request: Message) -> Any:
    no_node = Unreachable(
        f"nothing is running in {data_dir}",
        hint="start a node with `swarmnet join SWARM`, or name the directory of a running command with --data-dir; a node that downloads its model does not answer yet",
    )
    with dialling(data_dir) as found:
        if found is None:
            raise no_node
        channel, token = found
        call = channel.unary_unary(
            f"/{_SERVICE.full_name}/{method}",
            request_serializer=_serialize,
            response_deserializer=GetMessageClass(_SERVICE.methods_by_name[method].output_type).FromString,
        )
        try:
            return call(request, timeout=_ANSWER_TIMEOUT_S, metadata=token)
        except grpc.RpcError as error:
            raise _explain(error, data_dir, no_node) from error


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


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
