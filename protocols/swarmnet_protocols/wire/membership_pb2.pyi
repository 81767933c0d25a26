from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_CLIENT: _ClassVar[Role]
    ROLE_HOST: _ClassVar[Role]
    ROLE_TRAINER: _ClassVar[Role]
    ROLE_OBSERVER: _ClassVar[Role]
    ROLE_BOOTSTRAP: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_CLIENT: Role
ROLE_HOST: Role
ROLE_TRAINER: Role
ROLE_OBSERVER: Role
ROLE_BOOTSTRAP: Role

class Signed(_message.Message):
    __slots__ = ("body", "signer", "signature")
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    signer: bytes
    signature: bytes
    def __init__(self, body: _Optional[bytes] = ..., signer: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Certificate(_message.Message):
    __slots__ = ("swarm", "peer", "roles", "not_before", "not_after", "id", "invite", "grant_signer", "first", "client")
    SWARM_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    NOT_BEFORE_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    INVITE_FIELD_NUMBER: _ClassVar[int]
    GRANT_SIGNER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    swarm: bytes
    peer: str
    roles: _containers.RepeatedScalarFieldContainer[Role]
    not_before: int
    not_after: int
    id: bytes
    invite: bytes
    grant_signer: bytes
    first: bytes
    client: str
    def __init__(self, swarm: _Optional[bytes] = ..., peer: _Optional[str] = ..., roles: _Optional[_Iterable[_Union[Role, str]]] = ..., not_before: _Optional[int] = ..., not_after: _Optional[int] = ..., id: _Optional[bytes] = ..., invite: _Optional[bytes] = ..., grant_signer: _Optional[bytes] = ..., first: _Optional[bytes] = ..., client: _Optional[str] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("swarm", "id", "roles", "not_after", "uses", "key", "peer", "label")
    SWARM_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    swarm: bytes
    id: bytes
    roles: _containers.RepeatedScalarFieldContainer[Role]
    not_after: int
    uses: int
    key: bytes
    peer: str
    label: str
    def __init__(self, swarm: _Optional[bytes] = ..., id: _Optional[bytes] = ..., roles: _Optional[_Iterable[_Union[Role, str]]] = ..., not_after: _Optional[int] = ..., uses: _Optional[int] = ..., key: _Optional[bytes] = ..., peer: _Optional[str] = ..., label: _Optional[str] = ...) -> None: ...

class Invite(_message.Message):
    __slots__ = ("grant", "seed", "bootstrap")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_FIELD_NUMBER: _ClassVar[int]
    grant: bytes
    seed: bytes
    bootstrap: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, grant: _Optional[bytes] = ..., seed: _Optional[bytes] = ..., bootstrap: _Optional[_Iterable[str]] = ...) -> None: ...

class RevocationList(_message.Message):
    __slots__ = ("swarm", "serial", "peers", "certificates", "invites", "since")
    SWARM_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    INVITES_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    swarm: bytes
    serial: int
    peers: _containers.RepeatedScalarFieldContainer[str]
    certificates: _containers.RepeatedScalarFieldContainer[bytes]
    invites: _containers.RepeatedScalarFieldContainer[bytes]
    since: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, swarm: _Optional[bytes] = ..., serial: _Optional[int] = ..., peers: _Optional[_Iterable[str]] = ..., certificates: _Optional[_Iterable[bytes]] = ..., invites: _Optional[_Iterable[bytes]] = ..., since: _Optional[_Iterable[int]] = ...) -> None: ...

class AdmissionRequest(_message.Message):
    __slots__ = ("redeem", "renew", "swarm_file")
    REDEEM_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    SWARM_FILE_FIELD_NUMBER: _ClassVar[int]
    redeem: Redeem
    renew: Renew
    swarm_file: SwarmFileRequest
    def __init__(self, redeem: _Optional[_Union[Redeem, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., swarm_file: _Optional[_Union[SwarmFileRequest, _Mapping]] = ...) -> None: ...

class SwarmFileRequest(_message.Message):
    __slots__ = ("serial", "certificate")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    serial: int
    certificate: bytes
    def __init__(self, serial: _Optional[int] = ..., certificate: _Optional[bytes] = ...) -> None: ...

class Redeem(_message.Message):
    __slots__ = ("grant", "proof", "machine")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    grant: bytes
    proof: bytes
    machine: Machine
    def __init__(self, grant: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., machine: _Optional[_Union[Machine, _Mapping]] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("certificate", "machine")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    machine: Machine
    def __init__(self, certificate: _Optional[bytes] = ..., machine: _Optional[_Union[Machine, _Mapping]] = ...) -> None: ...

class Machine(_message.Message):
    __slots__ = ("node", "client", "consent")
    NODE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    CONSENT_FIELD_NUMBER: _ClassVar[int]
    node: str
    client: str
    consent: bytes
    def __init__(self, node: _Optional[str] = ..., client: _Optional[str] = ..., consent: _Optional[bytes] = ...) -> None: ...

class AdmissionReply(_message.Message):
    __slots__ = ("admitted", "referral", "swarm_file")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REFERRAL_FIELD_NUMBER: _ClassVar[int]
    SWARM_FILE_FIELD_NUMBER: _ClassVar[int]
    admitted: Admitted
    referral: Referral
    swarm_file: bytes
    def __init__(self, admitted: _Optional[_Union[Admitted, _Mapping]] = ..., referral: _Optional[_Union[Referral, _Mapping]] = ..., swarm_file: _Optional[bytes] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("certificate", "swarm_file")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    SWARM_FILE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    swarm_file: bytes
    def __init__(self, certificate: _Optional[bytes] = ..., swarm_file: _Optional[bytes] = ...) -> None: ...

class Referral(_message.Message):
    __slots__ = ("issuers",)
    ISSUERS_FIELD_NUMBER: _ClassVar[int]
    issuers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, issuers: _Optional[_Iterable[str]] = ...) -> None: ...

class IssuerRecord(_message.Message):
    __slots__ = ("addresses",)
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ...) -> None: ...
