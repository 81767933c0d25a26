"""Calls other hosts, so that a node knows which of the announced hosts exist.

``routing/sightings.py`` decides which hosts a node calls.

1. **Called.** A host answers a ping with its model and its blocks, even while it still loads them.
2. **Asked to compute.** Before the node leaves blocks, other hosts of these blocks compute a few
   random positions, and the node compares the outputs with its own. A machine without the blocks
   can only answer if it asks a third host.
3. **Asked for a block that the node lacks.** If only they claim a block that the node could take,
   hosts compute it, too. If they answer, the node loads this one block for a moment, to compare.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address

import numpy as np

from swarmnet_node.hosting.served_blocks import ServedBlocks
from swarmnet_protocols.arrays import Array, as_array, as_float32
from swarmnet_protocols.errors import PeerUnreachable, SwarmnetError, Unreachable
from swarmnet_protocols.machine.aio import all_of, loop_time
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.limits.subnets import subnet_of
from swarmnet_protocols.net.protocol_ids import PASS, PING
from swarmnet_protocols.routing.coordinates import OwnCoordinate
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.routing.sightings import MAX_CALLS, ModelClaims, Sightings, covering, in_turn
from swarmnet_protocols.routing.spans import Span
from swarmnet_protocols.routing.throughput import Claim, holders
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.passes import request_pass
from swarmnet_protocols.session.pings import ping
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import session_pb2 as pb

_log = logging.getLogger(__name__)

ROUNDS = 3
"""Rounds of calls at one look. In each further round the node calls more hosts, because some did
not answer."""
TRIAL_POSITIONS = 4
"""Positions that another host computes. Few, so that its sessions hardly wait."""
TRIAL_BLOCKS = 4
"""Most blocks of a trial. With more, the errors of different precisions add up."""
TRIAL_S = 10.0
"""Seconds for the answer to a trial. A busy host lets sessions go first for ``Timing.pass_wait_s``,
so less would reject busy hosts."""
TOLERANCE = 0.5
"""Largest error of an output, as a share of the change from input to output. Two honest precisions
differ by less than a quarter of that change; a guessed output differs by all of it."""


@dataclass(frozen=True)
class Trial:
    """Random inputs [P, D] of blocks [start, end), and the outputs that this node computed."""

    span: Span
    inputs: Array
    outputs: Array

    def agrees(self, outputs: Array) -> bool:
        """Return whether another host's ``outputs``, of any precision, may come from the same
        blocks."""
        change = np.linalg.norm(self.outputs - self.inputs, axis=1)
        return bool((np.linalg.norm(outputs - self.outputs, axis=1) <= TOLERANCE * change).all())


@dataclass(frozen=True)
class Asked:
    """A question: do other hosts have ``blocks`` of a model?

    Each block needs ``least`` hosts in different places.
    """

    swarm: bytes
    manifest: bytes
    blocks: frozenset[int]
    least: int


MakeTrial = Callable[[Span], Awaitable[Trial]]
"""Makes a trial of blocks [start, end) that this node serves."""
Compute = Callable[[int, Array], Awaitable[Array | None]]
"""Computes the outputs of one block that this node lacks. None if it has no room for the block."""


def trial_inputs(hidden_size: int, rng: random.Random) -> Array:
    """Return the inputs of a trial [P, D]."""
    generator = np.random.default_rng(rng.getrandbits(63))
    return generator.standard_normal((TRIAL_POSITIONS, hidden_size), np.float32)


async def make_trial(blocks: ServedBlocks, rng: random.Random, span: Span) -> Trial:
    """Return random inputs for the blocks of ``span``, and their outputs.

    Raises ``Unreachable`` if ``blocks`` lacks some of them.
    """
    if not blocks.have(span):
        raise Unreachable(f"this node does not serve blocks {span[0]}:{span[1]}")
    stage = blocks.stage(span)
    inputs = trial_inputs(stage.hidden_size, rng)
    compute = partial(stage.run_sequences, inputs, (len(inputs),))
    outputs = await blocks.engine.compute_pass(lambda: compute, len(inputs))
    return Trial(span, inputs, as_float32(as_array(outputs)))


class HostChecker:
    """Checks other hosts for one node, of any model of its swarm, and keeps the results as
    ``Sightings``."""

    def __init__(self, transport: Transport, own: OwnCoordinate, rng: random.Random, timing: Timing) -> None:
        """``own``: the coordinate of this node. Each answer corrects it."""
        self.sightings = Sightings()
        self._transport = transport
        self._own = own
        self._rng = rng
        self._timing = timing

    async def call(self, host: HostInfo) -> bool:
        """Ping ``host`` and note its answer. Return whether it answered."""
        try:
            pings = await PING.open(self._transport, host.peer, self._timing, addresses=host.addresses)
            with contextlib.closing(pings):
                answer = await ping(pings, self._rng)
                place = self._place_of(pings.stream.address)
        except SwarmnetError:
            self.sightings.failed(host.peer, now=loop_time())
            return False
        self.sightings.answered(host.peer, answer.manifest, answer.span, place, now=loop_time())
        if answer.coordinate is not None:
            self._own.measured(host.peer, answer.coordinate, answer.delay_s)
        return True

    async def counted(self, hosts: Mapping[PeerId, HostInfo], model: ModelClaims) -> list[Claim]:
        """Return the claims that count, after a few calls. ``hosts``: the hosts of the claims."""
        model = replace(model, subnets=_subnets(hosts))
        left, extra = MAX_CALLS, 1
        for _ in range(ROUNDS):
            called = self.sightings.to_call(model, now=loop_time(), rng=self._rng, most=left, extra=extra)
            answers = await all_of(*(self.call(hosts[peer]) for peer in called))
            # Call as many others as did not answer.
            left, extra = left - len(called), answers.count(False)
            if not extra or not left:
                break
        return self.sightings.counted(model, now=loop_time())

    async def computing(self, claims: Mapping[Claim, HostInfo], asked: Asked, make: MakeTrial) -> list[Claim]:
        """Return settled ``claims`` whose hosts compute the same as this node.

        Stop when each block of ``asked`` has enough of them. Hosts that this node has already seen
        are asked first.
        """
        if not asked.blocks:
            return []
        end = max(asked.blocks) + 1
        there = [claim for claim in claims if asked.blocks.intersection(range(claim.start, claim.end))]
        left = in_turn(there, _subnets({claim.peer: claims[claim] for claim in there}), self._rng)
        left.sort(key=lambda claim: not claim.seen)
        found: list[Claim] = []
        for _ in range(ROUNDS):
            counts = holders(found, end)
            counts = [counts[block] if block in asked.blocks else asked.least for block in range(end)]
            peers = covering(left, counts, least=asked.least, most=MAX_CALLS)
            if not peers:
                break
            chosen = [claim for claim in left if claim.peer in peers]
            left = [claim for claim in left if claim.peer not in peers]
            results = await all_of(*(self._computes(claim, claims[claim], asked, make) for claim in chosen))
            found += [claim for claim in results if claim is not None]
        return found

    async def _computes(self, claim: Claim, host: HostInfo, asked: Asked, make: MakeTrial) -> Claim | None:
        """Return ``claim`` with the place of its host. None if the host computes something else."""
        first = self._rng.choice([block for block in range(claim.start, claim.end) if block in asked.blocks])
        end = first + 1
        while end in asked.blocks and end < claim.end and end - first < TRIAL_BLOCKS:
            end += 1
        trial = await make((first, end))
        outputs = await self._outputs(host, asked, trial.span, trial.inputs)
        if outputs is None or not self._is_right(host.peer, trial, outputs):
            return None
        return replace(claim, seen=True, place=self.sightings.of(host.peer).place)

    async def prove(
        self,
        hosts: Mapping[Claim, HostInfo],
        asked: Asked,
        inputs: Array,
        compute: Compute,
    ) -> None:
        """Ask some hosts of the one block of ``asked`` to compute it, and note who does.

        Compute it here only if one of them answers.
        """
        [block] = asked.blocks
        span = (block, block + 1)
        subnets = _subnets({claim.peer: host for claim, host in hosts.items()})
        called = [hosts[claim] for claim in in_turn(hosts, subnets, self._rng)[:MAX_CALLS]]
        answers = await all_of(*(self._outputs(host, asked, span, inputs) for host in called))
        answered = {
            host.peer: outputs for host, outputs in zip(called, answers, strict=True) if outputs is not None
        }
        right: list[PeerId] = []
        if answered:
            own = await compute(block, inputs)
            if own is None:
                return  # nobody can say who is right
            trial = Trial(span, inputs, own)
            right = [peer for peer, outputs in answered.items() if self._is_right(peer, trial, outputs)]
        if not right:
            _log.info("none of %d hosts computes block %d, which they claim", len(called), block)
        self.sightings.asked(asked.manifest, block, right, now=loop_time())

    async def _outputs(self, host: HostInfo, asked: Asked, span: Span, inputs: Array) -> Array | None:
        """Return what ``host`` computes from ``inputs`` with blocks ``span``; None if it does
        not."""
        request = pb.Begin(
            swarm=asked.swarm,
            manifest=asked.manifest,
            span=pb.Span(start=span[0], end=span[1]),
            counts=[len(inputs)],
            wire=ElementType.FLOAT32.value,
        )
        try:
            async with asyncio.timeout(TRIAL_S):
                if not await self.call(host):
                    return None
                stream = await PASS.open(self._transport, host.peer, self._timing, addresses=host.addresses)
                [outputs] = await request_pass(stream, request, [inputs], [inputs.shape], self._timing)
        except PeerUnreachable:
            self.sightings.failed(host.peer, now=loop_time())
            return None
        except (SwarmnetError, TimeoutError) as error:  # the host may be busy, or have moved
            _log.debug("%s does not compute: %s", host.peer, error)
            return None
        return as_float32(outputs)

    def _is_right(self, peer: PeerId, trial: Trial, outputs: Array) -> bool:
        if trial.agrees(outputs):
            return True
        _log.warning("%s claims blocks %d:%d and computes something else", peer, *trial.span)
        self.sightings.refuted(peer, now=loop_time())
        return False

    def _place_of(self, address: str) -> str:
        """Return the subnet of ``address``, or empty if it is unknown.

        Also empty for a network of this node: strangers have no addresses there.
        """
        subnet = subnet_of(address)
        if not subnet or not ip_address(subnet.partition("/")[0]).is_global:
            return ""
        return "" if subnet in {subnet_of(each) for each in self._transport.addresses()} else subnet


def _subnets(hosts: Mapping[PeerId, HostInfo]) -> dict[PeerId, str]:
    """Return the subnet that each host announces. Empty if it announces none."""
    return {peer: subnet_of(next(iter(host.addresses), "")) for peer, host in hosts.items()}
