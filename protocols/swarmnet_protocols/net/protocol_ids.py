"""The protocols of this version, as registered in proto/PROTOCOLS.toml: ids, messages, timeouts,
roles."""

import math

from swarmnet_protocols.net import ProtocolSpec
from swarmnet_protocols.net.typed_stream import Patience, TypedProtocol
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import (
    handshake_pb2,
    membership_pb2,
    pairing_pb2,
    pipeline_pb2,
    probe_pb2,
    relay_pb2,
    report_pb2,
    session_pb2,
    training_pb2,
    weights_pb2,
    workers_pb2,
)
from swarmnet_protocols.wire.roles import ANY_ROLE, Role

_ACTIVATIONS_BYTES = 64 << 20
_PART_BYTES = 256 << 10
"""Bytes of one part of a tensor or an adapter. Twelve parts at once arrive within
``Timing.chunk_s`` over a link of 1 Mbit/s."""
_CLIENT = frozenset({Role.CLIENT})
_HOST = frozenset({Role.HOST})
_TRAINER = frozenset({Role.TRAINER})
_DHT_NODES = frozenset({Role.HOST, Role.TRAINER, Role.BOOTSTRAP})


def _part_s(timing: Timing) -> Patience:
    return Patience(timing.chunk_s)


def _matchmaking_s(timing: Timing) -> Patience:
    return Patience(timing.matchmaking_silence_s, timing.chunk_s)


def _handshake_s(timing: Timing) -> Patience:
    return Patience(timing.handshake_s)


SESSION = TypedProtocol(
    "/swarmnet/session/3",
    request=session_pb2.SessionRequest,
    reply=session_pb2.SessionReply,
    max_header_bytes=64 << 10,
    max_payload_bytes=_ACTIVATIONS_BYTES,
    roles=_CLIENT,
    served_by=_HOST,
)
LINK = TypedProtocol(
    "/swarmnet/link/3",
    request=session_pb2.LinkRequest,
    reply=session_pb2.LinkReply,
    server=lambda timing: Patience(math.inf, timing.chunk_s),
    max_header_bytes=64 << 10,
    max_payload_bytes=_ACTIVATIONS_BYTES,
    roles=_CLIENT | _HOST,
    served_by=_HOST,
    has_flow_control=True,
)
PASS = TypedProtocol(
    "/swarmnet/pass/3",
    request=session_pb2.PassRequest,
    reply=session_pb2.PassReply,
    server=_part_s,
    max_header_bytes=4096,
    max_payload_bytes=_PART_BYTES,
    roles=_CLIENT | _HOST,
    served_by=_HOST,
    has_flow_control=True,
)
ADAPTER = TypedProtocol(
    "/swarmnet/adapter/3",
    request=session_pb2.AdapterRequest,
    reply=session_pb2.AdapterReply,
    server=_part_s,
    max_header_bytes=4096,
    max_payload_bytes=_PART_BYTES,
    roles=_CLIENT,
    served_by=_HOST,
    has_flow_control=True,
)
PING = TypedProtocol(
    "/swarmnet/ping/2",
    request=session_pb2.Ping,
    reply=session_pb2.Pong,
    opener=lambda timing: Patience(timing.pong_s),
    max_header_bytes=128,
    roles=ANY_ROLE,
    served_by=_HOST,
)

WEIGHTS = TypedProtocol(
    "/swarmnet/weights/1",
    request=weights_pb2.WeightsRequest,
    reply=weights_pb2.WeightsReply,
    opener=_part_s,
    max_header_bytes=1024,
    max_payload_bytes=1 << 20,
    roles=_CLIENT | _HOST | _TRAINER,
    served_by=_HOST,
)
EXPERTS = TypedProtocol(
    "/swarmnet/experts/1",
    request=session_pb2.ExpertsRequest,
    reply=session_pb2.ExpertsReply,
    opener=lambda timing: Patience(timing.silence_s, timing.chunk_s),
    server=lambda timing: Patience(timing.first_message_s, timing.chunk_s),
    max_header_bytes=64 << 10,
    max_payload_bytes=16 << 20,
    roles=_HOST,
    served_by=_HOST,
)

REPORT_S = 3.0
"""Timeout in seconds of a poll. With the longest interval and a tick of its feed, the dashboard
shows a fault within 10 s."""
REPORT_IDLE_S = 60.0
"""Seconds without a request, or with an unread report, until a node closes the stream."""
REPORT = TypedProtocol(
    "/swarmnet/report/2",
    request=report_pb2.ReportRequest,
    reply=report_pb2.NodeReport,
    opener=lambda _: Patience(REPORT_S),
    server=lambda _: Patience(REPORT_IDLE_S),
    max_header_bytes=64 << 10,
    roles=frozenset({Role.OBSERVER, Role.CLIENT, Role.HOST, Role.TRAINER}),
    served_by=_HOST | _TRAINER,
)

PROBE_S = 6.0
"""Timeout in seconds for the request, and for the reply, which comes after the dials."""
PROBE = TypedProtocol(
    "/swarmnet/probe/1",
    request=probe_pb2.ProbeRequest,
    reply=probe_pb2.ProbeReply,
    opener=lambda _: Patience(PROBE_S),
    server=lambda _: Patience(PROBE_S),
    max_header_bytes=1024,
    roles=ANY_ROLE,
    served_by=_DHT_NODES,
)

_NOISE_BYTES = (64 << 10) - 1
"""Longest message of the Noise protocol."""
RELAY_S = 4.0
"""Seconds of silence after which a side of a reservation counts as gone."""
RELAY = TypedProtocol(
    "/swarmnet/relay/1",
    request=relay_pb2.RelayRequest,
    reply=relay_pb2.RelayReply,
    opener=lambda _: Patience(RELAY_S),
    server=lambda _: Patience(RELAY_S),
    max_header_bytes=1024,
    max_payload_bytes=_NOISE_BYTES,
    roles=ANY_ROLE,
    served_by=_DHT_NODES,
)
PUNCH_S = 4.0
"""Timeout in seconds for opening the stream, and for each message of the agreement."""
PUNCH = TypedProtocol(
    "/swarmnet/punch/1",
    request=relay_pb2.PunchRequest,
    reply=relay_pb2.PunchReply,
    opener=lambda _: Patience(PUNCH_S),
    server=lambda _: Patience(PUNCH_S),
    max_header_bytes=2048,
    roles=ANY_ROLE,
    served_by=ANY_ROLE,
)

MATCHMAKING = TypedProtocol(
    "/swarmnet/matchmaking/1",
    request=workers_pb2.MatchmakingRequest,
    reply=workers_pb2.MatchmakingReply,
    opener=_matchmaking_s,
    server=_matchmaking_s,
    max_header_bytes=1 << 20,
    roles=_TRAINER,
    served_by=_TRAINER,
)
STATE = TypedProtocol(
    "/swarmnet/state/3",
    request=workers_pb2.StateRequest,
    reply=workers_pb2.StateReply,
    opener=lambda timing: Patience(timing.chunk_s),
    max_header_bytes=1024,
    max_payload_bytes=2 << 20,
    roles=_TRAINER,
    served_by=_TRAINER,
)

EXCHANGE = TypedProtocol(
    "/swarmnet/exchange/5",
    request=training_pb2.ExchangeRequest,
    reply=training_pb2.ExchangeReply,
    server=lambda timing: Patience(timing.silence_s),
    max_header_bytes=64 << 10,
    max_payload_bytes=1 << 20,
    roles=_TRAINER,
    served_by=_TRAINER,
)

MICROBATCH = TypedProtocol(
    "/swarmnet/microbatch/1",
    request=pipeline_pb2.MicrobatchRequest,
    reply=pipeline_pb2.MicrobatchReply,
    server=_part_s,
    max_header_bytes=64 << 10,
    max_payload_bytes=_PART_BYTES,
    roles=_TRAINER,
    served_by=_TRAINER,
)
AUDIT = TypedProtocol(
    "/swarmnet/audit/1",
    request=pipeline_pb2.AuditRequest,
    reply=pipeline_pb2.AuditReply,
    server=_part_s,
    max_header_bytes=64 << 10,
    max_payload_bytes=_PART_BYTES,
    roles=_TRAINER,
    served_by=_TRAINER,
)
STEP = TypedProtocol(
    "/swarmnet/step/1",
    request=pipeline_pb2.StepRequest,
    reply=pipeline_pb2.StepReply,
    server=lambda timing: Patience(timing.silence_s, timing.chunk_s),
    max_header_bytes=1 << 20,
    roles=_TRAINER,
    served_by=_TRAINER,
)

_MAX_RPC_BYTES = 4 << 20
DHT_PING = ProtocolSpec(
    "SwarmDirectoryV1.rpc_ping", max_header_bytes=_MAX_RPC_BYTES, roles=ANY_ROLE, served_by=_DHT_NODES
)
DHT_FIND = ProtocolSpec(
    "SwarmDirectoryV1.rpc_find", max_header_bytes=_MAX_RPC_BYTES, roles=ANY_ROLE, served_by=_DHT_NODES
)
DHT_STORE = ProtocolSpec(
    "SwarmDirectoryV1.rpc_store", max_header_bytes=_MAX_RPC_BYTES, roles=_DHT_NODES, served_by=_DHT_NODES
)
DHT_SAMPLE = ProtocolSpec(
    "SwarmDirectoryV1.rpc_sample", max_header_bytes=512 << 10, roles=ANY_ROLE, served_by=_DHT_NODES
)

REVOCATIONS = TypedProtocol(
    "/swarmnet/revocations/1",
    request=handshake_pb2.RevocationsRequest,
    reply=handshake_pb2.RevocationsReply,
    opener=lambda timing: Patience(timing.chunk_s),
    server=lambda timing: Patience(timing.handshake_s, timing.chunk_s),
    max_header_bytes=4096,
    max_payload_bytes=1 << 20,
    roles=ANY_ROLE,
    served_by=ANY_ROLE,
)
HANDSHAKE = TypedProtocol(
    "/swarmnet/handshake/3",
    request=handshake_pb2.HandshakeMessage,
    reply=handshake_pb2.HandshakeMessage,
    opener=_handshake_s,
    server=_handshake_s,
    max_header_bytes=4096,
    max_payload_bytes=320 << 10,
)
ADMISSION_S = 10.0
"""Timeout in seconds for reaching an issuer, and again for its answer. It is long because a
newcomer has no other peer to ask."""
ADMISSION = TypedProtocol(
    "/swarmnet/admission/3",
    request=membership_pb2.AdmissionRequest,
    reply=membership_pb2.AdmissionReply,
    opener=lambda _: Patience(ADMISSION_S),
    server=lambda timing: Patience(timing.handshake_s, timing.reply_s),
    max_header_bytes=128 << 10,
)
PAIRING_S = 15.0
"""Timeout in seconds for one answer of the other side of a pairing. A newcomer that types is waited
for as long as its code is valid."""
PAIRING = TypedProtocol(
    "/swarmnet/pairing/1",
    request=pairing_pb2.PairingRequest,
    reply=pairing_pb2.PairingReply,
    opener=lambda _: Patience(PAIRING_S),
    server=lambda _: Patience(120.0, PAIRING_S),
    max_header_bytes=16 << 10,
)

INFERENCE = (SESSION, LINK, PASS, ADAPTER, PING, WEIGHTS)
"""Served by hosts of blocks, besides ``REPORT``."""
TRAINING = (MATCHMAKING, STATE, EXCHANGE)
"""Served by training workers, besides ``REPORT``."""
PIPELINE = (MICROBATCH, AUDIT, STEP)
"""Served by the workers of a job in stages, besides ``TRAINING``."""
DIRECTORY = (DHT_PING, DHT_FIND, DHT_STORE, DHT_SAMPLE)
"""Served by DHT nodes: hivemind's calls, and ``DHT_SAMPLE`` of swarmnet.

Each call is one request and one reply. hivemind makes and reads their messages."""
ENTRANCE = (HANDSHAKE, ADMISSION, PAIRING)
"""Protocols for peers that have not yet proved their membership. They need no role."""
REACHABILITY = (PROBE, RELAY, PUNCH)
"""Protocols that reach peers that cannot be dialled."""
ALL: tuple[ProtocolSpec, ...] = (
    *INFERENCE,
    EXPERTS,
    REPORT,
    *REACHABILITY,
    *TRAINING,
    *PIPELINE,
    *DIRECTORY,
    REVOCATIONS,
    *ENTRANCE,
)
