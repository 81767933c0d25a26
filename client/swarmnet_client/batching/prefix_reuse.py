"""Prefix reuse: which KV caches a prompt starts from, and which are dropped. No I/O
(docs/decisions/0073).

1. A finished sequence keeps its KV caches.
2. A new prompt reuses the longest cached prefix of the same owner, even of a sequence that is still
   running. If the prompt extends a free sequence, it continues that sequence; otherwise it forks.
3. A prompt that shares its beginning with one being sent waits until that one has been sent.
4. To keep all caches within a limit, the least recently used are dropped first.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from swarmnet_client.batching.answers import Answer, Request
from swarmnet_client.model.drafts.speculation import Speculator, common_prefix
from swarmnet_protocols.session.steps import MAX_SEQUENCE, Row

FRESH = MAX_SEQUENCE
"""The number of a sequence that is always empty. A row that starts from it gets fresh KV caches,
and its old ones are freed."""
MIN_SHARED = 16
"""Least tokens that a request must share with old KV caches for these to be reused."""


def common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of equal ids at the beginning of both; 0 below ``MIN_SHARED``."""
    count = common_prefix(ids, others)
    return count if count >= MIN_SHARED else 0


@dataclass(eq=False)
class RunningSequence:
    """One sequence of the chain.

    ``held``: the ids whose KV caches the hosts have, for ``owner``. ``todo``: the ids to send for
    ``answer``.
    """

    number: int
    held: list[int] = field(default_factory=list)
    owner: str = ""
    used: int = 0
    answer: Answer | None = None
    todo: list[int] = field(default_factory=list)
    start: int = 0
    """The position of the first of ``todo``."""
    is_decoding: bool = False
    """True if ``todo`` has only the newest tokens of ``answer``: the prompt has been sent."""
    has_begun: bool = False
    """True if a part of ``answer`` has been sent, so that ``held`` belongs to it."""
    speculator: Speculator = field(default_factory=Speculator)

    @property
    def reads_all(self) -> bool:
        """True if a reader takes the outputs of all positions of the next row."""
        return self.answer is not None and self.answer.request.reads_all and not self.is_decoding

    def shared(self, request: Request) -> int:
        """Return how many leading prompt ids are cached for the same owner; 0 below ``MIN_SHARED``.

        The prompt's last id does not count: it must be computed.
        """
        can_share = self.owner == request.owner and not request.reads_all
        return common(self.held, request.ids[:-1]) if can_share else 0

    def will_share(self, request: Request) -> int:
        """Return what ``shared`` will return once the prompt that is being sent has been sent
        completely."""
        is_sending = self.answer is not None and self.has_begun and self.owner == request.owner
        can_share = is_sending and not request.reads_all
        return common([*self.held, *self.todo], request.ids[:-1]) if can_share else 0

    def row(
        self, count: int, draft: Sequence[int] = (), origin: "Origin | None" = None
    ) -> tuple[Row, list[int]]:
        """Return the next ``count`` ids and a draft after them, as a row and as ids.

        ``held`` is updated as if they had been computed. ``origin``: the caches that the first row
        of an answer starts from.
        """
        source, before = self.number, self.held
        if origin is not None and self.answer is not None:
            self.has_begun, self.owner = True, self.answer.request.owner
            self.start, self.todo = len(origin.ids), self.todo[len(origin.ids) :]
            if origin.number != self.number:
                source, before = origin.number, origin.ids
        ids, self.todo = [*self.todo[:count], *draft], self.todo[count:]
        rewrite = source != self.number or self.start < len(before)
        outputs = 0 if self.todo else 1 + len(draft)
        first = len(ids) - outputs if self.reads_all else 0
        row = Row(self.number, self.start, len(ids), outputs, source, rewrite, first)
        self.held = [*before[: self.start], *ids] if rewrite else self.held
        if not rewrite:
            self.held.extend(ids)  # in place: a long answer would be copied with each token
        self.start += len(ids)
        return row, ids

    def forget(self) -> None:
        """Count no KV caches as held, except the one position that ``drop`` leaves."""
        self.held, self.owner = [0], ""

    def drop(self) -> tuple[Row, list[int]]:
        """Return a row that frees the KV caches. One meaningless position remains."""
        self.forget()
        return Row(self.number, 0, 1, 0, FRESH, rewrite=True), [0]


@dataclass(frozen=True)
class Origin:
    """The KV caches that an answer starts from: the first ``ids`` of sequence ``number``."""

    number: int
    ids: list[int]


def pick_sequence(sequences: Sequence[RunningSequence], request: Request) -> RunningSequence:
    """Return the free sequence that a request should use.

    Prefer a sequence that the request continues, else the least recently used one, whose caches are
    lost. Spare the sequence that shares most of the prompt, so that the request can fork from it,
    unless no other is free.
    """
    free = sorted(
        (sequence for sequence in sequences if sequence.answer is None), key=lambda sequence: sequence.used
    )
    best = max(free, key=lambda sequence: sequence.shared(request))
    shared = best.shared(request)
    if shared and shared > len(best.held) - MIN_SHARED:
        return best
    return next((sequence for sequence in free if not shared or sequence is not best), best)


def find_origin(
    sequence: RunningSequence, sequences: Sequence[RunningSequence], request: Request
) -> Origin | None:
    """Return the KV caches that the answer to ``request`` starts from in ``sequence``.

    None: the answer waits. A prompt with the same beginning is being sent, and its caches will
    serve both.
    """
    best = max(sequences, key=lambda each: (each.shared(request), each is sequence))
    shared = best.shared(request)
    if any(each.will_share(request) >= shared + MIN_SHARED for each in sequences):
        return None
    if not shared:
        return Origin(FRESH if sequence.held else sequence.number, [])
    return Origin(best.number, best.held[:shared])


def to_drop(
    sequences: Sequence[RunningSequence],
    lengths: Mapping[int, int],
    coming: int,
    most: int,
    used_now: Set[int] = frozenset(),
) -> list[RunningSequence]:
    """Return the free sequences whose KV caches the next step drops.

    - First come sequences that the group or the chain gave up: their positions in the chain
      (``lengths``) differ from the positions they hold.
    - Then come the least recently used sequences, until ``coming`` more positions fit into
      ``most``. Sequences in ``used_now`` are spared: an answer starts from them.

    Dropping all of them may still free too little.
    """
    over = coming + sum(len(sequence.held) for sequence in sequences) - most
    dropped = []
    for sequence in sorted(sequences, key=lambda each: each.used):
        if over <= 0:
            break
        if sequence.answer is None and len(sequence.held) > 1 and sequence.number not in used_now:
            dropped.append(sequence)
            over -= len(sequence.held) - 1
    free = (each for each in sequences if each.answer is None and each not in dropped)
    return [*dropped, *(each for each in free if lengths.get(each.number, 0) != len(each.held))]


def begin_alike(one: RunningSequence, other: RunningSequence, shared: int) -> bool:
    """Return whether two unsent prompts of one owner share more than the ``shared`` ids already
    held."""
    if one.answer is None or other.answer is None or one.answer.request.owner != other.answer.request.owner:
        return False
    if other.reads_all:
        return False
    return common(one.todo, other.todo[:-1]) >= shared + MIN_SHARED
