from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MicrobatchRequest(_message.Message):
    __slots__ = ("begin", "part")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    begin: Microbatch
    part: Part
    def __init__(self, begin: _Optional[_Union[Microbatch, _Mapping]] = ..., part: _Optional[_Union[Part, _Mapping]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("size_bytes",)
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    def __init__(self, size_bytes: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MicrobatchReply(_message.Message):
    __slots__ = ("heartbeat", "admitted", "part", "failed", "receipts")
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    heartbeat: Heartbeat
    admitted: Admitted
    part: Part
    failed: Failed
    receipts: Receipts
    def __init__(self, heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., part: _Optional[_Union[Part, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., receipts: _Optional[_Union[Receipts, _Mapping]] = ...) -> None: ...

class Receipts(_message.Message):
    __slots__ = ("receipts",)
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    receipts: _containers.RepeatedCompositeFieldContainer[Receipt]
    def __init__(self, receipts: _Optional[_Iterable[_Union[Receipt, _Mapping]]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("state", "inputs", "outputs", "grad_outputs", "grad_inputs", "bits", "signature")
    STATE_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    GRAD_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    GRAD_INPUTS_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    state: bytes
    inputs: bytes
    outputs: bytes
    grad_outputs: bytes
    grad_inputs: bytes
    bits: int
    signature: bytes
    def __init__(self, state: _Optional[bytes] = ..., inputs: _Optional[bytes] = ..., outputs: _Optional[bytes] = ..., grad_outputs: _Optional[bytes] = ..., grad_inputs: _Optional[bytes] = ..., bits: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Microbatch(_message.Message):
    __slots__ = ("job", "round", "origin", "number", "stage", "chain", "tokens", "forward_only", "inputs", "sent", "signature")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ONLY_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    job: bytes
    round: int
    origin: str
    number: int
    stage: int
    chain: _containers.RepeatedScalarFieldContainer[str]
    tokens: int
    forward_only: bool
    inputs: bytes
    sent: int
    signature: bytes
    def __init__(self, job: _Optional[bytes] = ..., round: _Optional[int] = ..., origin: _Optional[str] = ..., number: _Optional[int] = ..., stage: _Optional[int] = ..., chain: _Optional[_Iterable[str]] = ..., tokens: _Optional[int] = ..., forward_only: _Optional[bool] = ..., inputs: _Optional[bytes] = ..., sent: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("known", "bytes_per_s")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    known: bool
    bytes_per_s: int
    def __init__(self, known: _Optional[bool] = ..., bytes_per_s: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("stage", "busy")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    stage: int
    busy: bool
    def __init__(self, stage: _Optional[int] = ..., busy: _Optional[bool] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("heartbeat", "listing", "end")
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LISTING_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    heartbeat: Heartbeat
    listing: Listing
    end: StepEnd
    def __init__(self, heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., listing: _Optional[_Union[Listing, _Mapping]] = ..., end: _Optional[_Union[StepEnd, _Mapping]] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("heartbeat", "listed", "attempt", "committed")
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    heartbeat: Heartbeat
    listed: Listed
    attempt: Attempt
    committed: Committed
    def __init__(self, heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., listed: _Optional[_Union[Listed, _Mapping]] = ..., attempt: _Optional[_Union[Attempt, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ...) -> None: ...

class Listing(_message.Message):
    __slots__ = ("job", "round", "numbers", "tokens")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    job: bytes
    round: int
    numbers: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job: _Optional[bytes] = ..., round: _Optional[int] = ..., numbers: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Listed(_message.Message):
    __slots__ = ("missing", "excluded")
    MISSING_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedScalarFieldContainer[int]
    excluded: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, missing: _Optional[_Iterable[int]] = ..., excluded: _Optional[_Iterable[str]] = ...) -> None: ...

class StepEnd(_message.Message):
    __slots__ = ("origins", "tokens")
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    origins: _containers.RepeatedScalarFieldContainer[str]
    tokens: int
    def __init__(self, origins: _Optional[_Iterable[str]] = ..., tokens: _Optional[int] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("contributors",)
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    contributors: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, contributors: _Optional[_Iterable[str]] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("audit", "recall")
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    audit: Audit
    recall: Recall
    def __init__(self, audit: _Optional[_Union[Audit, _Mapping]] = ..., recall: _Optional[_Union[Recall, _Mapping]] = ...) -> None: ...

class AuditReply(_message.Message):
    __slots__ = ("heartbeat", "verdict", "part")
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    heartbeat: Heartbeat
    verdict: Verdict
    part: Part
    def __init__(self, heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., part: _Optional[_Union[Part, _Mapping]] = ...) -> None: ...

class Audit(_message.Message):
    __slots__ = ("microbatch", "receipt", "accuser", "accusation")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    ACCUSER_FIELD_NUMBER: _ClassVar[int]
    ACCUSATION_FIELD_NUMBER: _ClassVar[int]
    microbatch: Microbatch
    receipt: Receipt
    accuser: str
    accusation: bytes
    def __init__(self, microbatch: _Optional[_Union[Microbatch, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., accuser: _Optional[str] = ..., accusation: _Optional[bytes] = ...) -> None: ...

class Recall(_message.Message):
    __slots__ = ("microbatch", "gradient")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    microbatch: Microbatch
    gradient: bool
    def __init__(self, microbatch: _Optional[_Union[Microbatch, _Mapping]] = ..., gradient: _Optional[bool] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("honest", "accusation")
    HONEST_FIELD_NUMBER: _ClassVar[int]
    ACCUSATION_FIELD_NUMBER: _ClassVar[int]
    honest: bool
    accusation: bytes
    def __init__(self, honest: _Optional[bool] = ..., accusation: _Optional[bytes] = ...) -> None: ...
