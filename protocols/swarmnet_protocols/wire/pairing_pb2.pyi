from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PairingRequest(_message.Message):
    __slots__ = ("knock", "attempt", "confirm")
    KNOCK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    knock: Knock
    attempt: bytes
    confirm: bytes
    def __init__(self, knock: _Optional[_Union[Knock, _Mapping]] = ..., attempt: _Optional[bytes] = ..., confirm: _Optional[bytes] = ...) -> None: ...

class Knock(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class PairingReply(_message.Message):
    __slots__ = ("house", "answer", "welcome", "wrong")
    HOUSE_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    WRONG_FIELD_NUMBER: _ClassVar[int]
    house: House
    answer: bytes
    welcome: Welcome
    wrong: Wrong
    def __init__(self, house: _Optional[_Union[House, _Mapping]] = ..., answer: _Optional[bytes] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., wrong: _Optional[_Union[Wrong, _Mapping]] = ...) -> None: ...

class House(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("invite", "proof")
    INVITE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    invite: str
    proof: bytes
    def __init__(self, invite: _Optional[str] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Wrong(_message.Message):
    __slots__ = ("left",)
    LEFT_FIELD_NUMBER: _ClassVar[int]
    left: int
    def __init__(self, left: _Optional[int] = ...) -> None: ...
