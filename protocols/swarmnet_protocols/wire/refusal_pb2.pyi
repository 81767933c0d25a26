from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_PROTOCOL: _ClassVar[Reason]
    REASON_WRONG_MODEL: _ClassVar[Reason]
    REASON_WRONG_SPAN: _ClassVar[Reason]
    REASON_OUT_OF_RESOURCES: _ClassVar[Reason]
    REASON_TOO_LONG: _ClassVar[Reason]
    REASON_LOG_GONE: _ClassVar[Reason]
    REASON_LEAVING: _ClassVar[Reason]
    REASON_UNKNOWN_SESSION: _ClassVar[Reason]
    REASON_STALE_EPOCH: _ClassVar[Reason]
    REASON_INTERNAL: _ClassVar[Reason]
    REASON_WRONG_SWARM: _ClassVar[Reason]
    REASON_UNKNOWN_ADAPTER: _ClassVar[Reason]
    REASON_GRAPH_GONE: _ClassVar[Reason]
    REASON_IDLE: _ClassVar[Reason]
    REASON_NOT_FINITE: _ClassVar[Reason]
    REASON_NOT_AUTHORISED: _ClassVar[Reason]
    REASON_UNKNOWN_STATE: _ClassVar[Reason]
    REASON_NO_RELAY: _ClassVar[Reason]
    REASON_MISSING_EXPERTS: _ClassVar[Reason]
    REASON_OVERLOADED: _ClassVar[Reason]
    REASON_NOT_RESERVED: _ClassVar[Reason]
REASON_UNSPECIFIED: Reason
REASON_PROTOCOL: Reason
REASON_WRONG_MODEL: Reason
REASON_WRONG_SPAN: Reason
REASON_OUT_OF_RESOURCES: Reason
REASON_TOO_LONG: Reason
REASON_LOG_GONE: Reason
REASON_LEAVING: Reason
REASON_UNKNOWN_SESSION: Reason
REASON_STALE_EPOCH: Reason
REASON_INTERNAL: Reason
REASON_WRONG_SWARM: Reason
REASON_UNKNOWN_ADAPTER: Reason
REASON_GRAPH_GONE: Reason
REASON_IDLE: Reason
REASON_NOT_FINITE: Reason
REASON_NOT_AUTHORISED: Reason
REASON_UNKNOWN_STATE: Reason
REASON_NO_RELAY: Reason
REASON_MISSING_EXPERTS: Reason
REASON_OVERLOADED: Reason
REASON_NOT_RESERVED: Reason

class Refusal(_message.Message):
    __slots__ = ("reason", "detail", "retry_after_s", "time_ms")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    reason: Reason
    detail: str
    retry_after_s: float
    time_ms: int
    def __init__(self, reason: _Optional[_Union[Reason, str]] = ..., detail: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., time_ms: _Optional[int] = ...) -> None: ...
