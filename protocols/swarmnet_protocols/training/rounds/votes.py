"""The votes of one averaging round, as one member knows them.

Every member votes once in a round, for one outcome, and signs its vote. The signed votes of a
majority decide the round. Two majorities share a member, so two outcomes of one round need a member
that signed both. A decision travels with its votes and counts only with them. So no member has to
believe another one.

The sender of a decision signs it, too. So a false decision proves its sender dishonest, like two
votes of one member. Any member can check such a proof. A member that has one sends it to the
others. Otherwise a liar could lie to one member only: that member would exclude the liar, and the
others would not.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swarmnet_protocols.net.identity import verify
from swarmnet_protocols.training.rounds.messages import Accusation, Decided, Hashes, Vote

UNSIGNED = "sent a vote that it did not sign"
UNVOTED = "sent a decision without the votes of a majority"
TWICE = "voted for two outcomes of one round"
SLANDER = "accused another one without proof"

_DOMAIN = b"swarmnet-round-vote-1"
_DECISION_DOMAIN = b"swarmnet-round-decision-1"


@dataclass(frozen=True)
class Fault:
    """A dishonest act of a member. ``proof`` convinces others of it; None if there is no proof."""

    member: int
    reason: str
    proof: Accusation | None = None


@dataclass(frozen=True)
class Electorate:
    """The voters of a round: this member, ``me``, which can ``sign``, and the public keys of all
    members.

    ``terms``: SHA-256 of the round's terms.
    """

    me: int
    keys: Sequence[bytes]
    terms: bytes
    sign: Callable[[bytes], bytes]

    @property
    def majority(self) -> int:
        """The least number of votes that decides."""
        return len(self.keys) // 2 + 1


class Votes:
    """The votes that one member has cast and counted, and the decision once it knows one."""

    def __init__(self, electorate: Electorate) -> None:
        self.decided: Decided | None = None
        self._electorate = electorate
        self._counted: dict[int, Vote] = {}
        self._proven: set[int] = set()
        """Members of whom ``receive`` has returned a fault with a proof."""

    @property
    def own(self) -> Vote | None:
        """This member's vote; None until it has voted."""
        return self._counted.get(self._electorate.me)

    def cast(self, hashes: Hashes) -> Vote:
        """Vote for ``hashes``. If this member has voted before, returns its earlier vote."""
        signature = self._electorate.sign(self._signed(hashes))
        return self._counted.setdefault(self._electorate.me, Vote(hashes, signature))

    def receive(self, member: int, message: Vote | Decided | Accusation) -> list[Fault]:
        """Take over a message that ``member`` sent. Returns the faults of dishonest members that
        the message shows.

        A fault with a proof is returned once for each dishonest member.
        """
        match message:
            case Vote():
                accusations = self._count(member, message)
            case Decided():
                accusations = self._learn(member, message)
            case _:
                accusations = [message]
        faults = []
        for accusation in accusations:
            if accusation.member in self._proven:
                continue
            if self._proves(accusation):
                self._proven.add(accusation.member)
                faults.append(Fault(accusation.member, _reason(accusation), accusation))
            elif isinstance(message, Accusation):
                faults.append(Fault(member, SLANDER))
            else:
                faults.append(Fault(accusation.member, _reason(accusation)))
        return faults

    def _count(self, member: int, vote: Vote) -> list[Accusation]:
        """Count a vote that ``member`` sent. Returns an accusation if the member is dishonest.

        The accusation has no proof if the member did not sign the vote.
        """
        known = self._counted.get(member)
        if known == vote:
            return []
        if not self._is_signed(member, vote.hashes, vote.signature):
            return [Accusation(member)]
        if known is not None:
            return [Accusation(member, votes=(known, vote))]
        self._counted[member] = vote
        return []

    def _learn(self, member: int, decided: Decided) -> list[Accusation]:
        """Take over a decision that ``member`` sent. Returns accusations of dishonest members.

        A majority has signed each of two decisions, so members with votes in both have voted twice.
        """
        known = self.decided
        if known is not None and known.hashes == decided.hashes:
            return []
        if not self._has_majority(decided):
            return [Accusation(member, decided)]
        if known is None:
            self.decided = decided
            return []
        first, second = dict(known.votes), dict(decided.votes)
        return [
            Accusation(each, votes=(Vote(known.hashes, first[each]), Vote(decided.hashes, second[each])))
            for each in sorted(first.keys() & second.keys())
        ]

    def tally(self) -> Decided | None:
        """Return the decision if the counted votes make one."""
        outcomes = Counter(vote.hashes for vote in self._counted.values())
        for hashes, count in outcomes.items():
            if count >= self._electorate.majority:
                votes = sorted(self._counted.items())
                return Decided(
                    hashes, tuple((member, vote.signature) for member, vote in votes if vote.hashes == hashes)
                )
        return None

    def likely(self, unheard: int) -> Hashes | None:
        """Return the outcome that a coordinator has to propose; None if it is free to choose.

        It has to propose an outcome that may be decided already, or else its own vote. ``unheard``
        is the number of members whose votes are unknown.
        """
        outcomes = Counter(vote.hashes for vote in self._counted.values())
        for hashes, count in outcomes.most_common(1):
            if count + unheard >= self._electorate.majority:
                return hashes
        return None if self.own is None else self.own.hashes

    def signed(self, decided: Decided) -> Decided:
        """Return ``decided`` with this member's signature, as it is sent."""
        return replace(decided, signature=self._electorate.sign(self._signed_decision(decided)))

    def _has_majority(self, decided: Decided) -> bool:
        """Return whether a majority has signed a decision."""
        signers = {member for member, _ in decided.votes}
        return len(signers) == len(decided.votes) >= self._electorate.majority and all(
            self._is_signed(member, decided.hashes, signature) for member, signature in decided.votes
        )

    def _proves(self, accusation: Accusation) -> bool:
        """Return whether an accusation proves that its member is dishonest, whoever sends it."""
        member, decided, votes = accusation.member, accusation.decided, accusation.votes
        if votes:
            outcomes = {vote.hashes for vote in votes}
            return len(outcomes) > 1 and all(
                self._is_signed(member, vote.hashes, vote.signature) for vote in votes
            )
        key = self._electorate.keys[member]
        return (
            decided is not None
            and verify(key, decided.signature, self._signed_decision(decided))
            and not self._has_majority(decided)
        )

    def _signed_decision(self, decided: Decided) -> bytes:
        votes = b"".join(member.to_bytes(4, "big") + signature for member, signature in decided.votes)
        digest = hashlib.sha256(b"".join(decided.hashes)).digest() + hashlib.sha256(votes).digest()
        return _DECISION_DOMAIN + self._electorate.terms + digest

    def _is_signed(self, member: int, hashes: Hashes, signature: bytes) -> bool:
        return verify(self._electorate.keys[member], signature, self._signed(hashes))

    def _signed(self, hashes: Hashes) -> bytes:
        return _DOMAIN + self._electorate.terms + hashlib.sha256(b"".join(hashes)).digest()


def _reason(accusation: Accusation) -> str:
    if accusation.votes:
        return TWICE
    return UNSIGNED if accusation.decided is None else UNVOTED
