"""Audits one chain while its steps go on. Another host recomputes outputs of a hop; a third host
decides a mismatch.

1. The previous hop reports its outputs, which are the inputs of the audited hop. The audited hop
   reports its own outputs.
2. Both reports are compared with digests that the receivers report. The client is the sender to the
   first hop and the receiver from the last.
3. If two neighbours disagree, both are replaced, and not made neighbours again for a while. So a
   lying neighbour cannot have an honest host convicted.
4. If all agree, a witness recomputes the outputs from the same inputs.
5. If its outputs differ, a third host computes, too: from the same inputs if all three have exact
   arithmetic, otherwise from nudged inputs (``audit/verdict.py``).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from swarmnet_client.audit.plan import NEWCOMER_POSITIONS, AuditPlan, witnesses
from swarmnet_client.audit.verdict import Read, Verdict, judge, judge_exactly, nudged
from swarmnet_client.chain.hops import ChainReport, ChainSpec, HopTranscript, LiveHop, ask_pass
from swarmnet_client.chain.repair import ChainRepair
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError, Unreachable
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.routing.host_info import EXACT
from swarmnet_protocols.session.arrays import ElementType, split
from swarmnet_protocols.session.received_digests import MAX_DIGEST_POSITIONS, digest
from swarmnet_protocols.session.steps import Row
from swarmnet_protocols.session.wire_tensors import as_received
from swarmnet_protocols.wire import session_pb2 as pb

_log = logging.getLogger(__name__)

MAX_SEQUENCES_BYTES = 64 << 20
"""Bytes of outputs that every host keeps for transcripts.

Longer sessions are not audited, because their hosts may have dropped some outputs.
"""


@dataclass(eq=False)
class AuditedSequence:
    """The first positions of the sequence to audit next: what the client sent and received. No I/O.

    - ``failovers``: failovers of the chain when the sequence began.
    - ``changes``: how often positions were dropped. A transcript from before a change is useless
      after it.
    """

    sequence: int
    failovers: int
    changes: int = 0
    length: int = 0
    plan: AuditPlan | None = None
    _inputs: list[Array] = field(default_factory=list)
    _outputs: dict[int, Array] = field(default_factory=dict)

    def cut(self, length: int) -> None:
        """Drop the positions from ``length`` on."""
        self.changes += 1
        self.length = min(self.length, length)
        self._inputs = [np.concatenate(self._inputs)[:length]] if self._inputs and length else []
        self._outputs = {at: output for at, output in self._outputs.items() if at < length}

    def add(self, row: Row, values: Array, outputs: Array) -> None:
        """Add a row: ``values`` [count, ...] were sent, ``outputs`` [wanted, D] came back."""
        if row.start < MAX_DIGEST_POSITIONS:
            self._inputs.append(values[: MAX_DIGEST_POSITIONS - row.start].copy())
        wanted = [*range(row.start, row.start + row.first), *range(row.end - row.outputs, row.end)]
        for at, output in zip(wanted, outputs, strict=True):
            if at < MAX_DIGEST_POSITIONS:
                self._outputs[at] = output.copy()
        self.length = row.end

    def inputs(self, count: int) -> Array:
        """Return the inputs of the first ``count`` positions, as they were sent; ``count`` is at
        most ``MAX_DIGEST_POSITIONS``."""
        return np.concatenate(self._inputs)[:count]

    def outputs(self, count: int) -> tuple[list[int], Array]:
        """Return the positions among the first ``count`` whose outputs the client has, and these
        outputs."""
        known = sorted(at for at in self._outputs if at < count)
        return known, np.stack([self._outputs[at] for at in known])


SequenceVersion = tuple[AuditedSequence, int] | None
"""The watched sequence when a step was sent, and how often the sequence had changed by then."""


@dataclass(frozen=True)
class _ClaimedOutputs:
    """The inputs of a hop, and its outputs at the positions ``at``."""

    inputs: Array
    at: list[int]
    outputs: Array


class Auditor:
    """Audits hops of one chain. Sessions with an adapter are not audited: witnesses would need the
    adapter first."""

    def __init__(
        self,
        hosts: ModelHosts,
        spec: ChainSpec,
        repair: ChainRepair,
        report: ChainReport,
        embed: Callable[[Array], Array],
        read: Read | None = None,
    ) -> None:
        self._hosts = hosts
        self._ledger = hosts.ledger
        self._spec = spec
        self._repair = repair
        self._report = report
        self._embed = embed
        self._read = read
        self._lengths: dict[int, int] = {}
        self._watched: AuditedSequence | None = None
        self._news = asyncio.Event()

    # ---- steps of the chain --------------------------------------------------------------------

    def add_audited_outputs(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Return ``rows``, but ask also for outputs of the first positions of each new sequence,
        for audits of the last hop."""
        if self._spec.adapter is not None:
            return rows
        return tuple(
            replace(row, first=max(row.first, min(NEWCOMER_POSITIONS, row.count - row.outputs)))
            if row.start == 0
            else row
            for row in rows
        )

    def step_sent(self, rows: tuple[Row, ...]) -> SequenceVersion:
        """Note that a step is about to be sent. Pass the result to ``step_done``."""
        for row in rows:
            self._lengths[row.sequence] = row.end
            watched = self._watched
            is_mine = watched is not None and watched.sequence == row.sequence
            if row.start == 0:
                if watched is None or is_mine or self._ledger.rng.random() < 1 / len(self._lengths):
                    self._watched = AuditedSequence(row.sequence, self._report.failovers)
            elif watched is not None and is_mine and row.rewrite:
                if row.source == row.sequence:
                    watched.cut(row.start)
                else:
                    self._watched = None
        return None if self._watched is None else (self._watched, self._watched.changes)

    def step_done(
        self,
        version: SequenceVersion,
        asked: tuple[Row, ...],
        rows: tuple[Row, ...],
        values: Array,
        outputs: Array,
    ) -> Array:
        """Record the answer to a step. Return the outputs that the step ``asked`` for before
        ``add_audited_outputs`` added some."""
        self._ledger.earn(sum(row.count for row in rows) * self._spec.blocks)
        inputs = split(values, [row.count for row in rows])
        parts = split(outputs, [row.wanted for row in rows])
        watched = self._watched
        if watched is not None and version == (watched, watched.changes):
            for row, given, part in zip(rows, inputs, parts, strict=True):
                if row.sequence == watched.sequence and row.start == watched.length:
                    watched.add(row, given, part)
            self._news.set()
        if asked == rows:
            return outputs
        kept = zip(asked, rows, parts, strict=True)
        return np.concatenate(
            [each for want, row, part in kept for each in (part[: want.first], part[row.first :])]
        )

    # ---- audits ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Audit one hop at a time, whenever the budget allows."""
        if self._spec.adapter is not None:
            return
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                if self._watched is not None:
                    await self._audit(self._watched)
            except SwarmnetError as error:  # a host was out of reach: the next audit tries again
                _log.debug("an audit came to nothing", extra={"reason": str(error)[:200]})
            except Exception:  # noqa: BLE001 - a broken audit must not end the answer
                _log.exception("an audit broke")

    async def _audit(self, watched: AuditedSequence) -> None:
        hops = self._repair.whole
        if watched.failovers != self._report.failovers or self._is_large():
            return
        plan = watched.plan
        if plan is None or plan.hop not in [live.hop for live in hops]:
            able = [live.hop for live in hops if self._witnesses(live.hop, ())]
            if not able:
                return
            plan = watched.plan = self._ledger.plan(able)
        if watched.length < plan.positions or not self._ledger.may_spend(plan.cost):
            return
        index = next(index for index, live in enumerate(hops) if live.hop == plan.hop)
        watched.plan = None
        claimed = await self._claimed_outputs(watched, index, hops, plan.positions)
        if claimed is not None:
            await self._judge(plan, hops[index], claimed)

    def _is_large(self) -> bool:
        each_bytes = self._spec.hidden_size * self._spec.dtype.itemsize
        return sum(self._lengths.values()) * each_bytes > MAX_SEQUENCES_BYTES

    async def _claimed_outputs(
        self, watched: AuditedSequence, index: int, hops: tuple[LiveHop, ...], count: int
    ) -> _ClaimedOutputs | None:
        """Return the inputs and outputs of a hop, if the hop and its neighbours agree on them.

        Otherwise replace the hops that disagree and return None.
        """
        changes = watched.changes
        live = hops[index]
        before = hops[index - 1] if index else None
        after = hops[index + 1] if index + 1 < len(hops) else None
        asked = [each for each in (before, live, after) if each is not None]
        transcripts = dict(
            zip(
                asked,
                await asyncio.gather(*(self._show(each, watched, count) for each in asked)),
                strict=True,
            )
        )
        is_past = self._watched is not watched or watched.changes != changes
        if is_past or watched.failovers != self._report.failovers or hops != self._repair.whole:
            return None
        if any(answer is None for answer in transcripts.values()):
            for each in asked:
                if transcripts[each] is None:
                    self._repair.fail(each, Unreachable(f"{each.hop.peer} sends no transcript"))
            return None
        inputs = as_received(self._embed(watched.inputs(count)), self._spec.wire_of(hops[0].hop.precision))
        audited = transcripts[live]
        if audited is None:
            return None
        if before is not None:
            upstream = transcripts[before]
            inputs = inputs if upstream is None or upstream.sent is None else upstream.sent
        if audited.received != digest(inputs):
            self._disagree(before, live)
            return None
        if after is None:
            return _ClaimedOutputs(inputs, *watched.outputs(count))
        downstream = transcripts[after]
        if audited.sent is None or downstream is None or downstream.received != digest(audited.sent):
            self._disagree(live, after)
            return None
        return _ClaimedOutputs(inputs, list(range(count)), audited.sent)

    async def _show(self, live: LiveHop, watched: AuditedSequence, count: int) -> HopTranscript | None:
        """Return the transcript of a hop for a sequence; None if the hop does not answer."""
        is_last = live.hop.end == self._spec.blocks
        try:
            shown = await live.show(watched.sequence, count, within_s=self._hosts.timing.chunk_s)
            shape = None if is_last else (count, self._spec.hidden_size)
            return shown.checked(shape, self._spec.wire_of(live.hop.precision))
        except (SwarmnetError, TimeoutError):
            return None

    def _disagree(self, one: LiveHop | None, other: LiveHop) -> None:
        error = ProtocolViolation("two neighbours report different data between them")
        if one is None:
            self._repair.fail(other, error)
        else:
            self._repair.separate(one, other, error)

    async def _judge(self, plan: AuditPlan, live: LiveHop, claimed: _ClaimedOutputs) -> None:
        verdict, asked = Verdict.OPEN, tuple[PeerId, ...]()
        if self._has_equal_bits(plan.hop):
            verdict, asked = await self._compare(plan, claimed, exactly=True)
        if verdict is Verdict.OPEN:
            verdict, asked = await self._compare(plan, claimed, exactly=False)
        if asked:
            self._report.audits += 1
        if verdict is Verdict.WRONG:
            self._repair.convict(live)
        elif verdict is Verdict.RIGHT:
            self._ledger.passed(live.hop.peer)
        elif verdict is Verdict.DOUBTED_WITNESS:
            self._ledger.doubted.update(asked)

    def _has_equal_bits(self, hop: Hop) -> bool:
        """Return whether hosts of exact arithmetic answer with the bits of this hop.

        Not if outputs are rounded to 8 bits or to another type: rounding is not part of the
        arithmetic.
        """
        wire = self._spec.wire_of(hop.precision)
        if hop.end == self._spec.blocks:
            wire = wire.decoded  # the last hop sends no 8 bits to clients
        return hop.arithmetic == EXACT and {wire, self._spec.dtype} == {ElementType.FLOAT32}

    async def _compare(
        self, plan: AuditPlan, claimed: _ClaimedOutputs, *, exactly: bool
    ) -> tuple[Verdict, tuple[PeerId, ...]]:
        """Return a verdict by other hosts, and the second host. Open without enough hosts.

        ``exactly``: by hosts of exact arithmetic, bit for bit. Otherwise by hosts of any
        arithmetic, within bounds.
        """
        arithmetic = EXACT if exactly else None
        read = self._read if plan.hop.end == self._spec.blocks else None
        compare: Callable[..., Verdict] = judge_exactly if exactly else partial(judge, read=read)
        recomputed, asked = await self._recompute(plan, (claimed.inputs,), (), arithmetic)
        if not recomputed:
            return Verdict.OPEN, ()
        second = recomputed[0][claimed.at]
        verdict = await asyncio.to_thread(compare, claimed.outputs, second)
        if verdict is Verdict.OPEN:
            seed = self._ledger.rng.getrandbits(63)
            inputs = (claimed.inputs,) if exactly else nudged(claimed.inputs, seed)
            recomputed, _ = await self._recompute(plan, inputs, asked, arithmetic)
            if recomputed:
                third = [outputs[claimed.at] for outputs in recomputed]
                verdict = await asyncio.to_thread(compare, claimed.outputs, second, third)
        return verdict, asked

    async def _recompute(
        self,
        plan: AuditPlan,
        inputs: Sequence[Array],
        asked: tuple[PeerId, ...],
        arithmetic: str | None = None,
    ) -> tuple[Sequence[Array], tuple[PeerId, ...]]:
        """Have hosts other than ``asked`` compute the outputs of sequences [P, D], if given with
        this ``arithmetic``.

        Returns the outputs and these hosts; nothing if no other host answers.
        """
        cost = plan.cost * len(inputs)
        tried: tuple[PeerId, ...] = asked
        while path := self._witnesses(plan.hop, tried, arithmetic):
            tried = (*tried, *(hop.peer for hop in path))
            values = inputs
            self._ledger.charge(cost)
            try:
                for hop in path:
                    values = await self._pass(hop, values)
            except SwarmnetError as error:
                self._ledger.charge(-cost)
                _log.debug("a witness did not answer", extra={"reason": str(error)[:200]})
                continue
            return values, tuple(hop.peer for hop in path)
        return (), ()

    async def _pass(self, hop: Hop, sequences: Sequence[Array]) -> Sequence[Array]:
        counts = [len(values) for values in sequences]
        inputs = np.concatenate([*sequences])
        begin = pb.Begin(
            swarm=self._hosts.swarm_id,
            manifest=self._hosts.manifest,
            span=pb.Span(start=hop.start, end=hop.end),
            counts=counts,
            wire=self._spec.dtype.value,
        )
        (outputs,) = await ask_pass(self._hosts, hop, begin, (inputs,), [inputs.shape])
        return split(outputs, counts)

    def _witnesses(self, hop: Hop, tried: tuple[PeerId, ...], arithmetic: str | None = None) -> list[Hop]:
        """Return hosts outside of the chain that have the hop's precision and, if given, this
        ``arithmetic``.

        An audited host must not witness for itself or its neighbours. Quantised weights of another
        precision would differ by more than the tolerance.
        """
        in_chain = {live.hop.peer for live in self._repair.whole}
        without = frozenset({*in_chain, *tried, *self._ledger.doubted, *self._hosts.banned})
        return witnesses(self._hosts.known, hop, without, self._ledger.rng, arithmetic)
