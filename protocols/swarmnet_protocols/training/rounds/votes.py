"""The votes of one averaging round, as one member knows them.

Every member votes once in a round, for one outcome, and signs its vote. The signed votes of a majority decide the round. Two
majorities share a member, so two outcomes of one round need a member that signed both of them. A decision travels with its votes,
and counts only with them: no member has to believe another one.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarmnet_protocols.net.identity import verify
from swarmnet_protocols.training.rounds.messages import Decided, Hashes, Vote

_DOMAIN = b"swarmnet-round-vote-1"


@dataclass(frozen=True)
class Electorate:
    """Who votes in a round: member ``me`` with its key, and the public keys of all members. ``terms``: SHA-256 of the round's terms."""

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

    @property
    def own(self) -> Vote | None:
        """This member's vote; None until it has voted."""
        return self._counted.get(self._electorate.me)

    def cast(self, hashes: Hashes) -> Vote:
        """Vote for ``hashes``. Returns this member's vote, which is an earlier one if it has voted before."""
        signature = self._electorate.sign(self._signed(hashes))
        return self._counted.setdefault(self._electorate.me, Vote(hashes, signature))

    def count(self, member: int, vote: Vote) -> str:
        """Count a vote that ``member`` sent. Returns why the member is dishonest, "" if it is not."""
        known = self._counted.get(member)
        if known == vote:
            return ""
        if not self._is_signed(member, vote.hashes, vote.signature):
            return "sent a vote that it did not sign"
        if known is not None:
            return "voted for two outcomes of one round"
        self._counted[member] = vote
        return ""

    def tally(self) -> Decided | None:
        """The decision if the counted votes make one."""
        outcomes = Counter(vote.hashes for vote in self._counted.values())
        for hashes, count in outcomes.items():
            if count >= self._electorate.majority:
                votes = sorted(self._counted.items())
                return Decided(
                    hashes, tuple((member, vote.signature) for member, vote in votes if vote.hashes == hashes)
                )
        return None

    def likely(self, unheard: int) -> Hashes | None:
        """The outcome that a coordinator should propose because members have voted: it may be decided already, or is this member's own.

        ``unheard``: the members whose votes are unknown. None if the coordinator is free to choose.
        """
        outcomes = Counter(vote.hashes for vote in self._counted.values())
        for hashes, count in outcomes.most_common(1):
            if count + unheard >= self._electorate.majority:
                return hashes
        return None if self.own is None else self.own.hashes

    def fault_of(self, decided: Decided) -> str:
        """Why the sender of a decision is dishonest; "" if a majority has signed it."""
        signers = {member for member, _ in decided.votes}
        if len(signers) < max(len(decided.votes), self._electorate.majority) or not all(
            self._is_signed(member, decided.hashes, signature) for member, signature in decided.votes
        ):
            return "sent a decision without the votes of a majority"
        return ""

    def _is_signed(self, member: int, hashes: Hashes, signature: bytes) -> bool:
        return verify(self._electorate.keys[member], signature, self._signed(hashes))

    def _signed(self, hashes: Hashes) -> bytes:
        return _DOMAIN + self._electorate.terms + hashlib.sha256(b"".join(hashes)).digest()
