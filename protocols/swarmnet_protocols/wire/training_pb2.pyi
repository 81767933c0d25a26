from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExchangeRequest(_message.Message):
    __slots__ = ("hello", "prepare", "report", "plan", "propose", "vote", "decided", "accusation", "request_result", "request_contribution", "contribution", "result")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    ACCUSATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_RESULT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    prepare: Prepare
    report: Report
    plan: Plan
    propose: Proposal
    vote: Vote
    decided: Decided
    accusation: Accusation
    request_result: RequestResult
    request_contribution: RequestContribution
    contribution: Contribution
    result: Result
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., propose: _Optional[_Union[Proposal, _Mapping]] = ..., vote: _Optional[_Union[Vote, _Mapping]] = ..., decided: _Optional[_Union[Decided, _Mapping]] = ..., accusation: _Optional[_Union[Accusation, _Mapping]] = ..., request_result: _Optional[_Union[RequestResult, _Mapping]] = ..., request_contribution: _Optional[_Union[RequestContribution, _Mapping]] = ..., contribution: _Optional[_Union[Contribution, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ...) -> None: ...

class ExchangeReply(_message.Message):
    __slots__ = ("heartbeat", "result")
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    heartbeat: Heartbeat
    result: Result
    def __init__(self, heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("exchange_number", "agreement", "between")
    EXCHANGE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    BETWEEN_FIELD_NUMBER: _ClassVar[int]
    exchange_number: int
    agreement: bytes
    between: int
    def __init__(self, exchange_number: _Optional[int] = ..., agreement: _Optional[bytes] = ..., between: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    def __init__(self, attempt: _Optional[int] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("held", "vote")
    HELD_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedCompositeFieldContainer[Held]
    vote: Vote
    def __init__(self, held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., vote: _Optional[_Union[Vote, _Mapping]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("slice", "hash")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    slice: int
    hash: bytes
    def __init__(self, slice: _Optional[int] = ..., hash: _Optional[bytes] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("assignments",)
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    assignments: _containers.RepeatedCompositeFieldContainer[Assignment]
    def __init__(self, assignments: _Optional[_Iterable[_Union[Assignment, _Mapping]]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("reducer", "chosen", "holder")
    REDUCER_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    reducer: int
    chosen: bytes
    holder: int
    def __init__(self, reducer: _Optional[int] = ..., chosen: _Optional[bytes] = ..., holder: _Optional[int] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    def __init__(self, hashes: _Optional[bytes] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("hashes", "signature")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    signature: bytes
    def __init__(self, hashes: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Decided(_message.Message):
    __slots__ = ("hashes", "votes", "signature")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    votes: _containers.RepeatedCompositeFieldContainer[Ballot]
    signature: bytes
    def __init__(self, hashes: _Optional[bytes] = ..., votes: _Optional[_Iterable[_Union[Ballot, _Mapping]]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Accusation(_message.Message):
    __slots__ = ("member", "decided", "votes")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    member: int
    decided: Decided
    votes: _containers.RepeatedCompositeFieldContainer[Vote]
    def __init__(self, member: _Optional[int] = ..., decided: _Optional[_Union[Decided, _Mapping]] = ..., votes: _Optional[_Iterable[_Union[Vote, _Mapping]]] = ...) -> None: ...

class Ballot(_message.Message):
    __slots__ = ("member", "signature")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    member: int
    signature: bytes
    def __init__(self, member: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class RequestResult(_message.Message):
    __slots__ = ("slice", "hash")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    slice: int
    hash: bytes
    def __init__(self, slice: _Optional[int] = ..., hash: _Optional[bytes] = ...) -> None: ...

class RequestContribution(_message.Message):
    __slots__ = ("slice",)
    SLICE_FIELD_NUMBER: _ClassVar[int]
    slice: int
    def __init__(self, slice: _Optional[int] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("slice", "weight", "size_bytes", "offset", "hash", "paced", "signature", "inside")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    PACED_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    INSIDE_FIELD_NUMBER: _ClassVar[int]
    slice: int
    weight: float
    size_bytes: int
    offset: int
    hash: bytes
    paced: bool
    signature: bytes
    inside: int
    def __init__(self, slice: _Optional[int] = ..., weight: _Optional[float] = ..., size_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., hash: _Optional[bytes] = ..., paced: _Optional[bool] = ..., signature: _Optional[bytes] = ..., inside: _Optional[int] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("slice", "size_bytes", "offset", "hash", "summary", "paced")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    PACED_FIELD_NUMBER: _ClassVar[int]
    slice: int
    size_bytes: int
    offset: int
    hash: bytes
    summary: bytes
    paced: bool
    def __init__(self, slice: _Optional[int] = ..., size_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., hash: _Optional[bytes] = ..., summary: _Optional[bytes] = ..., paced: _Optional[bool] = ...) -> None: ...

class Summary(_message.Message):
    __slots__ = ("exchange_number", "slice", "contributors", "excluded", "inside")
    EXCHANGE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    INSIDE_FIELD_NUMBER: _ClassVar[int]
    exchange_number: int
    slice: int
    contributors: _containers.RepeatedCompositeFieldContainer[Contributor]
    excluded: _containers.RepeatedCompositeFieldContainer[Exclusion]
    inside: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, exchange_number: _Optional[int] = ..., slice: _Optional[int] = ..., contributors: _Optional[_Iterable[_Union[Contributor, _Mapping]]] = ..., excluded: _Optional[_Iterable[_Union[Exclusion, _Mapping]]] = ..., inside: _Optional[_Iterable[int]] = ...) -> None: ...

class Contributor(_message.Message):
    __slots__ = ("member", "weight", "hash", "signature", "inside")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    INSIDE_FIELD_NUMBER: _ClassVar[int]
    member: int
    weight: float
    hash: bytes
    signature: bytes
    inside: int
    def __init__(self, member: _Optional[int] = ..., weight: _Optional[float] = ..., hash: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., inside: _Optional[int] = ...) -> None: ...

class Exclusion(_message.Message):
    __slots__ = ("member", "reason")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    member: int
    reason: str
    def __init__(self, member: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
