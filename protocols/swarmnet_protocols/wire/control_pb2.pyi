from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("peer_id", "state", "model", "manifest", "start", "end", "total_blocks", "addresses", "uptime_s", "sessions", "cache_bytes", "cache_bytes_limit", "weight_bytes", "tokens", "forwards", "version", "swarm")
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
    def __init__(self, peer_id: _Optional[str] = ..., state: _Optional[str] = ..., model: _Optional[str] = ..., manifest: _Optional[bytes] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., total_blocks: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., uptime_s: _Optional[float] = ..., sessions: _Optional[int] = ..., cache_bytes: _Optional[int] = ..., cache_bytes_limit: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., tokens: _Optional[int] = ..., forwards: _Optional[int] = ..., version: _Optional[str] = ..., swarm: _Optional[str] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("grace_s",)
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    def __init__(self, grace_s: _Optional[float] = ...) -> None: ...

class FinishReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
