from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRecord(_message.Message):
    __slots__ = ("job", "round", "state", "addresses", "protocol", "round_s", "spare", "copy", "stays", "leaving")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ROUND_S_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    job: bytes
    round: int
    state: bytes
    addresses: _containers.RepeatedScalarFieldContainer[str]
    protocol: int
    round_s: float
    spare: bool
    copy: bool
    stays: bool
    leaving: bool
    def __init__(self, job: _Optional[bytes] = ..., round: _Optional[int] = ..., state: _Optional[bytes] = ..., addresses: _Optional[_Iterable[str]] = ..., protocol: _Optional[int] = ..., round_s: _Optional[float] = ..., spare: _Optional[bool] = ..., copy: _Optional[bool] = ..., stays: _Optional[bool] = ..., leaving: _Optional[bool] = ...) -> None: ...

class JobRecord(_message.Message):
    __slots__ = ("sealed",)
    SEALED_FIELD_NUMBER: _ClassVar[int]
    sealed: bytes
    def __init__(self, sealed: _Optional[bytes] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("id", "addresses", "weight", "last_exchange", "round_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    LAST_EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    ROUND_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    weight: float
    last_exchange: int
    round_s: float
    def __init__(self, id: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., weight: _Optional[float] = ..., last_exchange: _Optional[int] = ..., round_s: _Optional[float] = ...) -> None: ...

class MatchmakingRequest(_message.Message):
    __slots__ = ("job", "round", "state", "member", "measured", "known", "spent_s", "followers", "coordinate")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    SPENT_S_FIELD_NUMBER: _ClassVar[int]
    FOLLOWERS_FIELD_NUMBER: _ClassVar[int]
    COORDINATE_FIELD_NUMBER: _ClassVar[int]
    job: bytes
    round: int
    state: bytes
    member: Member
    measured: _containers.RepeatedCompositeFieldContainer[Measured]
    known: bytes
    spent_s: _containers.RepeatedScalarFieldContainer[float]
    followers: int
    coordinate: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, job: _Optional[bytes] = ..., round: _Optional[int] = ..., state: _Optional[bytes] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., measured: _Optional[_Iterable[_Union[Measured, _Mapping]]] = ..., known: _Optional[bytes] = ..., spent_s: _Optional[_Iterable[float]] = ..., followers: _Optional[int] = ..., coordinate: _Optional[_Iterable[float]] = ...) -> None: ...

class Measured(_message.Message):
    __slots__ = ("id", "bytes_per_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    bytes_per_s: float
    def __init__(self, id: _Optional[str] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class MatchmakingReply(_message.Message):
    __slots__ = ("heartbeat", "roster", "position", "unknown", "full")
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    heartbeat: LeaderHeartbeat
    roster: Roster
    position: Position
    unknown: UnknownAddresses
    full: Full
    def __init__(self, heartbeat: _Optional[_Union[LeaderHeartbeat, _Mapping]] = ..., roster: _Optional[_Union[Roster, _Mapping]] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., unknown: _Optional[_Union[UnknownAddresses, _Mapping]] = ..., full: _Optional[_Union[Full, _Mapping]] = ...) -> None: ...

class Full(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: int
    def __init__(self, workers: _Optional[int] = ...) -> None: ...

class UnknownAddresses(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaderHeartbeat(_message.Message):
    __slots__ = ("leader",)
    LEADER_FIELD_NUMBER: _ClassVar[int]
    leader: Member
    def __init__(self, leader: _Optional[_Union[Member, _Mapping]] = ...) -> None: ...

class Roster(_message.Message):
    __slots__ = ("round", "members", "exchange_number", "bytes_per_s", "known", "weights", "rounds_s", "waited", "groups")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    round: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    exchange_number: int
    bytes_per_s: _containers.RepeatedScalarFieldContainer[float]
    known: bytes
    weights: _containers.RepeatedScalarFieldContainer[float]
    rounds_s: _containers.RepeatedScalarFieldContainer[float]
    waited: Waited
    groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., exchange_number: _Optional[int] = ..., bytes_per_s: _Optional[_Iterable[float]] = ..., known: _Optional[bytes] = ..., weights: _Optional[_Iterable[float]] = ..., rounds_s: _Optional[_Iterable[float]] = ..., waited: _Optional[_Union[Waited, _Mapping]] = ..., groups: _Optional[_Iterable[int]] = ...) -> None: ...

class Waited(_message.Message):
    __slots__ = ("member", "why", "seconds")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    member: int
    why: str
    seconds: float
    def __init__(self, member: _Optional[int] = ..., why: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("round", "state", "leader", "full", "coordinate")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    COORDINATE_FIELD_NUMBER: _ClassVar[int]
    round: int
    state: bytes
    leader: Member
    full: bool
    coordinate: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, round: _Optional[int] = ..., state: _Optional[bytes] = ..., leader: _Optional[_Union[Member, _Mapping]] = ..., full: _Optional[bool] = ..., coordinate: _Optional[_Iterable[float]] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("job", "state", "describe", "fetch", "ask_offer")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DESCRIBE_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    ASK_OFFER_FIELD_NUMBER: _ClassVar[int]
    job: bytes
    state: bytes
    describe: Describe
    fetch: Fetch
    ask_offer: AskOffer
    def __init__(self, job: _Optional[bytes] = ..., state: _Optional[bytes] = ..., describe: _Optional[_Union[Describe, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., ask_offer: _Optional[_Union[AskOffer, _Mapping]] = ...) -> None: ...

class Describe(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    def __init__(self, chunk: _Optional[int] = ...) -> None: ...

class StateReply(_message.Message):
    __slots__ = ("description", "chunk", "offer")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    description: Description
    chunk: Chunk
    offer: Offer
    def __init__(self, description: _Optional[_Union[Description, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ...) -> None: ...

class AskOffer(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("round", "state")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    round: int
    state: bytes
    def __init__(self, round: _Optional[int] = ..., state: _Optional[bytes] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("size_bytes",)
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    def __init__(self, size_bytes: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("index",)
    INDEX_FIELD_NUMBER: _ClassVar[int]
    index: int
    def __init__(self, index: _Optional[int] = ...) -> None: ...
