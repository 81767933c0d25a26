from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class What(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WHAT_UNSPECIFIED: _ClassVar[What]
    WHAT_DATA: _ClassVar[What]
    WHAT_TABLE: _ClassVar[What]
    WHAT_HELD: _ClassVar[What]
    WHAT_LISTING: _ClassVar[What]
    WHAT_MANIFEST: _ClassVar[What]
WHAT_UNSPECIFIED: What
WHAT_DATA: What
WHAT_TABLE: What
WHAT_HELD: What
WHAT_LISTING: What
WHAT_MANIFEST: What

class WeightsRequest(_message.Message):
    __slots__ = ("manifest", "what", "file", "offset", "length")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    what: What
    file: bytes
    offset: int
    length: int
    def __init__(self, manifest: _Optional[bytes] = ..., what: _Optional[_Union[What, str]] = ..., file: _Optional[bytes] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class WeightsReply(_message.Message):
    __slots__ = ("total_bytes",)
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    def __init__(self, total_bytes: _Optional[int] = ...) -> None: ...
