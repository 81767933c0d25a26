"""The books of a round: which worker counts which microbatch. Pure.

An origin has a ``MicrobatchLedger`` of its own microbatches. Every other worker has ``Accounts``:
the entries of all origins that name it. A worker counts a microbatch only if an origin lists it, so
no microbatch counts twice. A stage commits a round only if its exchange has the tokens of all
microbatches, so none is lost.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.pipeline.microbatches import MicrobatchId

ELECTORS = 3
"""Origins whose word on the end of a round counts at a worker: two of them decide. With one, an
origin that lies decides alone. With more, origins hold more conversations."""
MAX_ATTEMPTS = 8
"""Exchanges of a stage in one round. The last one commits what it has, because a stage that waits
for a lost microbatch for ever trains nothing."""


@dataclass
class MicrobatchLedger:
    """An origin's microbatches of one round, and their workers."""

    tokens: dict[int, int] = field(default_factory=dict)
    """Predicted tokens of each microbatch that is home."""
    chains: dict[int, tuple[PeerId, ...]] = field(default_factory=dict)
    """The workers of stages 1, 2, ... that computed each microbatch."""
    confirmed: dict[PeerId, dict[int, int]] = field(default_factory=dict)
    """Microbatches that each worker has confirmed to count."""

    def enter(self, number: int, chain: tuple[PeerId, ...], tokens: int) -> None:
        """Enter a microbatch that is home, or that came home again with other workers."""
        self.chains[number], self.tokens[number] = chain, tokens

    def listed(self, peer: PeerId) -> dict[int, int]:
        """Return the microbatches that a worker counts, with their tokens."""
        return {number: self.tokens[number] for number, chain in self.chains.items() if peer in chain}

    def workers(self, stage: int) -> set[PeerId]:
        """Return the workers of a stage that count a microbatch."""
        return {chain[stage - 1] for chain in self.chains.values()}

    def confirm(self, peer: PeerId, listed: Mapping[int, int], missing: Collection[int]) -> None:
        """Note a worker's answer to a listing."""
        self.confirmed[peer] = {number: tokens for number, tokens in listed.items() if number not in missing}

    @property
    def is_confirmed(self) -> bool:
        """True if every worker has confirmed what it counts."""
        peers = {peer for chain in self.chains.values() for peer in chain}
        return all(self.confirmed.get(peer) == self.listed(peer) for peer in peers)

    def absent(self, stage: int, contributors: Collection[PeerId]) -> set[PeerId]:
        """Return the workers of a stage whose microbatches an exchange did not have.

        Empty unless most workers of the stage were in the exchange.
        """
        workers = self.workers(stage)
        found = workers - set(contributors)
        return found if 2 * len(found) < len(workers) else set()


@dataclass(frozen=True)
class StepEnd:
    """The end of a round in stage 0: the origins that count, and their tokens."""

    origins: tuple[PeerId, ...]
    tokens: int


def electors(round: int, worker: PeerId, origins: Collection[PeerId], most: int) -> list[PeerId]:
    """Return at most ``most`` origins that tell a worker how a round ended, in the same order for
    all.

    ``origins``: the origins that counted in the last round. Only they vote, so invented workers do
    not. The hash decides, so no origin chooses whom it tells.
    """

    def place(origin: PeerId) -> bytes:
        return sha256(f"{round}/{worker}/{origin}".encode()).digest()

    return sorted(origins, key=place)[:most]


@dataclass
class Accounts:
    """Lists and ends of one round, as its origins told them to one worker."""

    lists: dict[PeerId, dict[int, int]] = field(default_factory=dict)
    """Origin → microbatch → predicted tokens."""
    ends: dict[PeerId, StepEnd] = field(default_factory=dict)
    electors: frozenset[PeerId] = frozenset()
    """The origins whose word on the end counts (``electors``). Empty until one round has ended
    here."""
    lost: set[PeerId] = field(default_factory=set)
    """Origins whose conversation broke. They may list their microbatches elsewhere now."""

    def list(self, origin: PeerId, listed: dict[int, int]) -> None:
        """Replace what an origin lists."""
        self.lists[origin] = listed
        self.lost.discard(origin)

    def forget_lost(self) -> None:
        """Count nothing that lost origins list, because a microbatch counted twice."""
        for origin in self.lost:
            self.lists.pop(origin, None)

    def end(self) -> StepEnd | None:
        """Return the end that half of the electors or more report, or None.

        Without electors, return the end that most origins report.
        """
        electors = self.electors or self.ends.keys()
        votes = Counter(end for origin, end in self.ends.items() if origin in electors)
        best = min(votes, key=lambda end: (-votes[end], end.origins, end.tokens), default=None)
        return best if best is not None and 2 * votes[best] >= len(self.electors) else None

    def counted(self, round: int) -> dict[MicrobatchId, int]:
        """Return the microbatches that count here, with their tokens. Empty before the end."""
        end = self.end()
        origins: Sequence[PeerId] = end.origins if end is not None else ()
        return {
            MicrobatchId(round, origin, number): tokens
            for origin in sorted(set(origins))
            for number, tokens in sorted(self.lists.get(origin, {}).items())
        }


def steps_are_over(accounts: Mapping[int, Accounts], round: int) -> bool:
    """Return whether the inner steps of a round are over, in a job whose origins list nothing.

    All origins that told of the round have ended it, or one has ended a later round. A worker does
    not wait for an origin whose conversation broke.
    """
    if any(each.ends for later, each in accounts.items() if later > round):
        return True
    here = accounts.get(round, Accounts())
    told = here.lists.keys() - (here.lost - here.ends.keys())
    return bool(told) and told <= here.ends.keys()


def lacking_tokens(end: StepEnd, tokens: float, attempt: int) -> int | None:
    """Return how many tokens an exchange with ``tokens`` lacks, or None if its stage repeats it.

    ``attempt``: the exchanges of this round before it, equal at all members.
    """
    lacking = end.tokens - round(tokens)
    is_committed = lacking == 0 or (attempt >= MAX_ATTEMPTS and 0 <= tokens < end.tokens)
    return lacking if is_committed else None
