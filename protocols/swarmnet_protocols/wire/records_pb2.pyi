from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HostState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOST_STATE_UNSPECIFIED: _ClassVar[HostState]
    HOST_STATE_JOINING: _ClassVar[HostState]
    HOST_STATE_ONLINE: _ClassVar[HostState]
    HOST_STATE_LEAVING: _ClassVar[HostState]
    HOST_STATE_CHOOSING: _ClassVar[HostState]
    HOST_STATE_PAUSED: _ClassVar[HostState]

class Nat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NAT_UNKNOWN: _ClassVar[Nat]
    NAT_NONE: _ClassVar[Nat]
    NAT_CONE: _ClassVar[Nat]
    NAT_SYMMETRIC: _ClassVar[Nat]
HOST_STATE_UNSPECIFIED: HostState
HOST_STATE_JOINING: HostState
HOST_STATE_ONLINE: HostState
HOST_STATE_LEAVING: HostState
HOST_STATE_CHOOSING: HostState
HOST_STATE_PAUSED: HostState
NAT_UNKNOWN: Nat
NAT_NONE: Nat
NAT_CONE: Nat
NAT_SYMMETRIC: Nat

class SignedRecord(_message.Message):
    __slots__ = ("swarm", "topic", "signer", "sequence", "expires_at_ms", "body", "signature", "certificate")
    SWARM_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SIGNER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    swarm: bytes
    topic: str
    signer: bytes
    sequence: int
    expires_at_ms: int
    body: bytes
    signature: bytes
    certificate: bytes
    def __init__(self, swarm: _Optional[bytes] = ..., topic: _Optional[str] = ..., signer: _Optional[bytes] = ..., sequence: _Optional[int] = ..., expires_at_ms: _Optional[int] = ..., body: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., certificate: _Optional[bytes] = ...) -> None: ...

class HostRecord(_message.Message):
    __slots__ = ("manifest", "start", "end", "state", "version", "protocol", "step_s", "token_s", "cache_bytes_free", "sessions", "addresses", "public_name", "nat", "precision", "arithmetic", "coordinate", "next_start", "next_end", "stays", "missing_experts", "may_switch", "load", "room")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FREE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_NAME_FIELD_NUMBER: _ClassVar[int]
    NAT_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    COORDINATE_FIELD_NUMBER: _ClassVar[int]
    NEXT_START_FIELD_NUMBER: _ClassVar[int]
    NEXT_END_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    MISSING_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    MAY_SWITCH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    start: int
    end: int
    state: HostState
    version: str
    protocol: int
    step_s: float
    token_s: float
    cache_bytes_free: int
    sessions: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    public_name: str
    nat: Nat
    precision: str
    arithmetic: str
    coordinate: _containers.RepeatedScalarFieldContainer[float]
    next_start: int
    next_end: int
    stays: bool
    missing_experts: str
    may_switch: bool
    load: float
    room: int
    def __init__(self, manifest: _Optional[bytes] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., state: _Optional[_Union[HostState, str]] = ..., version: _Optional[str] = ..., protocol: _Optional[int] = ..., step_s: _Optional[float] = ..., token_s: _Optional[float] = ..., cache_bytes_free: _Optional[int] = ..., sessions: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., public_name: _Optional[str] = ..., nat: _Optional[_Union[Nat, str]] = ..., precision: _Optional[str] = ..., arithmetic: _Optional[str] = ..., coordinate: _Optional[_Iterable[float]] = ..., next_start: _Optional[int] = ..., next_end: _Optional[int] = ..., stays: _Optional[bool] = ..., missing_experts: _Optional[str] = ..., may_switch: _Optional[bool] = ..., load: _Optional[float] = ..., room: _Optional[int] = ...) -> None: ...

class ExpertsRecord(_message.Message):
    __slots__ = ("manifest", "state", "protocol", "blocks", "addresses", "version", "public_name", "precision", "row_s", "capacity")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_NAME_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    ROW_S_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    state: HostState
    protocol: int
    blocks: _containers.RepeatedCompositeFieldContainer[BlockExperts]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    version: str
    public_name: str
    precision: str
    row_s: float
    capacity: int
    def __init__(self, manifest: _Optional[bytes] = ..., state: _Optional[_Union[HostState, str]] = ..., protocol: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[BlockExperts, _Mapping]]] = ..., addresses: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ..., public_name: _Optional[str] = ..., precision: _Optional[str] = ..., row_s: _Optional[float] = ..., capacity: _Optional[int] = ...) -> None: ...

class BlockExperts(_message.Message):
    __slots__ = ("block", "experts")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    block: int
    experts: bytes
    def __init__(self, block: _Optional[int] = ..., experts: _Optional[bytes] = ...) -> None: ...

class CatalogRecord(_message.Message):
    __slots__ = ("model", "job", "made")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    model: CatalogModel
    job: CatalogJob
    made: _containers.RepeatedCompositeFieldContainer[CatalogJob]
    def __init__(self, model: _Optional[_Union[CatalogModel, _Mapping]] = ..., job: _Optional[_Union[CatalogJob, _Mapping]] = ..., made: _Optional[_Iterable[_Union[CatalogJob, _Mapping]]] = ...) -> None: ...

class CatalogModel(_message.Message):
    __slots__ = ("manifest", "name", "blocks", "context", "size_bytes")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    name: str
    blocks: int
    context: int
    size_bytes: int
    def __init__(self, manifest: _Optional[bytes] = ..., name: _Optional[str] = ..., blocks: _Optional[int] = ..., context: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class CatalogJob(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    def __init__(self, id: _Optional[bytes] = ...) -> None: ...

class ProcessRecord(_message.Message):
    __slots__ = ("addresses", "number")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    number: int
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., number: _Optional[int] = ...) -> None: ...

class ContactRecord(_message.Message):
    __slots__ = ("addresses",)
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class RelayRecord(_message.Message):
    __slots__ = ("addresses",)
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class WithContacts(_message.Message):
    __slots__ = ("contacts",)
    CONTACTS_FIELD_NUMBER: _ClassVar[int]
    contacts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, contacts: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("keys", "most", "start", "end")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    most: int
    start: int
    end: int
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., most: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class SampleReply(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    def __init__(self, samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, records: _Optional[_Iterable[bytes]] = ...) -> None: ...
