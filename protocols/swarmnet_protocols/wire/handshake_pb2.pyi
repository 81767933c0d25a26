from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("swarm", "certificate", "serials", "file_serial", "wants_file", "name")
    SWARM_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    SERIALS_FIELD_NUMBER: _ClassVar[int]
    FILE_SERIAL_FIELD_NUMBER: _ClassVar[int]
    WANTS_FILE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    swarm: bytes
    certificate: bytes
    serials: _containers.RepeatedCompositeFieldContainer[Serial]
    file_serial: int
    wants_file: bool
    name: str
    def __init__(self, swarm: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., serials: _Optional[_Iterable[_Union[Serial, _Mapping]]] = ..., file_serial: _Optional[int] = ..., wants_file: _Optional[bool] = ..., name: _Optional[str] = ...) -> None: ...

class SwarmFile(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Serial(_message.Message):
    __slots__ = ("signer", "serial")
    SIGNER_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    signer: bytes
    serial: int
    def __init__(self, signer: _Optional[bytes] = ..., serial: _Optional[int] = ...) -> None: ...

class Revoked(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HandshakeMessage(_message.Message):
    __slots__ = ("hello", "revoked", "swarm_file")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    SWARM_FILE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    revoked: Revoked
    swarm_file: SwarmFile
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., revoked: _Optional[_Union[Revoked, _Mapping]] = ..., swarm_file: _Optional[_Union[SwarmFile, _Mapping]] = ...) -> None: ...

class RevocationsRequest(_message.Message):
    __slots__ = ("serials",)
    SERIALS_FIELD_NUMBER: _ClassVar[int]
    serials: _containers.RepeatedCompositeFieldContainer[Serial]
    def __init__(self, serials: _Optional[_Iterable[_Union[Serial, _Mapping]]] = ...) -> None: ...

class RevocationsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
