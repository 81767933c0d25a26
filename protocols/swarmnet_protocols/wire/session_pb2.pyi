from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_INT8_BLOCKS: _ClassVar[DType]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_BFLOAT16: DType
DTYPE_FLOAT16: DType
DTYPE_INT8_BLOCKS: DType

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("id", "record", "session")
    ID_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    id: str
    record: bytes
    session: bytes
    def __init__(self, id: _Optional[str] = ..., record: _Optional[bytes] = ..., session: _Optional[bytes] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("open", "relink", "heartbeat", "show", "resume", "tee")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RELINK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    SHOW_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    TEE_FIELD_NUMBER: _ClassVar[int]
    open: Open
    relink: Relink
    heartbeat: Heartbeat
    show: Show
    resume: Resume
    tee: Tee
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., relink: _Optional[_Union[Relink, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., show: _Optional[_Union[Show, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., tee: _Optional[_Union[Tee, _Mapping]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("session", "epoch", "manifest", "span", "next", "wire", "max_length", "swarm", "adapter", "standby", "timed", "spare", "continues", "batch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SWARM_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    TIMED_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    epoch: int
    manifest: bytes
    span: Span
    next: Peer
    wire: DType
    max_length: int
    swarm: bytes
    adapter: bytes
    standby: bool
    timed: bool
    spare: bool
    continues: bool
    batch: bool
    def __init__(self, session: _Optional[bytes] = ..., epoch: _Optional[int] = ..., manifest: _Optional[bytes] = ..., span: _Optional[_Union[Span, _Mapping]] = ..., next: _Optional[_Union[Peer, _Mapping]] = ..., wire: _Optional[_Union[DType, str]] = ..., max_length: _Optional[int] = ..., swarm: _Optional[bytes] = ..., adapter: _Optional[bytes] = ..., standby: _Optional[bool] = ..., timed: _Optional[bool] = ..., spare: _Optional[bool] = ..., continues: _Optional[bool] = ..., batch: _Optional[bool] = ...) -> None: ...

class Relink(_message.Message):
    __slots__ = ("epoch", "next", "needed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    next: Peer
    needed: Sequences
    def __init__(self, epoch: _Optional[int] = ..., next: _Optional[_Union[Peer, _Mapping]] = ..., needed: _Optional[_Union[Sequences, _Mapping]] = ...) -> None: ...

class Sequences(_message.Message):
    __slots__ = ("numbers",)
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class Tee(_message.Message):
    __slots__ = ("epoch", "standby")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    standby: Peer
    def __init__(self, epoch: _Optional[int] = ..., standby: _Optional[_Union[Peer, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("applied",)
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    applied: int
    def __init__(self, applied: _Optional[int] = ...) -> None: ...

class Show(_message.Message):
    __slots__ = ("sequence", "count")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    count: int
    def __init__(self, sequence: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("opened", "output", "heartbeat", "link_lost", "leaving", "shown", "moved", "link_made", "timed")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LINK_LOST_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    LINK_MADE_FIELD_NUMBER: _ClassVar[int]
    TIMED_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    output: Output
    heartbeat: Heartbeat
    link_lost: LinkLost
    leaving: Leaving
    shown: Shown
    moved: Moved
    link_made: LinkMade
    timed: Timed
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., output: _Optional[_Union[Output, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., link_lost: _Optional[_Union[LinkLost, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., shown: _Optional[_Union[Shown, _Mapping]] = ..., moved: _Optional[_Union[Moved, _Mapping]] = ..., link_made: _Optional[_Union[LinkMade, _Mapping]] = ..., timed: _Optional[_Union[Timed, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Moved(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Output(_message.Message):
    __slots__ = ("step", "tensor")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    step: int
    tensor: Tensor
    def __init__(self, step: _Optional[int] = ..., tensor: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Shown(_message.Message):
    __slots__ = ("received", "sent")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    received: bytes
    sent: Tensor
    def __init__(self, received: _Optional[bytes] = ..., sent: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class LinkLost(_message.Message):
    __slots__ = ("epoch", "peer")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    peer: str
    def __init__(self, epoch: _Optional[int] = ..., peer: _Optional[str] = ...) -> None: ...

class LinkMade(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("moves",)
    MOVES_FIELD_NUMBER: _ClassVar[int]
    moves: bool
    def __init__(self, moves: _Optional[bool] = ...) -> None: ...

class Timed(_message.Message):
    __slots__ = ("step", "received_s", "started_s", "computed_s", "taken_s", "encoded_s", "sent_s")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_S_FIELD_NUMBER: _ClassVar[int]
    STARTED_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_S_FIELD_NUMBER: _ClassVar[int]
    TAKEN_S_FIELD_NUMBER: _ClassVar[int]
    ENCODED_S_FIELD_NUMBER: _ClassVar[int]
    SENT_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    received_s: float
    started_s: float
    computed_s: float
    taken_s: float
    encoded_s: float
    sent_s: float
    def __init__(self, step: _Optional[int] = ..., received_s: _Optional[float] = ..., started_s: _Optional[float] = ..., computed_s: _Optional[float] = ..., taken_s: _Optional[float] = ..., encoded_s: _Optional[float] = ..., sent_s: _Optional[float] = ...) -> None: ...

class LinkRequest(_message.Message):
    __slots__ = ("link", "step")
    LINK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    link: Link
    step: Step
    def __init__(self, link: _Optional[_Union[Link, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("session", "epoch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    epoch: int
    def __init__(self, session: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class LinkReply(_message.Message):
    __slots__ = ("linked", "heartbeat")
    LINKED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    linked: Linked
    heartbeat: Heartbeat
    def __init__(self, linked: _Optional[_Union[Linked, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Linked(_message.Message):
    __slots__ = ("applied",)
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    applied: int
    def __init__(self, applied: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("seq", "acked", "replay", "rows", "tensor")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    seq: int
    acked: int
    replay: bool
    rows: _containers.RepeatedCompositeFieldContainer[Row]
    tensor: Tensor
    def __init__(self, seq: _Optional[int] = ..., acked: _Optional[int] = ..., replay: _Optional[bool] = ..., rows: _Optional[_Iterable[_Union[Row, _Mapping]]] = ..., tensor: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Row(_message.Message):
    __slots__ = ("sequence", "start", "count", "outputs", "source", "rewrite", "first")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REWRITE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    start: int
    count: int
    outputs: int
    source: int
    rewrite: bool
    first: int
    def __init__(self, sequence: _Optional[int] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., outputs: _Optional[int] = ..., source: _Optional[int] = ..., rewrite: _Optional[bool] = ..., first: _Optional[int] = ...) -> None: ...

class PassRequest(_message.Message):
    __slots__ = ("begin", "part")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    begin: Begin
    part: Part
    def __init__(self, begin: _Optional[_Union[Begin, _Mapping]] = ..., part: _Optional[_Union[Part, _Mapping]] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("swarm", "manifest", "span", "counts", "backward", "wire", "adapter", "graph")
    SWARM_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    swarm: bytes
    manifest: bytes
    span: Span
    counts: _containers.RepeatedScalarFieldContainer[int]
    backward: bool
    wire: DType
    adapter: bytes
    graph: bytes
    def __init__(self, swarm: _Optional[bytes] = ..., manifest: _Optional[bytes] = ..., span: _Optional[_Union[Span, _Mapping]] = ..., counts: _Optional[_Iterable[int]] = ..., backward: _Optional[bool] = ..., wire: _Optional[_Union[DType, str]] = ..., adapter: _Optional[bytes] = ..., graph: _Optional[bytes] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("tensor",)
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    tensor: Tensor
    def __init__(self, tensor: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class PassReply(_message.Message):
    __slots__ = ("part", "heartbeat")
    PART_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    part: Part
    heartbeat: Heartbeat
    def __init__(self, part: _Optional[_Union[Part, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class AdapterRequest(_message.Message):
    __slots__ = ("upload", "chunk")
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    upload: Upload
    chunk: Chunk
    def __init__(self, upload: _Optional[_Union[Upload, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class Upload(_message.Message):
    __slots__ = ("swarm", "manifest", "span", "adapter", "size_bytes")
    SWARM_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    swarm: bytes
    manifest: bytes
    span: Span
    adapter: bytes
    size_bytes: int
    def __init__(self, swarm: _Optional[bytes] = ..., manifest: _Optional[bytes] = ..., span: _Optional[_Union[Span, _Mapping]] = ..., adapter: _Optional[bytes] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdapterReply(_message.Message):
    __slots__ = ("wanted", "stored", "heartbeat")
    WANTED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    wanted: Wanted
    stored: Stored
    heartbeat: Heartbeat
    def __init__(self, wanted: _Optional[_Union[Wanted, _Mapping]] = ..., stored: _Optional[_Union[Stored, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Wanted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stored(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExpertsRequest(_message.Message):
    __slots__ = ("attach", "rows", "rearrange")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    REARRANGE_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    rows: Rows
    rearrange: Rearrange
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ..., rows: _Optional[_Union[Rows, _Mapping]] = ..., rearrange: _Optional[_Union[Rearrange, _Mapping]] = ...) -> None: ...

class Rearrange(_message.Message):
    __slots__ = ("loads", "drops")
    LOADS_FIELD_NUMBER: _ClassVar[int]
    DROPS_FIELD_NUMBER: _ClassVar[int]
    loads: _containers.RepeatedCompositeFieldContainer[ExpertSet]
    drops: _containers.RepeatedCompositeFieldContainer[ExpertSet]
    def __init__(self, loads: _Optional[_Iterable[_Union[ExpertSet, _Mapping]]] = ..., drops: _Optional[_Iterable[_Union[ExpertSet, _Mapping]]] = ...) -> None: ...

class ExpertSet(_message.Message):
    __slots__ = ("block", "experts")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    block: int
    experts: bytes
    def __init__(self, block: _Optional[int] = ..., experts: _Optional[bytes] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("swarm", "manifest")
    SWARM_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    swarm: bytes
    manifest: bytes
    def __init__(self, swarm: _Optional[bytes] = ..., manifest: _Optional[bytes] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("id", "block", "tensor", "experts")
    ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    id: int
    block: int
    tensor: Tensor
    experts: _containers.RepeatedCompositeFieldContainer[ExpertRows]
    def __init__(self, id: _Optional[int] = ..., block: _Optional[int] = ..., tensor: _Optional[_Union[Tensor, _Mapping]] = ..., experts: _Optional[_Iterable[_Union[ExpertRows, _Mapping]]] = ...) -> None: ...

class ExpertRows(_message.Message):
    __slots__ = ("expert", "rows")
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    expert: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, expert: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class ExpertsReply(_message.Message):
    __slots__ = ("attached", "computed", "heartbeat")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    computed: Computed
    heartbeat: Heartbeat
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., computed: _Optional[_Union[Computed, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("experts", "leaving")
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    experts: _containers.RepeatedCompositeFieldContainer[ExpertSet]
    leaving: bool
    def __init__(self, experts: _Optional[_Iterable[_Union[ExpertSet, _Mapping]]] = ..., leaving: _Optional[bool] = ...) -> None: ...

class Computed(_message.Message):
    __slots__ = ("id", "tensor")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    id: int
    tensor: Tensor
    def __init__(self, id: _Optional[int] = ..., tensor: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce", "queue_s", "sessions", "cache_free", "coordinate", "busy", "manifest", "start", "end")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FREE_FIELD_NUMBER: _ClassVar[int]
    COORDINATE_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    queue_s: float
    sessions: int
    cache_free: float
    coordinate: _containers.RepeatedScalarFieldContainer[float]
    busy: float
    manifest: bytes
    start: int
    end: int
    def __init__(self, nonce: _Optional[int] = ..., queue_s: _Optional[float] = ..., sessions: _Optional[int] = ..., cache_free: _Optional[float] = ..., coordinate: _Optional[_Iterable[float]] = ..., busy: _Optional[float] = ..., manifest: _Optional[bytes] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...
