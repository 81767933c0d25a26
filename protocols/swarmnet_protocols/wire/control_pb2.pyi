from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("peer_id", "state", "model", "manifest", "start", "end", "total_blocks", "addresses", "uptime_s", "sessions", "cache_bytes", "cache_bytes_limit", "weight_bytes", "tokens", "forwards", "version", "swarm", "reason", "limits", "usage", "ram_bytes", "warning", "reach", "blocks_reason", "refused_stores", "moved_from", "moving_to", "experts", "expert_rows", "expert_streams", "trunk", "experts_needed", "expert_hit_rate", "expert_prediction_rate", "former_model", "model_reason", "switching_to")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_LIMIT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
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
    MOVING_TO_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_ROWS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_STREAMS_FIELD_NUMBER: _ClassVar[int]
    TRUNK_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_NEEDED_FIELD_NUMBER: _ClassVar[int]
    EXPERT_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_PREDICTION_RATE_FIELD_NUMBER: _ClassVar[int]
    FORMER_MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REASON_FIELD_NUMBER: _ClassVar[int]
    SWITCHING_TO_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    state: str
    model: str
    manifest: bytes
    start: int
    end: int
    total_blocks: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    uptime_s: float
    sessions: int
    cache_bytes: int
    cache_bytes_limit: int
    weight_bytes: int
    tokens: int
    forwards: int
    version: str
    swarm: str
    reason: str
    limits: Limits
    usage: Usage
    ram_bytes: int
    warning: str
    reach: Reach
    blocks_reason: str
    refused_stores: int
    moved_from: _containers.RepeatedScalarFieldContainer[int]
    moving_to: _containers.RepeatedScalarFieldContainer[int]
    experts: str
    expert_rows: int
    expert_streams: int
    trunk: Trunk
    experts_needed: int
    expert_hit_rate: float
    expert_prediction_rate: float
    former_model: str
    model_reason: str
    switching_to: str
    def __init__(self, peer_id: _Optional[str] = ..., state: _Optional[str] = ..., model: _Optional[str] = ..., manifest: _Optional[bytes] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., total_blocks: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., uptime_s: _Optional[float] = ..., sessions: _Optional[int] = ..., cache_bytes: _Optional[int] = ..., cache_bytes_limit: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., tokens: _Optional[int] = ..., forwards: _Optional[int] = ..., version: _Optional[str] = ..., swarm: _Optional[str] = ..., reason: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., ram_bytes: _Optional[int] = ..., warning: _Optional[str] = ..., reach: _Optional[_Union[Reach, _Mapping]] = ..., blocks_reason: _Optional[str] = ..., refused_stores: _Optional[int] = ..., moved_from: _Optional[_Iterable[int]] = ..., moving_to: _Optional[_Iterable[int]] = ..., experts: _Optional[str] = ..., expert_rows: _Optional[int] = ..., expert_streams: _Optional[int] = ..., trunk: _Optional[_Union[Trunk, _Mapping]] = ..., experts_needed: _Optional[int] = ..., expert_hit_rate: _Optional[float] = ..., expert_prediction_rate: _Optional[float] = ..., former_model: _Optional[str] = ..., model_reason: _Optional[str] = ..., switching_to: _Optional[str] = ...) -> None: ...

class Trunk(_message.Message):
    __slots__ = ("lacks", "missing", "missing_experts", "round_trips_s", "far", "rows", "failed", "hedged", "loaded")
    LACKS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    MISSING_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIPS_S_FIELD_NUMBER: _ClassVar[int]
    FAR_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HEDGED_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    lacks: str
    missing: str
    missing_experts: int
    round_trips_s: _containers.RepeatedScalarFieldContainer[float]
    far: int
    rows: int
    failed: int
    hedged: int
    loaded: int
    def __init__(self, lacks: _Optional[str] = ..., missing: _Optional[str] = ..., missing_experts: _Optional[int] = ..., round_trips_s: _Optional[_Iterable[float]] = ..., far: _Optional[int] = ..., rows: _Optional[int] = ..., failed: _Optional[int] = ..., hedged: _Optional[int] = ..., loaded: _Optional[int] = ...) -> None: ...

class Reach(_message.Message):
    __slots__ = ("kind", "nat", "relays", "punched", "not_punched", "punch_s", "circuits", "reservations", "forwarded_circuits", "forwarded_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAT_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    PUNCHED_FIELD_NUMBER: _ClassVar[int]
    NOT_PUNCHED_FIELD_NUMBER: _ClassVar[int]
    PUNCH_S_FIELD_NUMBER: _ClassVar[int]
    CIRCUITS_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_CIRCUITS_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    nat: str
    relays: _containers.RepeatedScalarFieldContainer[str]
    punched: int
    not_punched: int
    punch_s: float
    circuits: int
    reservations: int
    forwarded_circuits: int
    forwarded_bytes: int
    def __init__(self, kind: _Optional[str] = ..., nat: _Optional[str] = ..., relays: _Optional[_Iterable[str]] = ..., punched: _Optional[int] = ..., not_punched: _Optional[int] = ..., punch_s: _Optional[float] = ..., circuits: _Optional[int] = ..., reservations: _Optional[int] = ..., forwarded_circuits: _Optional[int] = ..., forwarded_bytes: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_ram_bytes", "max_gpu_mem", "up_bytes_per_s", "down_bytes_per_s", "monthly_bytes", "schedule", "idle_only", "idle_after_s", "no_battery", "cores", "relay_bytes_per_s")
    MAX_RAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_GPU_MEM_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MONTHLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    IDLE_ONLY_FIELD_NUMBER: _ClassVar[int]
    IDLE_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    NO_BATTERY_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    RELAY_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    max_ram_bytes: int
    max_gpu_mem: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    monthly_bytes: int
    schedule: str
    idle_only: bool
    idle_after_s: float
    no_battery: bool
    cores: int
    relay_bytes_per_s: float
    def __init__(self, max_ram_bytes: _Optional[int] = ..., max_gpu_mem: _Optional[float] = ..., up_bytes_per_s: _Optional[float] = ..., down_bytes_per_s: _Optional[float] = ..., monthly_bytes: _Optional[int] = ..., schedule: _Optional[str] = ..., idle_only: _Optional[bool] = ..., idle_after_s: _Optional[float] = ..., no_battery: _Optional[bool] = ..., cores: _Optional[int] = ..., relay_bytes_per_s: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("month", "up_bytes", "down_bytes")
    MONTH_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_FIELD_NUMBER: _ClassVar[int]
    month: str
    up_bytes: int
    down_bytes: int
    def __init__(self, month: _Optional[str] = ..., up_bytes: _Optional[int] = ..., down_bytes: _Optional[int] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("grace_s",)
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    def __init__(self, grace_s: _Optional[float] = ...) -> None: ...

class FinishReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLimitsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
