"""Every decoder of what other peers, files and callers send, with inputs to begin from.

A decoder returns, or raises one of our own errors. Anything else is a finding: another exception,
more memory than ``MAX_RSS_MIB``, or one input that takes longer than ``MAX_INPUT_S``. Signatures
count as valid here, so that the code behind their check is reached.
"""

import asyncio
import ipaddress
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Protobuf

from swarmnet import swarm_file
from swarmnet.swarm_file import writer as swarm_writer
from swarmnet_node.training import shared_state
from swarmnet_protocols.directory import catalog, expert_announcements, node_reports, records
from swarmnet_protocols.directory.dht.contacts import Contacts, contacts_in, with_contacts
from swarmnet_protocols.directory.records import Publisher
from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError
from swarmnet_protocols.fetching.pieces import ModelFile, PieceTable
from swarmnet_protocols.joining import mdns_record, pairing
from swarmnet_protocols.membership import certificates, invites, revocations, signed
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.models.checkpoints import safetensors_header
from swarmnet_protocols.models.checkpoints.gguf import header as gguf_header
from swarmnet_protocols.models.checkpoints.gguf import tokenizer as gguf_tokenizer
from swarmnet_protocols.models.manifest import Manifest
from swarmnet_protocols.net import Message, ProtocolSpec
from swarmnet_protocols.net.framing import ENDED, FrameReader, decode_refusal, encode, encode_refusal
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.limits.flow_control import LimitedReader
from swarmnet_protocols.net.limits.rate_limit import RateLimiter
from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind, unpack_multiaddr, unpack_peer
from swarmnet_protocols.net.refusal import MAX_RETRY_S, Refusal
from swarmnet_protocols.net.typed_stream import parse
from swarmnet_protocols.session import adapters, expert_rows, hop_times, steps, wire_tensors
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.wire_tensors import encode_tensor
from swarmnet_protocols.training import jobs
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.codecs.boundary import BOUNDARY_CODECS, decode_ids, encode_ids
from swarmnet_protocols.training.matchmaking import rosters
from swarmnet_protocols.training.pipeline import microbatches, receipts, step_streams
from swarmnet_protocols.training.rounds import messages, reduction, terms
from swarmnet_protocols.wire import (
    membership_pb2,
    pairing_pb2,
    pipeline_pb2,
    records_pb2,
    refusal_pb2,
    report_pb2,
    session_pb2,
    training_pb2,
    workers_pb2,
)
from swarmnet_protocols.wire.roles import ANY_ROLE
from tests.defences import yes
from tests.support.house.source_code import ROOT
from tests.support.models.tiny_models import FAMILIES, save_tiny, write_gguf
from tests.support.network.stream_scopes import new_scope
from tests.wire.examples import SCHEMAS

MAX_RSS_MIB = 3000
"""Limit on the memory of the whole process, torch and the fuzzer's corpus included."""
MAX_INPUT_S = 5
HIDDEN = 8
NOW = 1_800_000_000.0
SHAPE = messages.RoundShape(members=4, slices=3)
CODECS = ("float32", "bfloat16", "float16", "int8", "int4", "fp4", "topk")
SPEC = ProtocolSpec("/test/1", max_header_bytes=1 << 12, max_payload_bytes=1 << 16)


@dataclass(frozen=True)
class Target:
    """``read`` takes what the fuzzer makes of ``seeds``. ``covers`` names the functions of ours
    that it is there for."""

    read: Callable[[bytes], object]
    seeds: Callable[[], Sequence[bytes]]
    covers: tuple[str, ...]
    max_bytes: int = 1 << 16
    refusals: tuple[type[Exception], ...] = field(default=(SwarmnetError,))


@cache
def vectors() -> dict[str, list[bytes]]:
    """The golden examples of every message, by its full name."""
    found: dict[str, list[bytes]] = {}
    for path in sorted((ROOT / "proto" / "vectors").glob("*.json")):
        listed = json.loads(path.read_text())
        for each in listed if isinstance(listed, list) else []:
            found.setdefault(each["message"], []).append(bytes.fromhex(each["hex"]))
    return found


def examples(kind: type[Protobuf]) -> Callable[[], list[bytes]]:
    """The golden examples of a message, also inside other messages."""
    return lambda: list(dict.fromkeys(seed for each in MESSAGES for seed in _found(kind, each)))


def _found(kind: type[Protobuf], within: type[Protobuf]) -> Iterator[bytes]:
    for seed in vectors().get(within.DESCRIPTOR.full_name, []):
        pending: list[Protobuf] = [within.FromString(seed)]
        while pending:
            message = pending.pop()
            if isinstance(message, kind):
                yield message.SerializeToString(deterministic=True)
            for of, value in message.ListFields():
                if of.message_type:
                    pending += value if of.is_repeated else [value]


def two(head: bytes, tail: bytes) -> bytes:
    """One input of two parts."""
    return len(head).to_bytes(2, "big") + head + tail


def halves(data: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(data[:2], "big")
    return data[2 : 2 + size], data[2 + size :]


# ---- frames and messages -----------------------------------------------------------------------


def read_frames(data: bytes) -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        frames = FrameReader(LimitedReader(reader, RateLimiter()), SPEC, new_scope())
        while True:
            await frames.read()

    asyncio.run(main())


def frame_seeds() -> list[bytes]:
    head, payload = encode(Message(b"header", bytes(64)), SPEC)
    return [head + bytes(payload), encode_refusal(Refusal(refusal_pb2.REASON_INTERNAL, "no", 1.0)), ENDED]


MESSAGES: tuple[type[Protobuf], ...] = tuple(
    getattr(schema, name) for schema in SCHEMAS for name in schema.DESCRIPTOR.message_types_by_name
)


def read_message(data: bytes) -> None:
    """The first byte says which message is expected."""
    if data:
        parse(MESSAGES[data[0] % len(MESSAGES)], data[1:])


def message_seeds() -> list[bytes]:
    return [
        bytes([number]) + seed
        for number, kind in enumerate(MESSAGES)
        for seed in vectors().get(kind.DESCRIPTOR.full_name, [])
    ]


# ---- sessions ----------------------------------------------------------------------------------


def read_tensor(data: bytes) -> None:
    head, payload = halves(data)
    header = parse(session_pb2.Tensor, head)
    wire_tensors.decode_tensor(header, payload, positions=2, hidden_size=HIDDEN)


def read_step(data: bytes) -> None:
    head, payload = halves(data)
    steps.decode_step(parse(session_pb2.Step, head), payload, hidden_size=HIDDEN)


def read_times(data: bytes) -> None:
    hop_times.decode_times(parse(session_pb2.Timed, data))


def read_rows(data: bytes) -> None:
    header, payload = halves(data)
    rows = expert_rows.decode_rows(parse(session_pb2.Rows, header), payload, hidden_size=HIDDEN)
    assert rows.pairs <= expert_rows.MAX_PAIRS


ROWS = {1: torch.tensor([0, 2]), 5: torch.tensor([1])}


def rows_seeds() -> list[bytes]:
    [request] = expert_rows.split_rows(2, torch.zeros(3, HIDDEN), ROWS)
    message, payload = expert_rows.encode_rows(request, 7)
    return [two(message.SerializeToString(), bytes(payload))]


def read_outputs(data: bytes) -> None:
    header, payload = halves(data)
    request = expert_rows.ExpertRows(2, torch.zeros(3, HIDDEN), ROWS)
    outputs = expert_rows.decode_outputs(parse(session_pb2.Computed, header), payload, request, 7)
    assert {expert: len(each) for expert, each in outputs.items()} == {1: 2, 5: 1}


def outputs_seeds() -> list[bytes]:
    tensor, payload = encode_tensor(np.zeros((3, HIDDEN), np.float32))
    return [two(session_pb2.Computed(id=7, tensor=tensor).SerializeToString(), bytes(payload))]


def read_rearrange(data: bytes) -> None:
    wanted = parse(session_pb2.Rearrange, data)
    for sets in (wanted.loads, wanted.drops):
        expert_rows.decode_experts(sets)


def read_experts(data: bytes) -> None:
    topic = expert_announcements.experts_topic(SWARM)
    record = records.Record(SWARM, topic, bytes(32), 1, NOW, data)
    expert_announcements.read_expert_host(record, SWARM)


def step_seeds() -> list[bytes]:
    rows = (steps.Row(0, 0, 2, 1, 0, False),)
    step = steps.Step(seq=1, rows=rows, values=np.zeros((2, HIDDEN), np.float32), acked=0, replay=False)
    header, payload = steps.encode_step(step, ElementType.FLOAT32)
    return [two(header.SerializeToString(), bytes(payload))]


def tensor_seeds() -> list[bytes]:
    header = session_pb2.Tensor(dtype=session_pb2.DTYPE_FLOAT32, shape=[2, HIDDEN])
    return [two(header.SerializeToString(), bytes(8 * HIDDEN))]


def adapter_seeds() -> list[bytes]:
    from safetensors.torch import save

    name = "0.self_attn.q_proj"
    pair = {f"{name}.down": torch.zeros(2, HIDDEN), f"{name}.up": torch.zeros(HIDDEN, 2)}
    prefix = {"0.prefix.key": torch.zeros(1, 2, 4), "0.prefix.value": torch.zeros(1, 2, 4)}
    return [save(pair), save(prefix)]


def read_refusal(data: bytes) -> None:
    refused = decode_refusal(data, "peer")
    assert str(refused).isprintable()
    assert 0 <= refused.retry_after_s <= MAX_RETRY_S


# ---- directory and membership ------------------------------------------------------------------

SWARM = bytes(range(32))
_PEER, _NEXT = (Identity.from_seed(seed).peer_id for seed in (b"a peer", b"another"))


class AnyKey(dict[bytes, float]):
    """A set of keys that contains every key, for ever."""

    def get(self, key: bytes, default: float | None = None) -> float:
        return float("inf")


RULES = Rules(SWARM, Admission.CERTIFICATE, AnyKey())


def statement(kind: str) -> list[bytes]:
    """The signed examples whose body is of this kind."""
    body = membership_pb2.Signed.FromString
    wanted = vectors()[f"swarmnet.membership.v1.{kind}"]
    found = vectors()["swarmnet.membership.v1.Signed"]
    return [each for each in found if body(each).body in wanted] or found


def read_record(data: bytes) -> None:
    record = records.open_record(data, swarm=SWARM, now=NOW)
    catalog.merge([record.body])
    for kind in (records_pb2.HostRecord, records_pb2.ProcessRecord):
        try:
            kind.FromString(record.body)
        except DecodeError as error:
            raise ProtocolViolation("no record") from error


def record_seeds() -> list[bytes]:
    found = []
    for seed in vectors()["swarmnet.records.v1.SignedRecord"]:
        message = records_pb2.SignedRecord.FromString(seed)
        message.swarm = SWARM
        message.expires_at_ms = round((NOW + 60) * 1000)
        found.append(message.SerializeToString(deterministic=True))
    return found


def read_certificate(data: bytes) -> None:
    certificates.open_certificate(data, rules=RULES, now=NOW)


def read_redemption(data: bytes) -> None:
    request = parse(membership_pb2.Redeem, data)
    invites.open_redemption(request, _PEER, rules=RULES, now=NOW)


def read_revocations(data: bytes) -> None:
    revocations.open_list(data, rules=RULES, now=NOW)


def read_invite(data: bytes) -> None:
    invites.read_invite(data.decode("utf-8", "replace"), now=NOW)


def invite_seeds() -> list[bytes]:
    terms = invites.InviteTerms(ANY_ROLE, int(NOW) + 60)
    return [invites.make_invite(terms, swarm=SWARM, key=Identity.from_seed(b"a"), bootstrap=[]).encode()]


def redemption_seeds() -> list[bytes]:
    invite = invites.read_invite(invite_seeds()[0].decode(), now=NOW)
    machine = certificates.machine_of(Identity.from_seed(b"node"), _PEER, SWARM)
    return [invites.redemption(invite, _PEER, each).SerializeToString() for each in (None, machine)]


def read_pairing(data: bytes) -> None:
    request = parse(pairing_pb2.PairingRequest, data)
    side = pairing.house_side("123456", newcomer=_PEER, house=_PEER)
    side.start()
    pairing.finished(side, request.attempt)


def pairing_seeds() -> list[bytes]:
    side = pairing.newcomer_side("123456", newcomer=_PEER, house=_PEER)
    return [pairing_pb2.PairingRequest(attempt=side.start()).SerializeToString()]


def mdns_seeds() -> list[bytes]:
    addresses = [f"/ip4/192.168.7.5/{each}/p2p/{_PEER}" for each in ("tcp/4001", "udp/4001/quic-v1")]
    return [mdns_record.make_record(SWARM, addresses)]


def swarm_file_seeds() -> list[bytes]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for is_open in (True, False):
            new = swarm_writer.NewSwarm("lab", is_open=is_open)
            swarm_writer.create(Path(folder) / str(is_open), new, now=NOW)
            found.append((Path(folder) / str(is_open) / "swarm.toml").read_bytes())
    return found


def read_report(data: bytes) -> None:
    node_reports.check(parse(report_pb2.NodeReport, data))


# ---- training ----------------------------------------------------------------------------------


def read_control(data: bytes) -> None:
    messages.decode_control(parse(training_pb2.ExchangeRequest, data), SHAPE)


def read_microbatch(data: bytes) -> None:
    wire = parse(pipeline_pb2.Microbatch, data)
    microbatches.microbatch_from_wire(
        wire,
        job=wire.job,
        stages=len(wire.chain) + 1,
        count=8,
        positions=1 << 10,
        way=(_PEER, _NEXT),
    )


def microbatch_seeds() -> list[bytes]:
    name = microbatches.MicrobatchId(7, _PEER, 3)
    first = microbatches.Microbatch(name, 1, (_NEXT,))
    signature = Identity.from_seed(b"a peer").sign(first.signed_bytes(bytes(32)))
    first = replace(first, signature=signature)
    return [microbatches.microbatch_to_wire(bytes(32), first).SerializeToString()]


def read_receipts(data: bytes) -> None:
    receipts.receipts_from_wire(parse(pipeline_pb2.Receipts, data), 4)


def receipt_seeds() -> list[bytes]:
    hashes = {name: bytes(32) for name in ("inputs", "outputs", "grad_outputs", "grad_inputs")}
    receipt = pipeline_pb2.Receipt(state=bytes(32), **hashes, bits=24, signature=bytes(64))
    return [pipeline_pb2.Receipts(receipts=[receipt]).SerializeToString()]


def read_step_end(data: bytes) -> None:
    wire = parse(pipeline_pb2.StepRequest, data)
    step_streams.listing_from_wire(wire.listing, job=wire.listing.job, count=8, most=1 << 10)
    step_streams.end_from_wire(wire.end)


def read_roster(data: bytes) -> None:
    me = terms.RoundMember(_PEER)
    wire = parse(workers_pb2.Roster, data)
    rosters.roster_from_wire(wire, round=wire.round, me=me)


def roster_seeds() -> list[bytes]:
    exchange = rosters.next_exchange_number(7, 0)
    roster = rosters.Roster(7, exchange, (terms.RoundMember(_PEER, ("/ip4/203.0.113.5/tcp/4001",)),))
    return [rosters.roster_to_wire(roster).SerializeToString()]


def read_measured(data: bytes) -> None:
    rosters.measured_from_wire([parse(workers_pb2.Measured, data)])


def read_summary(data: bytes) -> None:
    members = (terms.RoundMember(_PEER),) * 4
    agreed = terms.RoundTerms(bytes(32), 7, members, ((0, 64), (64, 128)), (0, 1), get_codec("int8"), ())
    reduction.read_summary(agreed, 1, data)


def read_values(name: str, data: bytes) -> None:
    get_codec(name).decode(data, 300)


def codec_seeds(name: str) -> list[bytes]:
    return [bytes(get_codec(name).encode(torch.linspace(-1, 1, 300)))]


def read_boundary(name: str, data: bytes) -> None:
    BOUNDARY_CODECS[name].decode(data, 3, 100)


def boundary_seeds(name: str) -> list[bytes]:
    return [bytes(BOUNDARY_CODECS[name].encode(torch.linspace(-1, 1, 300).view(3, 100)))]


def read_state(data: bytes) -> None:
    shared_state.SharedState.unpack(bytearray(data))


def state_seeds() -> list[bytes]:
    shared = shared_state.SharedState(3, torch.zeros(8), {"momentum": torch.zeros(8)}, {})
    return [b"".join(bytes(part) for part in shared.pack())]


def job_seeds() -> list[bytes]:
    from swarmnet_protocols.training.job_templates import TEMPLATES, template

    return [template(method).encode() for method in TEMPLATES]


def sealed_job_seeds() -> list[bytes]:
    job = jobs.parse_job(job_seeds()[0]).job.about([("00" * 32, 1)], None)
    return [jobs.seal_job(job, Identity.from_seed(b"owner"))]


# ---- models ------------------------------------------------------------------------------------


def from_file(read: Callable[[Path], object], suffix: str, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=suffix, dir="/dev/shm") as file:
        file.write(data)
        file.flush()
        read(Path(file.name))


def read_gguf_tokenizer(path: Path) -> None:
    gguf_tokenizer.read_tokenizer(path, None)


@cache
def tiny_model(suffix: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        if suffix == ".gguf":
            return write_gguf(Path(folder) / "model.gguf", "llama").read_bytes()
        return next(save_tiny(next(iter(FAMILIES)), Path(folder)).glob("*.safetensors")).read_bytes()


def read_manifest(data: bytes) -> None:
    Manifest.from_json(data)


def manifest_seeds() -> list[bytes]:
    file = ModelFile("model.safetensors", 1 << 20, bytes(32))
    manifest = Manifest("LlamaForCausalLM", 1, 64, (file,), {"local_layers": ("embed",), 0: ("q", "k")})
    return [manifest.to_json().encode()]


def piece_table_seeds() -> list[bytes]:
    return [PieceTable(1000, bytes(32 * 5)).encode()]


def read_multiaddr(data: bytes) -> None:
    prepare_hivemind()
    if not unpack_multiaddr(data):
        raise ProtocolViolation("no multiaddr")


def read_peer(data: bytes) -> None:
    prepare_hivemind()
    try:
        unpack_peer(data)
    except ValueError as error:
        raise ProtocolViolation("no peer id") from error


def read_contacts(data: bytes) -> None:
    known = Contacts(Publisher(Identity.from_seed(b"me"), SWARM, lambda: NOW), tuple)
    try:
        known.learn(contacts_in(data))
    except DecodeError as error:
        raise ProtocolViolation("no contacts") from error
    for peer in list(known._known):
        known.addresses_of(peer)


def contact_seeds() -> list[bytes]:
    contact = records_pb2.ContactRecord(addresses=["/ip4/203.0.113.5/tcp/4001"]).SerializeToString()
    _, sealed = Publisher(Identity.from_seed(b"a"), SWARM, lambda: NOW).seal(
        "contact", contact, lifetime_s=60
    )
    return [with_contacts(b"", [sealed])]


TARGETS: dict[str, Target] = {
    "frames": Target(read_frames, frame_seeds, ("net.framing.FrameReader",)),
    "messages": Target(read_message, message_seeds, ("net.typed_stream.parse",)),
    "refusal": Target(
        read_refusal, examples(refusal_pb2.Refusal), ("net.framing.decode_refusal",), max_bytes=4096
    ),
    "multiaddr": Target(
        read_multiaddr,
        lambda: [bytes([4, 127, 0, 0, 1, 6, 0, 80])],
        ("net.p2pd.daemon.unpack_multiaddr",),
    ),
    "peer id": Target(read_peer, lambda: [b"\x00\x24" + bytes(36)], ("net.p2pd.daemon.unpack_peer",)),
    "contacts": Target(read_contacts, contact_seeds, ()),
    "tensor": Target(read_tensor, tensor_seeds, ("session.wire_tensors.decode_tensor",)),
    "step": Target(read_step, step_seeds, ("session.steps.decode_step",)),
    "rows for experts": Target(read_rows, rows_seeds, ("session.expert_rows.decode_rows",)),
    "outputs of experts": Target(read_outputs, outputs_seeds, ("session.expert_rows.decode_outputs",)),
    "other experts": Target(
        read_rearrange, examples(session_pb2.Rearrange), ("session.expert_rows.decode_experts",)
    ),
    "announcement of experts": Target(
        read_experts,
        examples(records_pb2.ExpertsRecord),
        ("directory.expert_announcements.read_expert_host",),
    ),
    "times of a hop": Target(
        read_times, examples(session_pb2.Timed), ("session.hop_times.decode_times",), max_bytes=256
    ),
    "adapter": Target(adapters.read_part, adapter_seeds, ("session.adapters.read_part",)),
    "record": Target(
        read_record,
        record_seeds,
        ("directory.records.open_record", "directory.records.open_valid", "directory.catalog.merge"),
    ),
    "certificate": Target(
        read_certificate,
        lambda: statement("Certificate"),
        ("membership.certificates.open_certificate", "membership.signed.unseal", "membership.signed.decode"),
    ),
    "mdns record": Target(
        lambda data: mdns_record.read_record(SWARM, data, (ipaddress.ip_network("192.168.7.0/24"),)),
        mdns_seeds,
        ("joining.mdns_record.read_record",),
    ),
    "pairing": Target(read_pairing, pairing_seeds, (), max_bytes=256),
    "redemption": Target(read_redemption, redemption_seeds, ("membership.invites.open_redemption",)),
    "revocations": Target(
        read_revocations, lambda: statement("RevocationList"), ("membership.revocations.open_list",)
    ),
    "invite": Target(read_invite, invite_seeds, ("membership.invites.read_invite",)),
    "swarm file": Target(swarm_file.parse, swarm_file_seeds, ()),
    "report": Target(read_report, examples(report_pb2.NodeReport), ()),
    "control": Target(
        read_control, examples(training_pb2.ExchangeRequest), ("training.rounds.messages.decode_control",)
    ),
    "microbatch": Target(
        read_microbatch,
        microbatch_seeds,
        ("training.pipeline.microbatches.microbatch_from_wire",),
    ),
    "receipts": Target(read_receipts, receipt_seeds, ("training.pipeline.receipts.receipts_from_wire",)),
    "step end": Target(
        read_step_end,
        examples(pipeline_pb2.StepRequest),
        ("training.pipeline.step_streams.listing_from_wire", "training.pipeline.step_streams.end_from_wire"),
    ),
    "roster": Target(
        read_roster,
        roster_seeds,
        ("training.matchmaking.rosters.roster_from_wire", "training.matchmaking.rosters.member_from_wire"),
    ),
    "measured": Target(
        read_measured, examples(workers_pb2.Measured), ("training.matchmaking.rosters.measured_from_wire",)
    ),
    "summary": Target(
        read_summary, examples(training_pb2.Summary), ("training.rounds.reduction.read_summary",)
    ),
    **{
        f"codec {name}": Target(
            partial(read_values, name), partial(codec_seeds, name), ("training.codecs.payload.read",)
        )
        for name in CODECS
    },
    **{
        f"boundary {name}": Target(
            partial(read_boundary, name), partial(boundary_seeds, name), ("training.codecs.payload.read",)
        )
        for name in BOUNDARY_CODECS
    },
    "boundary ids": Target(
        lambda data: decode_ids(data, 300),
        lambda: [encode_ids(torch.arange(300), 300)],
        ("training.codecs.boundary.decode_ids",),
    ),
    "state": Target(read_state, state_seeds, ()),
    "job file": Target(jobs.parse_job, job_seeds, ("training.jobs.parse_job",)),
    "sealed job": Target(jobs.open_job, sealed_job_seeds, ("training.jobs.open_job",)),
    "manifest": Target(read_manifest, manifest_seeds, ()),
    "piece table": Target(lambda data: PieceTable.decode(data, 3 << 20), piece_table_seeds, ()),
    "gguf": Target(
        partial(from_file, gguf_header.read_header, ".gguf"),
        lambda: [tiny_model(".gguf")],
        ("models.checkpoints.gguf.header.read_header",),
        max_bytes=1 << 19,
    ),
    "gguf tokenizer": Target(
        partial(from_file, read_gguf_tokenizer, ".gguf"),
        lambda: [tiny_model(".gguf")],
        ("models.checkpoints.gguf.tokenizer.read_tokenizer",),
        max_bytes=1 << 19,
    ),
    "safetensors": Target(
        partial(from_file, safetensors_header.read_header, ".safetensors"),
        lambda: [tiny_model(".safetensors")],
        (
            "models.checkpoints.safetensors_header.read_header",
            "models.checkpoints.safetensors_header.read_tensors",
        ),
        max_bytes=1 << 21,
    ),
}

PLANTED = {"planted": Target(lambda data: 1 // (data[:1] != b"!"), lambda: [b"?"], ())}
"""A defect, to see that the fuzzer finds one."""


def believe_signatures(set_attribute: Callable[[object, str, object], None]) -> None:
    """Count every signature as valid, from now on or for as long as ``set_attribute`` lets it."""
    for module in (records, signed, certificates, invites, jobs):
        if hasattr(module, "verify"):
            set_attribute(module, "verify", yes)
    set_attribute(mdns_record, "_is_of", yes)
