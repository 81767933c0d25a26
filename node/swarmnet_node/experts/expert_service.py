"""Computes routed experts for other hosts, whose routers have chosen them.

The life of a stream:

1. **Attached.** The host names its swarm and model, and takes a slot. The peer says which experts
   it has, and again whenever they change.
2. **Computing.** The peer computes requests of all hosts in the order of arrival, and stores no
   rows. A host waits for the answer in the middle of a forward. So in a process that also hosts
   blocks, requests run on another thread than forwards. Otherwise two hosts that wait for each
   other's experts would deadlock.
3. **Ended.** The host closes the stream, or the peer does. The peer closes it for a violation of
   the protocol. It also closes a stream without work when all slots are taken and the stream's
   subnet holds most of them.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import NoReturn

import torch

from swarmnet_node.experts.expert_link import ExpertModel
from swarmnet_node.hosting.slots import Slot, Slots
from swarmnet_node.running_node import Dependencies, Hosted
from swarmnet_protocols.arrays import as_array
from swarmnet_protocols.directory.announcer import Announcement
from swarmnet_protocols.directory.expert_announcements import (
    BlockExperts,
    ExpertBits,
    ExpertHost,
    expert_announcement,
)
from swarmnet_protocols.directory.node_reports import describe_experts
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.machine.aio import News, race
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.limits.resource_limits import Rate, Resource
from swarmnet_protocols.net.limits.resources import Scope
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.quantization.packed_experts import (
    ExpertsModule,
    add_experts,
    compute_expert,
    device_of,
    drop_experts,
    has_expert,
)
from swarmnet_protocols.session.expert_rows import (
    ExpertRows,
    ExpertsStream,
    decode_experts,
    decode_rows,
    encode_experts,
)
from swarmnet_protocols.session.wire_tensors import encode_tensor
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import records_pb2, refusal_pb2, report_pb2
from swarmnet_protocols.wire import session_pb2 as pb


class ExpertService:
    """Handles ``EXPERTS`` streams. Holds the experts of one model on this machine, by block."""

    def __init__(
        self,
        modules: Mapping[int, ExpertsModule],
        executor: Executor,
        model: ExpertModel,
        timing: Timing,
        system: Scope,
    ) -> None:
        """``executor`` has one thread, which never runs forwards of blocks. ``system`` limits the
        streams."""
        self._modules = dict(modules)
        self._withdrawn: BlockExperts = {}
        self._is_withheld = False
        self._executor = executor
        self._model = model
        self._timing = timing
        self.row_s = 0.0
        self.capacity = 0
        """Most experts that this peer holds. ``row_s`` and ``capacity`` are announced; see
        ``ExpertHost``."""
        self.on_rearrange: Callable[[PeerId, BlockExperts, BlockExperts], None] = lambda *_: None
        """Called when a host asks this peer to load and drop experts."""
        self._is_leaving = False
        self._slots = Slots(system, Resource.EXPERTS)
        self._rows: dict[Slot, int] = {}
        """Rows computed on each open stream."""
        self.rows_of: Counter[tuple[int, int]] = Counter()
        """Rows computed by each (block, expert) since the start."""
        self.requests = 0
        """Requests computed since the start."""
        self.streams = 0
        """Open streams."""
        self._changed = News()
        """Told when ``streams`` or ``_changes`` changes."""
        self._changes = 0
        """Number of changes of the offered experts since the start."""
        self._told: tuple[int, pb.ExpertsReply] | None = None
        """The encoded message for hosts, with the value of ``_changes`` that it describes."""

    @property
    def rows(self) -> int:
        """Rows computed since the start. A row counts once for each of its experts."""
        return self.rows_of.total()

    def rows_from(self, host: PeerId) -> int:
        """Return the rows computed for a host on its open streams."""
        return sum(rows for slot, rows in self._rows.items() if slot.peer == host)

    @property
    def experts(self) -> BlockExperts:
        """The experts that are announced."""
        found = {
            block: ExpertBits.of(each for each in range(module.num_experts) if has_expert(module, each))
            - self._withdrawn.get(block, frozenset())
            for block, module in self._modules.items()
        }
        return {block: experts for block, experts in found.items() if experts}

    async def add(self, block: int, loaded: ExpertsModule) -> None:
        """Also compute the experts of module ``loaded`` in this block."""
        loop = asyncio.get_running_loop()
        if block in self._modules:
            await loop.run_in_executor(self._executor, add_experts, self._modules[block], loaded)
        else:
            self._modules[block] = loaded
        await self._note_change()

    async def withdraw(self, experts: BlockExperts) -> None:
        """Stop announcing ``experts``, but compute them until ``withhold``.

        ``{}`` announces all experts again.
        """
        self._withdrawn, self._is_withheld = experts, False
        await self._note_change()

    def withhold(self) -> None:
        """Refuse to compute the withdrawn experts, but keep them in memory.

        If another peer still computes one of them, that peer has its own copy, and does not just
        ask this peer.
        """
        self._is_withheld = True

    async def drop(self) -> None:
        """Free the memory of the withdrawn experts."""
        withdrawn, loop = self._withdrawn, asyncio.get_running_loop()
        for block, experts in withdrawn.items():
            await loop.run_in_executor(self._executor, drop_experts, self._modules[block], experts)
        await self.withdraw({})

    async def compute(self, request: ExpertRows) -> torch.Tensor:
        """Compute a request without a stream. Return the outputs [pairs, D]."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._compute, request)

    async def _note_change(self) -> None:
        self._changes += 1
        await self._changed.tell()

    def announcement(
        self, dependencies: Dependencies, hosted: Hosted, state: "records_pb2.HostState"
    ) -> Announcement:
        """Return the announcement of these experts by the node that hosts them."""
        transport = dependencies.transport
        host = ExpertHost(
            transport.peer_id,
            tuple(transport.addresses()),
            self.experts,
            is_online=True,
            row_s=self.row_s,
            precision=self._model.precision,
            public_name=hosted.public_name,
            capacity=self.capacity,
        )
        return expert_announcement(
            host,
            hosted.manifest,
            state=state,
            version=hosted.version,
            lifetime_s=dependencies.timing.record_s,
        )

    def describe(self, report: report_pb2.HostReport) -> None:
        """Add the experts, and how many rows they have computed, to a host's report."""
        report.experts.extend(describe_experts(self.experts, self.rows_of))
        report.expert_streams = self.streams

    async def handle(self, stream: ExpertsStream) -> None:
        """Compute for one host until its stream ends."""
        slot = Slot.of(stream.stream)
        with self._slots.acquire(slot, stream.stream.scope):
            self.streams += 1
            self._rows[slot] = 0
            try:
                await self._attach(stream)
                await race(
                    self._tell(stream),
                    self._serve(stream, slot),
                    self._send_heartbeats(stream),
                    slot.eviction(),
                )
            except ProtocolViolation as error:
                raise Refusal.of(error) from error
            finally:
                self.streams -= 1
                del self._rows[slot]
                await self._changed.tell()

    async def leave(self) -> None:
        """Refuse new streams, tell hosts to close theirs, and return when none is open."""
        self._is_leaving = True
        await self._note_change()
        await self._changed.until(lambda: self.streams == 0)

    async def _attach(self, stream: ExpertsStream) -> None:
        request, _ = await stream.receive()
        if not request.HasField("attach"):
            raise ProtocolViolation("a stream of experts begins with Attach")
        self._check_model(request.attach)
        # A host without work sends nothing. A dead connection ends its streams by itself.
        stream.silence_s = math.inf

    async def _tell(self, stream: ExpertsStream) -> NoReturn:
        """Tell the host which experts it can ask for, now and after each change."""
        while True:
            told = self._changes
            await stream.send(self._attached())
            async with self._changed:
                while self._changes == told:
                    await self._changed.wait()

    def _check_model(self, wanted: pb.Attach) -> None:
        if self._is_leaving:
            raise Refusal(refusal_pb2.REASON_LEAVING, "this peer is about to stop")
        if wanted.swarm != self._model.swarm:
            raise Refusal(refusal_pb2.REASON_WRONG_SWARM, "this peer belongs to another swarm")
        if wanted.manifest != self._model.manifest:
            raise Refusal(
                refusal_pb2.REASON_WRONG_MODEL, f"this peer serves {self._model.manifest.hex()[:16]}"
            )

    def _attached(self) -> pb.ExpertsReply:
        """Return the message that names the offered experts, encoded once for all streams."""
        if self._told is None or self._told[0] != self._changes:
            attached = pb.Attached(experts=encode_experts(self.experts), leaving=self._is_leaving)
            self._told = self._changes, pb.ExpertsReply(attached=attached)
        return self._told[1]

    async def _send_heartbeats(self, stream: ExpertsStream) -> None:
        await stream.send_heartbeats(
            self._timing.heartbeat_s, lambda: pb.ExpertsReply(heartbeat=pb.Heartbeat())
        )

    async def _serve(self, stream: ExpertsStream, slot: Slot) -> None:
        loop = asyncio.get_running_loop()
        while True:
            request, payload = await stream.receive()
            if request.HasField("rearrange"):
                loads = decode_experts(request.rearrange.loads)
                self.on_rearrange(stream.peer, loads, decode_experts(request.rearrange.drops))
                continue
            if not request.HasField("rows"):
                raise ProtocolViolation("a second Attach on one stream")
            rows = decode_rows(request.rows, payload, hidden_size=self._model.hidden_size)
            self._check_here(rows)
            if wait_s := stream.stream.scope.charge(Rate.POSITIONS, rows.pairs, loop.time()):
                await asyncio.sleep(wait_s)
            if not rows.rows:  # an empty request measures the round trip
                await self._answer(stream, request.rows.id, rows)
                continue
            slot.at_work = True
            await self._answer(stream, request.rows.id, rows)
            slot.at_work = False
            slot.worked()
            self._rows[slot] += rows.pairs

    async def _answer(self, stream: ExpertsStream, number: int, rows: ExpertRows) -> None:
        outputs = await self.compute(rows)
        self.rows_of.update({(rows.block, expert): len(each) for expert, each in rows.rows.items()})
        self.requests += 1
        tensor, encoded = encode_tensor(as_array(outputs))
        await stream.send(pb.ExpertsReply(computed=pb.Computed(id=number, tensor=tensor)), encoded)

    def _check_here(self, request: ExpertRows) -> None:
        module = self._modules.get(request.block)
        for expert in request.rows:
            is_withheld = self._is_withheld and expert in self._withdrawn.get(request.block, ())
            if module is None or is_withheld or not has_expert(module, expert):
                raise Refusal(
                    refusal_pb2.REASON_MISSING_EXPERTS,
                    f"expert {expert} of block {request.block} is not on this peer",
                )

    @torch.inference_mode()
    def _compute(self, request: ExpertRows) -> torch.Tensor:
        """Return the outputs of a request [pairs, D] on the CPU, where its rows are."""
        if not request.rows:
            return request.values[:0]
        module = self._modules[request.block]
        device, values = device_of(module), request.values
        outputs = [
            compute_expert(module, expert, values[rows].to(device)).to("cpu", values.dtype)
            for expert, rows in request.rows.items()
        ]
        return torch.cat(outputs)
