from swarmnet_protocols.wire import records_pb2 as _records_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReportRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeReport(_message.Message):
    __slots__ = ("version", "public_name", "uptime_s", "host", "worker", "reach", "given")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_NAME_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    version: str
    public_name: str
    uptime_s: float
    host: HostReport
    worker: WorkerReport
    reach: Reach
    given: Given
    def __init__(self, version: _Optional[str] = ..., public_name: _Optional[str] = ..., uptime_s: _Optional[float] = ..., host: _Optional[_Union[HostReport, _Mapping]] = ..., worker: _Optional[_Union[WorkerReport, _Mapping]] = ..., reach: _Optional[_Union[Reach, _Mapping]] = ..., given: _Optional[_Union[Given, _Mapping]] = ...) -> None: ...

class Given(_message.Message):
    __slots__ = ("block_positions", "clients", "samples", "sent_bytes", "received_bytes", "active_s", "kwh", "since")
    BLOCK_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_S_FIELD_NUMBER: _ClassVar[int]
    KWH_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    block_positions: int
    clients: int
    samples: int
    sent_bytes: int
    received_bytes: int
    active_s: float
    kwh: float
    since: float
    def __init__(self, block_positions: _Optional[int] = ..., clients: _Optional[int] = ..., samples: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., active_s: _Optional[float] = ..., kwh: _Optional[float] = ..., since: _Optional[float] = ...) -> None: ...

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

class HostReport(_message.Message):
    __slots__ = ("record", "model", "total_blocks", "queue_s", "cache_bytes", "cache_bytes_limit", "forwards", "positions", "answered", "rebuilt", "links_lost", "clients_lost", "first_tokens", "token_times", "flows", "experts", "expert_streams", "trunk")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_LIMIT_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    REBUILT_FIELD_NUMBER: _ClassVar[int]
    LINKS_LOST_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_LOST_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TIMES_FIELD_NUMBER: _ClassVar[int]
    FLOWS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_STREAMS_FIELD_NUMBER: _ClassVar[int]
    TRUNK_FIELD_NUMBER: _ClassVar[int]
    record: _records_pb2.HostRecord
    model: str
    total_blocks: int
    queue_s: float
    cache_bytes: int
    cache_bytes_limit: int
    forwards: int
    positions: int
    answered: int
    rebuilt: int
    links_lost: int
    clients_lost: int
    first_tokens: Times
    token_times: Times
    flows: _containers.RepeatedCompositeFieldContainer[Flow]
    experts: _containers.RepeatedCompositeFieldContainer[BlockExperts]
    expert_streams: int
    trunk: TrunkReport
    def __init__(self, record: _Optional[_Union[_records_pb2.HostRecord, _Mapping]] = ..., model: _Optional[str] = ..., total_blocks: _Optional[int] = ..., queue_s: _Optional[float] = ..., cache_bytes: _Optional[int] = ..., cache_bytes_limit: _Optional[int] = ..., forwards: _Optional[int] = ..., positions: _Optional[int] = ..., answered: _Optional[int] = ..., rebuilt: _Optional[int] = ..., links_lost: _Optional[int] = ..., clients_lost: _Optional[int] = ..., first_tokens: _Optional[_Union[Times, _Mapping]] = ..., token_times: _Optional[_Union[Times, _Mapping]] = ..., flows: _Optional[_Iterable[_Union[Flow, _Mapping]]] = ..., experts: _Optional[_Iterable[_Union[BlockExperts, _Mapping]]] = ..., expert_streams: _Optional[int] = ..., trunk: _Optional[_Union[TrunkReport, _Mapping]] = ...) -> None: ...

class BlockExperts(_message.Message):
    __slots__ = ("block", "experts", "rows")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    block: int
    experts: bytes
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block: _Optional[int] = ..., experts: _Optional[bytes] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class TrunkReport(_message.Message):
    __slots__ = ("lacks", "missing", "round_trips_s", "far", "rows", "failed", "hedged", "loaded")
    LACKS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIPS_S_FIELD_NUMBER: _ClassVar[int]
    FAR_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HEDGED_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    lacks: _containers.RepeatedCompositeFieldContainer[BlockExperts]
    missing: _containers.RepeatedCompositeFieldContainer[BlockExperts]
    round_trips_s: _containers.RepeatedScalarFieldContainer[float]
    far: int
    rows: int
    failed: int
    hedged: int
    loaded: int
    def __init__(self, lacks: _Optional[_Iterable[_Union[BlockExperts, _Mapping]]] = ..., missing: _Optional[_Iterable[_Union[BlockExperts, _Mapping]]] = ..., round_trips_s: _Optional[_Iterable[float]] = ..., far: _Optional[int] = ..., rows: _Optional[int] = ..., failed: _Optional[int] = ..., hedged: _Optional[int] = ..., loaded: _Optional[int] = ...) -> None: ...

class Times(_message.Message):
    __slots__ = ("counts", "total_s")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    total_s: float
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., total_s: _Optional[float] = ...) -> None: ...

class Flow(_message.Message):
    __slots__ = ("upstream", "downstream", "sessions", "positions")
    UPSTREAM_FIELD_NUMBER: _ClassVar[int]
    DOWNSTREAM_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    upstream: str
    downstream: str
    sessions: int
    positions: int
    def __init__(self, upstream: _Optional[str] = ..., downstream: _Optional[str] = ..., sessions: _Optional[int] = ..., positions: _Optional[int] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("job", "name", "method", "state", "round", "rounds", "loss", "val_loss", "tokens", "bytes_sent", "bytes_received", "contributions", "val_tokens", "waited_for", "waited_why", "waited_s", "recent", "stage")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    VAL_LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    VAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITED_FOR_FIELD_NUMBER: _ClassVar[int]
    WAITED_WHY_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    job: bytes
    name: str
    method: str
    state: str
    round: int
    rounds: int
    loss: float
    val_loss: float
    tokens: int
    bytes_sent: int
    bytes_received: int
    contributions: _containers.RepeatedCompositeFieldContainer[Contribution]
    val_tokens: int
    waited_for: str
    waited_why: str
    waited_s: float
    recent: RecentWork
    stage: WorkerStage
    def __init__(self, job: _Optional[bytes] = ..., name: _Optional[str] = ..., method: _Optional[str] = ..., state: _Optional[str] = ..., round: _Optional[int] = ..., rounds: _Optional[int] = ..., loss: _Optional[float] = ..., val_loss: _Optional[float] = ..., tokens: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ..., contributions: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ..., val_tokens: _Optional[int] = ..., waited_for: _Optional[str] = ..., waited_why: _Optional[str] = ..., waited_s: _Optional[float] = ..., recent: _Optional[_Union[RecentWork, _Mapping]] = ..., stage: _Optional[_Union[WorkerStage, _Mapping]] = ...) -> None: ...

class RecentWork(_message.Message):
    __slots__ = ("seconds", "compute_s", "tokens", "forward_bytes", "backward_bytes")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    compute_s: float
    tokens: float
    forward_bytes: float
    backward_bytes: float
    def __init__(self, seconds: _Optional[float] = ..., compute_s: _Optional[float] = ..., tokens: _Optional[float] = ..., forward_bytes: _Optional[float] = ..., backward_bytes: _Optional[float] = ...) -> None: ...

class WorkerStage(_message.Message):
    __slots__ = ("number", "start", "end")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    number: int
    start: int
    end: int
    def __init__(self, number: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("peer", "rounds")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    rounds: int
    def __init__(self, peer: _Optional[str] = ..., rounds: _Optional[int] = ...) -> None: ...
