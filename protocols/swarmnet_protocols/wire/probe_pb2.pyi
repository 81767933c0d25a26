from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ProbeRequest(_message.Message):
    __slots__ = ("ports",)
    PORTS_FIELD_NUMBER: _ClassVar[int]
    ports: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ports: _Optional[_Iterable[int]] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("now_ms", "observed_ip", "reached")
    NOW_MS_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_IP_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    now_ms: int
    observed_ip: str
    reached: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, now_ms: _Optional[int] = ..., observed_ip: _Optional[str] = ..., reached: _Optional[_Iterable[int]] = ...) -> None: ...
