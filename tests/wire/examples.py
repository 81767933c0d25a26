"""One example of every message two peers may exchange. ``python -m tests.wire.examples`` writes
them as golden vectors.

A vector that has been released never changes: an older peer still sends it.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message as Protobuf

from swarmnet_protocols.directory.records import Record, seal
from swarmnet_protocols.membership import signed
from swarmnet_protocols.net import Message
from swarmnet_protocols.net.framing import ENDED, SIZES, encode, encode_refusal
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.limits.flow_control import CREDIT, LIMIT
from swarmnet_protocols.net.protocol_ids import LINK
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.wire import (
    handshake_pb2,
    membership_pb2,
    pairing_pb2,
    pipeline_pb2,
    probe_pb2,
    records_pb2,
    refusal_pb2,
    relay_pb2,
    report_pb2,
    session_pb2,
    training_pb2,
    weights_pb2,
    workers_pb2,
)

VECTORS = Path(__file__).parents[2] / "proto" / "vectors"
SCHEMAS = (
    handshake_pb2,
    membership_pb2,
    pairing_pb2,
    pipeline_pb2,
    probe_pb2,
    records_pb2,
    refusal_pb2,
    relay_pb2,
    report_pb2,
    session_pb2,
    training_pb2,
    weights_pb2,
    workers_pb2,
)
"""The schemas of all messages that peers exchange."""

_SESSION = bytes(range(16))
_MANIFEST = bytes(range(32))
_ADDRESSES = ["/ip4/203.0.113.5/tcp/4001"]
_COORDINATE = [0.5, -0.25, 0.125, 0.0078125, -0.0009765625, 0.25]
_PEER = session_pb2.Peer(
    id="12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq",
    record=b"a signed record",
    session=_SESSION[::-1],
)
_TENSOR = session_pb2.Tensor(dtype=session_pb2.DTYPE_BFLOAT16, shape=[5, 576])

_REFUSAL = Refusal(refusal_pb2.REASON_OUT_OF_RESOURCES, "it is out of resources at the moment", 2.5)


def session_messages() -> Iterator[Protobuf]:
    pb = session_pb2
    yield pb.SessionRequest(
        open=pb.Open(
            session=_SESSION,
            epoch=1,
            manifest=_MANIFEST,
            span=pb.Span(start=3, end=12),
            next=_PEER,
            wire=pb.DTYPE_FLOAT32,
            max_length=2048,
            swarm=_MANIFEST[::-1],
        )
    )
    yield pb.SessionRequest(relink=pb.Relink(epoch=2, next=_PEER))
    yield pb.SessionRequest(relink=pb.Relink(epoch=2, next=_PEER, needed=pb.Sequences(numbers=[0, 7])))
    yield pb.SessionRequest(heartbeat=pb.Heartbeat())
    yield pb.SessionReply(opened=pb.Opened())
    yield pb.SessionReply(output=pb.Output(step=300, tensor=_TENSOR))
    yield pb.SessionReply(heartbeat=pb.Heartbeat(applied=299))
    yield pb.SessionReply(link_lost=pb.LinkLost(epoch=2, peer=_PEER.id))
    yield pb.SessionReply(leaving=pb.Leaving())
    yield pb.SessionReply(leaving=pb.Leaving(moves=True))
    yield pb.LinkRequest(link=pb.Link(session=_SESSION, epoch=2))
    yield pb.LinkRequest(
        step=pb.Step(
            seq=300,
            acked=299,
            replay=True,
            rows=[
                pb.Row(sequence=1, start=40, count=4, outputs=2, source=3, rewrite=True, first=1),
                pb.Row(sequence=2, start=0, count=1, outputs=1, source=2),
            ],
            tensor=_TENSOR,
        )
    )
    yield pb.LinkReply(linked=pb.Linked(applied=1 << 40))
    yield pb.LinkReply(heartbeat=pb.Heartbeat(applied=7))
    yield pb.PassRequest(
        begin=pb.Begin(
            swarm=_MANIFEST[::-1],
            manifest=_MANIFEST,
            span=pb.Span(start=3, end=12),
            counts=[300, 1],
            backward=True,
            wire=pb.DTYPE_BFLOAT16,
        )
    )
    yield pb.PassRequest(part=pb.Part(tensor=_TENSOR))
    yield pb.PassReply(part=pb.Part(tensor=_TENSOR))
    yield pb.PassReply(heartbeat=pb.Heartbeat())
    span = pb.Span(start=3, end=12)
    yield pb.SessionRequest(open=pb.Open(session=_SESSION, epoch=1, span=span, adapter=_MANIFEST))
    yield pb.PassRequest(begin=pb.Begin(span=span, counts=[300, 1], adapter=_MANIFEST, graph=_MANIFEST[:16]))
    yield pb.AdapterRequest(
        upload=pb.Upload(
            swarm=_MANIFEST[::-1], manifest=_MANIFEST, span=span, adapter=_MANIFEST, size_bytes=1 << 33
        )
    )
    yield pb.AdapterRequest(chunk=pb.Chunk())
    yield pb.AdapterReply(wanted=pb.Wanted())
    yield pb.AdapterReply(heartbeat=pb.Heartbeat())
    yield pb.AdapterReply(stored=pb.Stored())
    yield pb.SessionRequest(show=pb.Show(sequence=1, count=40))
    yield pb.SessionReply(shown=pb.Shown(received=_MANIFEST, sent=_TENSOR))
    yield pb.SessionRequest(resume=pb.Resume(session=_SESSION))
    yield pb.SessionReply(moved=pb.Moved())
    yield pb.SessionRequest(open=pb.Open(session=_SESSION, epoch=1, span=span, standby=True, spare=True))
    yield pb.SessionRequest(tee=pb.Tee(epoch=3, standby=_PEER))
    yield pb.SessionReply(link_made=pb.LinkMade(epoch=3))
    yield pb.SessionRequest(open=pb.Open(session=_SESSION, epoch=1, span=span, timed=True))
    yield pb.SessionRequest(open=pb.Open(session=_SESSION, epoch=1, span=span, continues=True))
    yield pb.SessionRequest(open=pb.Open(session=_SESSION, epoch=1, span=span, batch=True))
    yield pb.SessionReply(
        timed=pb.Timed(
            step=300,
            received_s=10.5,
            started_s=10.75,
            computed_s=11.0,
            taken_s=11.125,
            encoded_s=11.25,
            sent_s=11.5,
        )
    )
    yield pb.ExpertsRequest(attach=pb.Attach(swarm=_MANIFEST[::-1], manifest=_MANIFEST))
    yield pb.ExpertsRequest(
        rows=pb.Rows(
            id=300,
            block=7,
            tensor=_TENSOR,
            experts=[pb.ExpertRows(expert=0, rows=[0, 4]), pb.ExpertRows(expert=130, rows=[2])],
        )
    )
    yield pb.ExpertsRequest(
        rearrange=pb.Rearrange(
            loads=[pb.ExpertSet(block=3, experts=b"\xff\x01")],
            drops=[pb.ExpertSet(block=3, experts=b"\x00\x02"), pb.ExpertSet(block=300, experts=b"\x80")],
        )
    )
    yield pb.ExpertsReply(attached=pb.Attached())
    held = [pb.ExpertSet(block=0, experts=b"\x81"), pb.ExpertSet(block=3, experts=b"\x01\x02")]
    yield pb.ExpertsReply(attached=pb.Attached(experts=held, leaving=True))
    yield pb.ExpertsReply(computed=pb.Computed(id=300, tensor=_TENSOR))
    yield pb.ExpertsReply(heartbeat=pb.Heartbeat())
    yield pb.Ping(nonce=(1 << 64) - 1)
    yield pb.Pong(nonce=1, queue_s=0.25)
    yield pb.Pong(nonce=1, queue_s=0.25, sessions=3, cache_free=0.5, coordinate=_COORDINATE, busy=0.75)
    yield pb.Pong(nonce=1, manifest=bytes(32), start=3, end=6)


def record_messages() -> Iterator[Protobuf]:
    pb = records_pb2
    signer = Identity.from_seed(b"golden vector")
    host = pb.HostRecord(
        nat=pb.NAT_CONE,
        manifest=_MANIFEST,
        start=3,
        end=12,
        state=pb.HOST_STATE_ONLINE,
        version="0.1.0",
        protocol=1,
        step_s=0.01,
        token_s=0.001,
        cache_bytes_free=1 << 33,
        sessions=2,
        addresses=_ADDRESSES,
        public_name="a volunteer",
        precision="bf16/bf16",
    )
    yield host
    yield pb.HostRecord(manifest=_MANIFEST, start=0, end=1, arithmetic="exact-1")
    yield pb.HostRecord(manifest=_MANIFEST, start=0, end=1, coordinate=_COORDINATE)
    yield pb.HostRecord(manifest=_MANIFEST, start=0, end=1, next_start=1, next_end=2)
    yield pb.HostRecord(manifest=_MANIFEST, start=0, end=1, stays=True)
    yield pb.HostRecord(manifest=_MANIFEST, start=0, end=1, missing_experts="0:4-7,9")
    yield pb.HostRecord(manifest=_MANIFEST, start=0, end=1, may_switch=True, load=0.75)
    yield pb.HostRecord(manifest=_MANIFEST, start=0, end=1, room=5696)
    record = Record(
        swarm=_MANIFEST,
        topic="hosts/" + _MANIFEST.hex(),
        signer=signer.public_key,
        sequence=1_800_000_000_000,
        expires_at=1_800_000_060.0,
        body=host.SerializeToString(deterministic=True),
    )
    yield pb.SignedRecord.FromString(seal(signer, record))
    yield pb.SignedRecord.FromString(seal(signer, replace(record, certificate=b"a certificate")))
    yield pb.CatalogRecord(model=pb.CatalogModel(manifest=_MANIFEST, name="org/name", blocks=126))
    model = pb.CatalogModel(manifest=_MANIFEST, name="name", blocks=2, context=8192, size_bytes=1 << 33)
    yield pb.CatalogRecord(model=model)
    yield pb.CatalogRecord(job=pb.CatalogJob(id=_MANIFEST))
    yield pb.CatalogRecord(made=[pb.CatalogJob(id=_MANIFEST)])
    yield pb.ProcessRecord(number=1_800_000_000_000, addresses=["/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW"])
    yield pb.ContactRecord(addresses=["/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW"])
    yield pb.WithContacts(contacts=[b"a signed record", b"another"])
    yield pb.ExpertsRecord(
        manifest=_MANIFEST,
        state=pb.HOST_STATE_ONLINE,
        protocol=2,
        blocks=[pb.BlockExperts(block=3, experts=b"\xff\x01"), pb.BlockExperts(block=300, experts=b"\x80")],
        addresses=_ADDRESSES,
        version="0.1.0",
        public_name="attic",
        precision="q4_1",
        row_s=0.00048828125,
        capacity=300,
    )


def worker_messages() -> Iterator[Protobuf]:
    pb = workers_pb2
    addresses = _ADDRESSES
    member = pb.Member(id=_PEER.id, addresses=addresses, weight=8192, last_exchange=9, round_s=12.5)
    measured = pb.Measured(id=_PEER.id, bytes_per_s=2.5e6)
    yield pb.WorkerRecord(
        job=_MANIFEST, round=7, state=_MANIFEST[::-1], addresses=addresses, protocol=1, round_s=12.5
    )
    yield pb.WorkerRecord(job=_MANIFEST, state=_MANIFEST[::-1], addresses=addresses, protocol=1, spare=True)
    held = {"job": _MANIFEST, "round": 7, "state": _MANIFEST[::-1], "addresses": addresses, "protocol": 1}
    yield pb.WorkerRecord(**held, copy=True)
    yield pb.WorkerRecord(**held, stays=True, leaving=True)
    yield pb.JobRecord(sealed=b"a sealed job")
    yield pb.MatchmakingRequest(
        job=_MANIFEST, round=7, state=_MANIFEST[::-1], member=member, measured=[measured]
    )
    yield pb.MatchmakingReply(heartbeat=pb.LeaderHeartbeat())
    leader = pb.Member(id=_PEER.id, addresses=addresses)
    yield pb.MatchmakingReply(heartbeat=pb.LeaderHeartbeat(leader=leader))
    yield pb.MatchmakingReply(
        roster=pb.Roster(round=7, members=[member], exchange_number=10, bytes_per_s=[2.5e6])
    )
    yield pb.MatchmakingRequest(
        job=_MANIFEST,
        state=_MANIFEST[::-1],
        member=pb.Member(weight=8192, last_exchange=9, round_s=12.5),
        known=_MANIFEST[:16],
        spent_s=[10.0, 0.5, 2.0],
    )
    roster = pb.Roster(
        round=7,
        exchange_number=10,
        known=_MANIFEST[:16],
        weights=[8192, 0],
        bytes_per_s=[2.5e6],
        rounds_s=[12.5],
        waited=pb.Waited(member=1, why="disk", seconds=2.5),
    )
    yield pb.MatchmakingReply(roster=roster)
    yield pb.MatchmakingReply(unknown=pb.UnknownAddresses())
    yield pb.MatchmakingReply(position=pb.Position(round=8, state=_MANIFEST, leader=member))
    place = [0.01, -0.02, 0.005, 0.001, 0.0, 0.25]
    yield pb.MatchmakingRequest(
        job=_MANIFEST, state=_MANIFEST[::-1], member=member, followers=40, coordinate=place
    )
    yield pb.MatchmakingReply(
        roster=pb.Roster(
            round=7, members=[member] * 3, exchange_number=10, bytes_per_s=[1e6], groups=[0, 1, 0]
        )
    )
    yield pb.MatchmakingReply(full=pb.Full(workers=300))
    yield pb.MatchmakingReply(position=pb.Position(round=8, state=_MANIFEST, full=True, coordinate=place))
    yield pb.StateRequest(job=_MANIFEST, state=_MANIFEST[::-1], describe=pb.Describe())
    yield pb.StateRequest(job=_MANIFEST, state=_MANIFEST[::-1], fetch=pb.Fetch(chunk=300))
    yield pb.StateRequest(job=_MANIFEST, ask_offer=pb.AskOffer(round=7))
    yield pb.StateReply(offer=pb.Offer(round=6, state=_MANIFEST[::-1]))
    yield pb.StateReply(description=pb.Description(size_bytes=1 << 30))
    yield pb.StateReply(chunk=pb.Chunk(index=300))


def training_messages() -> Iterator[Protobuf]:
    pb = training_pb2
    hashes, signature = _MANIFEST + _MANIFEST[::-1], bytes(range(64))
    vote = pb.Vote(hashes=hashes, signature=signature)
    yield pb.ExchangeRequest(hello=pb.Hello(exchange_number=1 << 40, agreement=_MANIFEST[:16]))
    yield pb.ExchangeRequest(hello=pb.Hello(exchange_number=1 << 40, agreement=_MANIFEST[:16], between=5))
    inside = (1 << 63) + 5
    yield pb.ExchangeRequest(
        contribution=pb.Contribution(weight=512.0, size_bytes=1, hash=_MANIFEST[:16], inside=inside)
    )
    contributor = pb.Contributor(member=2, weight=512.0, hash=_MANIFEST[:16], inside=inside)
    yield pb.Summary(exchange_number=9, slice=1, contributors=[contributor])
    yield pb.Summary(exchange_number=9, slice=1, inside=[inside, 7])
    yield pb.ExchangeReply(result=pb.Result(size_bytes=1, hash=_MANIFEST, summary=b"a summary"))
    yield pb.ExchangeRequest(prepare=pb.Prepare(attempt=3))
    yield pb.ExchangeRequest(report=pb.Report(held=[pb.Held(slice=1, hash=_MANIFEST)], vote=vote))
    yield pb.ExchangeRequest(
        plan=pb.Plan(
            assignments=[pb.Assignment(reducer=1), pb.Assignment(reducer=2, chosen=_MANIFEST, holder=7)],
        )
    )
    yield pb.ExchangeRequest(propose=pb.Proposal(hashes=hashes))
    yield pb.ExchangeRequest(vote=vote)
    ballot = pb.Ballot(member=5, signature=signature)
    decided = pb.Decided(hashes=hashes, votes=[ballot], signature=signature)
    yield pb.ExchangeRequest(decided=decided)
    yield pb.ExchangeRequest(accusation=pb.Accusation(member=5, decided=decided, votes=[vote]))
    yield pb.ExchangeRequest(request_result=pb.RequestResult(slice=1, hash=_MANIFEST))
    yield pb.ExchangeRequest(request_contribution=pb.RequestContribution(slice=1))
    yield pb.ExchangeRequest(
        contribution=pb.Contribution(
            slice=1, weight=0.5, size_bytes=1 << 33, offset=1 << 32, hash=_MANIFEST[:16]
        )
    )
    yield pb.ExchangeRequest(
        result=pb.Result(
            slice=1, size_bytes=1 << 33, offset=1 << 32, hash=_MANIFEST, summary=b"a serialized Summary"
        )
    )
    yield pb.ExchangeRequest(
        contribution=pb.Contribution(
            slice=1,
            weight=0.5,
            size_bytes=1 << 33,
            offset=1 << 32,
            hash=_MANIFEST[:16],
            paced=True,
            signature=bytes(range(64)),
        )
    )
    yield pb.ExchangeRequest(
        result=pb.Result(slice=1, size_bytes=1 << 33, offset=1 << 32, hash=_MANIFEST, paced=True)
    )
    yield pb.ExchangeReply(heartbeat=pb.Heartbeat())
    yield pb.Summary(
        exchange_number=7,
        slice=1,
        contributors=[
            pb.Contributor(member=2, weight=512.0, hash=_MANIFEST[:16], signature=bytes(range(64)))
        ],
        excluded=[pb.Exclusion(member=3, reason="2 of 4096 values are not finite")],
    )


def pipeline_messages() -> Iterator[Protobuf]:
    pb = pipeline_pb2
    yield pb.MicrobatchRequest(
        begin=pb.Microbatch(
            job=_MANIFEST,
            round=7,
            origin=_PEER.id,
            number=3,
            stage=1,
            chain=[_PEER.id],
            tokens=30,
            forward_only=True,
            inputs=_MANIFEST,
            sent=2,
            signature=bytes(64),
        )
    )
    yield pb.MicrobatchRequest(part=pb.Part(size_bytes=300_000))
    yield pb.MicrobatchReply(heartbeat=pb.Heartbeat())
    yield pb.MicrobatchReply(admitted=pb.Admitted(known=True, bytes_per_s=2_500_000))
    yield pb.MicrobatchReply(part=pb.Part(size_bytes=300_000))
    yield pb.MicrobatchReply(failed=pb.Failed(stage=2, busy=True))
    hashes = {"inputs": _MANIFEST, "outputs": _MANIFEST, "grad_outputs": _MANIFEST, "grad_inputs": _MANIFEST}
    receipt = pb.Receipt(state=_MANIFEST, **hashes, bits=24, signature=bytes(64))
    yield pb.MicrobatchReply(receipts=pb.Receipts(receipts=[receipt]))
    audited = pb.Microbatch(
        job=_MANIFEST, round=7, origin=_PEER.id, number=3, stage=1, chain=[_PEER.id, _PEER.id]
    )
    audit = pb.Audit(microbatch=audited, receipt=receipt, accuser=_PEER.id, accusation=bytes(64))
    yield pb.AuditRequest(audit=audit)
    yield pb.AuditRequest(recall=pb.Recall(microbatch=audited, gradient=True))
    yield pb.AuditReply(heartbeat=pb.Heartbeat())
    yield pb.AuditReply(verdict=pb.Verdict(honest=True, accusation=bytes(64)))
    yield pb.AuditReply(part=pb.Part(size_bytes=300_000))
    yield pb.StepRequest(heartbeat=pb.Heartbeat())
    yield pb.StepRequest(listing=pb.Listing(job=_MANIFEST, round=7, numbers=[0, 300], tokens=[512, 511]))
    yield pb.StepRequest(end=pb.StepEnd(origins=[_PEER.id], tokens=1023))
    yield pb.StepReply(heartbeat=pb.Heartbeat())
    yield pb.StepReply(listed=pb.Listed(missing=[300], excluded=[_PEER.id]))
    yield pb.StepReply(attempt=pb.Attempt(contributors=[_PEER.id]))
    yield pb.StepReply(committed=pb.Committed())


def frame() -> dict[str, str]:
    message = Message(b"header", b"payload of raw bytes")
    head, payload = encode(message, LINK)
    waiting, _ = encode(message, LINK, max_uncredited_bytes=0)
    return {
        "header": message.header.hex(),
        "payload": bytes(payload).hex(),
        "frame": (head + bytes(payload)).hex(),
        "refusal": encode_refusal(_REFUSAL).hex(),
        "end": ENDED.hex(),
        "wait": SIZES.pack(LIMIT, 1 << 14).hex(),
        "waiting": waiting.hex(),
        "grant": SIZES.pack(CREDIT, len(payload)).hex(),
    }


def membership_messages() -> Iterator[Protobuf]:
    pb = membership_pb2
    authority, member = Identity.from_seed(b"authority"), Identity.from_seed(b"member")
    certificate = pb.Certificate(
        swarm=_MANIFEST,
        peer=member.peer_id,
        roles=[pb.ROLE_CLIENT, pb.ROLE_HOST],
        not_before=1_799_999_400,
        not_after=1_800_604_800,
        id=_SESSION,
        invite=_SESSION[::-1],
        grant_signer=Identity.from_seed(b"another authority").public_key,
    )
    first = signed.seal(b"swarmnet-certificate-1", certificate, authority)
    renewal = pb.Certificate()
    renewal.CopyFrom(certificate)
    renewal.MergeFrom(pb.Certificate(first=first))
    renewal.ClearField("grant_signer")
    grant = pb.Grant(
        swarm=_MANIFEST,
        id=_SESSION[::-1],
        roles=[pb.ROLE_TRAINER],
        not_after=1_800_604_800,
        uses=5,
        key=Identity.from_seed(b"invite").public_key,
        peer=member.peer_id,
    )
    revocations = pb.RevocationList(
        swarm=_MANIFEST,
        serial=1_800_000_000,
        peers=[member.peer_id],
        certificates=[_SESSION],
        invites=[_SESSION[::-1]],
        since=[1_799_000_000, 1_799_500_000, 1_800_000_000],
    )
    yield certificate
    yield renewal
    yield grant
    yield revocations
    yield pb.Signed.FromString(signed.seal(b"swarmnet-certificate-1", renewal, authority))
    sealed_grant = signed.seal(b"swarmnet-grant-1", grant, authority)
    yield pb.Signed.FromString(sealed_grant)
    yield pb.Signed.FromString(signed.seal(b"swarmnet-revocations-1", revocations, authority))
    yield pb.Invite(
        grant=sealed_grant, seed=_MANIFEST, bootstrap=["/ip4/203.0.113.5/tcp/4001/p2p/" + _PEER.id]
    )
    yield pb.AdmissionRequest(redeem=pb.Redeem(grant=sealed_grant, proof=bytes(64)))
    yield pb.AdmissionRequest(renew=pb.Renew(certificate=b"a serialized Signed"))
    yield pb.AdmissionReply(
        admitted=pb.Admitted(certificate=b"a serialized Signed", swarm_file=b"format = 2")
    )
    yield pb.AdmissionReply(referral=pb.Referral(issuers=["/ip4/203.0.113.5/tcp/4001/p2p/" + _PEER.id]))
    yield pb.AdmissionRequest(swarm_file=pb.SwarmFileRequest(serial=7, certificate=b"a serialized Signed"))
    yield pb.AdmissionReply(swarm_file=b"format = 2")
    yield pb.IssuerRecord(addresses=["/ip4/203.0.113.5/tcp/4001/p2p/" + _PEER.id])
    machine = pb.Machine(node=member.peer_id, client=_PEER.id, consent=bytes(64))
    yield pb.AdmissionRequest(redeem=pb.Redeem(grant=sealed_grant, proof=bytes(64), machine=machine))
    yield pb.AdmissionRequest(renew=pb.Renew(certificate=b"a serialized Signed", machine=machine))
    certificate.client, grant.label = _PEER.id, "Anna's laptop"
    yield certificate
    yield grant


def handshake_messages() -> Iterator[Protobuf]:
    pb = handshake_pb2
    serial = pb.Serial(signer=_MANIFEST, serial=7)
    hello = pb.Hello(
        swarm=_MANIFEST,
        certificate=b"sealed",
        serials=[serial],
        file_serial=7,
        wants_file=True,
        name="kitchen",
    )
    yield pb.HandshakeMessage(hello=hello)
    yield pb.HandshakeMessage(swarm_file=pb.SwarmFile())
    yield pb.HandshakeMessage(revoked=pb.Revoked())
    yield pb.RevocationsRequest(serials=[serial])
    yield pb.RevocationsReply()


def pairing_messages() -> Iterator[Protobuf]:
    pb, element = pairing_pb2, b"A" + bytes(32)
    yield pb.PairingRequest(knock=pb.Knock(name="laptop"))
    yield pb.PairingRequest(attempt=element)
    yield pb.PairingRequest(confirm=bytes(32))
    yield pb.PairingReply(house=pb.House(name="home"))
    yield pb.PairingReply(answer=b"B" + bytes(32))
    yield pb.PairingReply(welcome=pb.Welcome(invite="swn1AAAA", proof=bytes(32)))
    yield pb.PairingReply(wrong=pb.Wrong(left=2))


def refusal_messages() -> Iterator[Protobuf]:
    pb = refusal_pb2
    yield _REFUSAL.to_wire()
    yield pb.Refusal(
        reason=pb.REASON_NOT_AUTHORISED, detail="this certificate was revoked", time_ms=1_800_000_000_000
    )


def probe_messages() -> Iterator[Protobuf]:
    yield probe_pb2.ProbeRequest(ports=[31337, 4001])
    yield probe_pb2.ProbeReply(now_ms=1_800_000_000_000, observed_ip="203.0.113.5", reached=[31337])


def relay_messages() -> Iterator[Protobuf]:
    pb, peer = relay_pb2, Identity.from_seed(b"golden vector").peer_id
    yield records_pb2.RelayRecord(addresses=_ADDRESSES)
    yield records_pb2.SampleRequest(keys=[bytes(range(20))], most=64, start=3, end=4)
    yield records_pb2.SampleReply(samples=[records_pb2.Sample(records=[b"a signed record"])])
    yield pb.RelayRequest(reserve=pb.Reserve())
    yield pb.RelayRequest(connect=pb.Connect(peer=peer))
    yield pb.RelayRequest(heartbeat=pb.Heartbeat())
    yield pb.RelayReply(accepted=pb.Accepted(observed_address="/ip4/203.0.113.5/tcp/31337"))
    yield pb.RelayReply(heartbeat=pb.Heartbeat())
    yield pb.RelayReply(incoming=pb.Incoming(circuit=bytes(range(16)), source=peer))
    yield pb.RelayRequest(accept=pb.Accept(circuit=bytes(range(16))))
    yield pb.Proof(signature=bytes(range(64)), is_unsupported=True)
    yield pb.PunchRequest(addresses=pb.PunchAddresses(addresses=["/ip4/203.0.113.5/udp/31337/quic-v1"]))
    yield pb.PunchRequest(start=pb.PunchStart())
    yield pb.PunchReply(addresses=pb.PunchAddresses(addresses=["/ip4/203.0.113.6/tcp/4001"], is_open=True))


def report_messages() -> Iterator[Protobuf]:
    pb = report_pb2
    times = pb.Times(counts=[0, 0, 0, 2, *[300] * 10], total_s=22.5)
    flow = pb.Flow(upstream=_PEER.id, downstream=_PEER.id, sessions=2, positions=1 << 40)
    experts = [
        pb.BlockExperts(block=3, experts=b"\x01\x80", rows=[7, 1 << 40]),
        pb.BlockExperts(block=4, experts=b"\x02"),
    ]
    trunk = pb.TrunkReport(
        lacks=[pb.BlockExperts(block=3, experts=b"\xfe\x7f")],
        missing=[pb.BlockExperts(block=3, experts=b"\x00\x40")],
        round_trips_s=[0.0005, 0.002],
        far=1,
        rows=1 << 40,
        failed=2,
        hedged=3,
        loaded=4,
    )
    record = records_pb2.HostRecord(
        manifest=_MANIFEST,
        start=3,
        end=12,
        state=records_pb2.HOST_STATE_ONLINE,
        precision="bfloat16",
        step_s=0.01,
        token_s=0.001,
        sessions=2,
    )
    host = pb.HostReport(
        record=record,
        model="org/name",
        total_blocks=126,
        queue_s=0.25,
        cache_bytes=1 << 30,
        cache_bytes_limit=1 << 33,
        forwards=300,
        positions=1 << 40,
        answered=300,
        rebuilt=1,
        links_lost=2,
        clients_lost=3,
        first_tokens=times,
        token_times=times,
        flows=[flow, pb.Flow(upstream=_PEER.id)],
    )
    trunk_host = pb.HostReport(
        record=records_pb2.HostRecord(
            manifest=_MANIFEST, start=3, end=12, state=records_pb2.HOST_STATE_JOINING
        ),
        total_blocks=126,
        experts=experts,
        expert_streams=2,
        trunk=trunk,
    )
    expert_peer = pb.HostReport(
        record=records_pb2.HostRecord(
            manifest=_MANIFEST, state=records_pb2.HOST_STATE_ONLINE, precision="bfloat16"
        ),
        model="org/name",
        total_blocks=126,
        experts=experts,
        expert_streams=2,
    )
    worker = pb.WorkerReport(
        job=_MANIFEST,
        name="a job",
        method="diloco",
        state="training",
        round=7,
        rounds=100,
        loss=2.5,
        val_loss=2.625,
        tokens=1 << 40,
        bytes_sent=1 << 33,
        bytes_received=300,
        contributions=[pb.Contribution(peer=_PEER.id, rounds=7)],
        waited_for=_PEER.id,
        waited_why="network",
        waited_s=2.5,
        val_tokens=4096,
        recent=pb.RecentWork(seconds=10, compute_s=7.5, tokens=4096, forward_bytes=1e6, backward_bytes=2e6),
        stage=pb.WorkerStage(number=1, start=10, end=20),
    )
    yield pb.ReportRequest()
    yield pb.NodeReport(version="0.1.0", public_name="a volunteer", uptime_s=3600.5, host=host)
    reach = pb.Reach(
        kind="relayed",
        nat="cone",
        relays=[Identity.from_seed(b"golden vector").peer_id],
        punched=3,
        not_punched=1,
        punch_s=0.5,
        circuits=2,
        reservations=4,
        forwarded_circuits=5,
        forwarded_bytes=1 << 40,
    )
    yield pb.NodeReport(version="0.1.0", uptime_s=60.0, worker=worker, reach=reach)
    yield pb.NodeReport(version="0.1.0", uptime_s=60.0, host=expert_peer)
    yield pb.NodeReport(version="0.1.0", uptime_s=60.0, host=trunk_host)
    given = pb.Given(
        block_positions=12_000_000,
        clients=7,
        samples=640,
        sent_bytes=10**9,
        received_bytes=2 * 10**9,
        active_s=86_400.5,
        kwh=0.25,
        since=1.8e9,
    )
    yield pb.NodeReport(version="0.1.0", uptime_s=60.0, worker=worker, given=given)


def weights_messages() -> Iterator[Protobuf]:
    pb = weights_pb2
    yield pb.WeightsRequest(
        manifest=_MANIFEST, what=pb.WHAT_DATA, file=_MANIFEST[::-1], offset=5 << 20, length=1 << 20
    )
    yield pb.WeightsReply(total_bytes=5 << 30)


def vector(message: Protobuf) -> dict[str, Any]:
    return {
        "message": message.DESCRIPTOR.full_name,
        "fields": MessageToDict(message, preserving_proto_field_name=True),
        "hex": message.SerializeToString(deterministic=True).hex(),
    }


def write() -> None:
    VECTORS.mkdir(exist_ok=True)
    for name, content in {
        "session": [vector(message) for message in session_messages()],
        "records": [vector(message) for message in record_messages()],
        "training": [vector(message) for message in training_messages()],
        "pipeline": [vector(message) for message in pipeline_messages()],
        "workers": [vector(message) for message in worker_messages()],
        "membership": [vector(message) for message in membership_messages()],
        "pairing": [vector(message) for message in pairing_messages()],
        "handshake": [vector(message) for message in handshake_messages()],
        "refusal": [vector(message) for message in refusal_messages()],
        "report": [vector(message) for message in report_messages()],
        "relay": [vector(message) for message in relay_messages()],
        "weights": [vector(message) for message in weights_messages()],
        "probe": [vector(message) for message in probe_messages()],
        "frame": frame(),
    }.items():
        (VECTORS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    write()
