"""Error feedback: what a codec lost of a contribution is in the next one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.training.codecs.base import Codec


@dataclass(frozen=True)
class _Sent:
    """A contribution on its way: what it is to say, and the error [n] that is in it."""

    start: int
    wanted: torch.Tensor
    error: torch.Tensor


class ErrorFeedback:
    """e <- decay * e + values; the payload is that of e; e <- e - decoded payload (SparseLoCo, arXiv 2508.15706).

    One vector e over all parameters, float32 [count], of which a round takes a range. That part is under way with the round
    from ``send`` to ``settle``, so that of two rounds under way only one has it. Where a round does not deliver, e is as it
    was before: whether the round's values are lost or come again is for the method to say.
    """

    def __init__(self, codec: Codec, count: int, decay: float = 1.0) -> None:
        self._codec = codec
        self._decay = decay
        self._error = torch.zeros(count)
        self._under_way: dict[int, _Sent] = {}

    def send(self, round: int, start: int, values: torch.Tensor) -> torch.Tensor:
        """What to contribute to a round instead of ``values``, float32 [n], which are those from ``start`` on.

        What was sent to this round or a later one before was not delivered.
        """
        for again in [each for each in self._under_way if each >= round]:
            self.settle(again, ())
        part = self._error[start : start + len(values)]
        error = part.clone()
        part.zero_()
        wanted = error * self._decay + values
        self._under_way[round] = _Sent(start, wanted, error)
        return wanted

    def settle(self, round: int, delivered: Sequence[tuple[int, int]]) -> None:
        """The round is over, and the [start, end) of what was sent to it, each encoded by itself, count. Nothing if none was."""
        sent = self._under_way.pop(round, None)
        if sent is None:
            return
        error = sent.error
        for start, end in delivered:
            part = sent.wanted[start:end]
            error[start:end] = part - self._codec.decode(self._codec.encode(part), end - start)
        self._error[sent.start : sent.start + len(error)] += error

    def owed(self) -> torch.Tensor:
        """e [count], as if nothing that is under way were delivered."""
        owed = self._error.clone()
        for sent in self._under_way.values():
            owed[sent.start : sent.start + len(sent.error)] += sent.error
        return owed

    def restore(self, owed: torch.Tensor) -> None:
        """Go on from what ``owed`` gave, with nothing under way. Raises ``IntegrityError`` for anything else."""
        self._check(owed)
        self._error = owed.clone()
        self._under_way = {}

    def _check(self, error: torch.Tensor) -> None:
        if error.shape != self._error.shape or error.dtype != torch.float32 or not error.isfinite().all():
            raise IntegrityError(
                f"{list(error.shape)[:8]} {error.dtype} is no error of this model, or not finite"
            )
