from swarmnet_protocols.wire import report_pb2 as _report_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("peer_id", "state", "model", "host", "addresses", "uptime_s", "weight_bytes", "version", "swarm", "reason", "limits", "usage", "ram_bytes", "warning", "reach", "blocks_reason", "refused_stores", "moved_from", "experts_needed", "expert_hit_rate", "expert_prediction_rate", "former_model", "model_reason", "switching_to", "given", "paused_until", "public_name", "command", "known_peers", "worker", "url", "kernels", "volunteers")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SWARM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    RAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_REASON_FIELD_NUMBER: _ClassVar[int]
    REFUSED_STORES_FIELD_NUMBER: _ClassVar[int]
    MOVED_FROM_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_NEEDED_FIELD_NUMBER: _ClassVar[int]
    EXPERT_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_PREDICTION_RATE_FIELD_NUMBER: _ClassVar[int]
    FORMER_MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REASON_FIELD_NUMBER: _ClassVar[int]
    SWITCHING_TO_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    PAUSED_UNTIL_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_NAME_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    KNOWN_PEERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    VOLUNTEERS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    state: str
    model: str
    host: _report_pb2.HostReport
    addresses: _containers.RepeatedScalarFieldContainer[str]
    uptime_s: float
    weight_bytes: int
    version: str
    swarm: str
    reason: str
    limits: Limits
    usage: Usage
    ram_bytes: int
    warning: str
    reach: _report_pb2.Reach
    blocks_reason: str
    refused_stores: int
    moved_from: _containers.RepeatedScalarFieldContainer[int]
    experts_needed: int
    expert_hit_rate: float
    expert_prediction_rate: float
    former_model: str
    model_reason: str
    switching_to: str
    given: _report_pb2.Given
    paused_until: float
    public_name: str
    command: str
    known_peers: int
    worker: _report_pb2.WorkerReport
    url: str
    kernels: str
    volunteers: str
    def __init__(self, peer_id: _Optional[str] = ..., state: _Optional[str] = ..., model: _Optional[str] = ..., host: _Optional[_Union[_report_pb2.HostReport, _Mapping]] = ..., addresses: _Optional[_Iterable[str]] = ..., uptime_s: _Optional[float] = ..., weight_bytes: _Optional[int] = ..., version: _Optional[str] = ..., swarm: _Optional[str] = ..., reason: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., ram_bytes: _Optional[int] = ..., warning: _Optional[str] = ..., reach: _Optional[_Union[_report_pb2.Reach, _Mapping]] = ..., blocks_reason: _Optional[str] = ..., refused_stores: _Optional[int] = ..., moved_from: _Optional[_Iterable[int]] = ..., experts_needed: _Optional[int] = ..., expert_hit_rate: _Optional[float] = ..., expert_prediction_rate: _Optional[float] = ..., former_model: _Optional[str] = ..., model_reason: _Optional[str] = ..., switching_to: _Optional[str] = ..., given: _Optional[_Union[_report_pb2.Given, _Mapping]] = ..., paused_until: _Optional[float] = ..., public_name: _Optional[str] = ..., command: _Optional[str] = ..., known_peers: _Optional[int] = ..., worker: _Optional[_Union[_report_pb2.WorkerReport, _Mapping]] = ..., url: _Optional[str] = ..., kernels: _Optional[str] = ..., volunteers: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("month", "up_bytes", "down_bytes")
    MONTH_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_FIELD_NUMBER: _ClassVar[int]
    month: str
    up_bytes: int
    down_bytes: int
    def __init__(self, month: _Optional[str] = ..., up_bytes: _Optional[int] = ..., down_bytes: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("for_s",)
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    for_s: float
    def __init__(self, for_s: _Optional[float] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("grace_s",)
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    def __init__(self, grace_s: _Optional[float] = ...) -> None: ...
