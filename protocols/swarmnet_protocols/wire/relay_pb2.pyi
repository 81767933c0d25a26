from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RelayRequest(_message.Message):
    __slots__ = ("reserve", "connect", "heartbeat", "accept")
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    reserve: Reserve
    connect: Connect
    heartbeat: Heartbeat
    accept: Accept
    def __init__(self, reserve: _Optional[_Union[Reserve, _Mapping]] = ..., connect: _Optional[_Union[Connect, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., accept: _Optional[_Union[Accept, _Mapping]] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Connect(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: str
    def __init__(self, peer: _Optional[str] = ...) -> None: ...

class Accept(_message.Message):
    __slots__ = ("circuit",)
    CIRCUIT_FIELD_NUMBER: _ClassVar[int]
    circuit: bytes
    def __init__(self, circuit: _Optional[bytes] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RelayReply(_message.Message):
    __slots__ = ("accepted", "heartbeat", "incoming")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    INCOMING_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    heartbeat: Heartbeat
    incoming: Incoming
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., incoming: _Optional[_Union[Incoming, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("observed_address",)
    OBSERVED_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    observed_address: str
    def __init__(self, observed_address: _Optional[str] = ...) -> None: ...

class Incoming(_message.Message):
    __slots__ = ("circuit", "source")
    CIRCUIT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    circuit: bytes
    source: str
    def __init__(self, circuit: _Optional[bytes] = ..., source: _Optional[str] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("signature", "is_unsupported")
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    IS_UNSUPPORTED_FIELD_NUMBER: _ClassVar[int]
    signature: bytes
    is_unsupported: bool
    def __init__(self, signature: _Optional[bytes] = ..., is_unsupported: _Optional[bool] = ...) -> None: ...

class PunchRequest(_message.Message):
    __slots__ = ("addresses", "start")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    addresses: PunchAddresses
    start: PunchStart
    def __init__(self, addresses: _Optional[_Union[PunchAddresses, _Mapping]] = ..., start: _Optional[_Union[PunchStart, _Mapping]] = ...) -> None: ...

class PunchAddresses(_message.Message):
    __slots__ = ("addresses", "is_open")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    is_open: bool
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., is_open: _Optional[bool] = ...) -> None: ...

class PunchStart(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PunchReply(_message.Message):
    __slots__ = ("addresses",)
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    addresses: PunchAddresses
    def __init__(self, addresses: _Optional[_Union[PunchAddresses, _Mapping]] = ...) -> None: ...
