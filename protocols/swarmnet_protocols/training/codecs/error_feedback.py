"""Error feedback: a lossy codec's error (the residual) is added to the next contribution."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.training.codecs.base import Codec


@dataclass(frozen=True)
class _InFlight:
    """A contribution whose round has not ended.

    It consists of ``values`` [n] from index ``start`` on. They include the ``residual`` [n].
    """

    start: int
    values: torch.Tensor
    residual: torch.Tensor


class ErrorFeedback:
    """e <- decay e + values; send Q(e); e <- e - Q(e), where Q is encoding and decoding.

    Error feedback with a decay: SparseLoCo, Sarfi et al., arXiv 2508.15706, algorithm 1. Without
    decay: EF-SGD, Karimireddy et al., arXiv 1901.09847, algorithm 1.

    The residual e is one vector over all parameters, float32 [count]. A round exchanges a range of
    it. From ``send`` to ``acknowledge`` the residual of this range belongs to the round, so another
    round in flight does not send it, too. If a round delivers nothing, e is restored to its value
    before ``send``. The method decides whether it sends the round's values again.
    """

    def __init__(self, codec: Codec, count: int, decay: float = 1.0) -> None:
        """``decay``: factor applied to the residual in each round."""
        self._codec = codec
        self._decay = decay
        self._residual = torch.zeros(count)
        self._in_flight: dict[int, _InFlight] = {}

    def send(self, round: int, start: int, values: torch.Tensor) -> torch.Tensor:
        """Return the contribution to ``round``: ``values`` with the residual added.

        ``values``, float32 [n], begin at index ``start``. If contributions to this round or a later
        one are in flight, the worker repeats these rounds. So they count as not delivered.
        """
        for repeated in [each for each in self._in_flight if each >= round]:
            self.acknowledge(repeated, ())
        part = self._residual[start : start + len(values)]
        residual = part.clone()
        part.zero_()
        corrected = residual * self._decay + values
        self._in_flight[round] = _InFlight(start, corrected, residual)
        return corrected

    def acknowledge(self, round: int, delivered: Sequence[tuple[int, int]]) -> None:
        """Update the residual after ``round`` has ended.

        ``delivered``: the slices [start, end) of the contribution that arrived. Each was encoded
        separately. Does nothing if no contribution to ``round`` is in flight.
        """
        sent = self._in_flight.pop(round, None)
        if sent is None:
            return
        residual = sent.residual
        for start, end in delivered:
            part = sent.values[start:end]
            residual[start:end] = part - self._codec.decode(self._codec.encode(part), end - start)
        self._residual[sent.start : sent.start + len(residual)] += residual

    def residual(self) -> torch.Tensor:
        """Return e [count]. Contributions in flight count as not delivered."""
        residual = self._residual.clone()
        for sent in self._in_flight.values():
            residual[sent.start : sent.start + len(sent.residual)] += sent.residual
        return residual

    def restore(self, residual: torch.Tensor) -> None:
        """Continue from a value that ``residual`` returned, with no contribution in flight.

        Raises ``IntegrityError`` for another shape or dtype, or a value that is not finite.
        """
        shape, dtype = list(residual.shape), residual.dtype
        if shape != list(self._residual.shape) or dtype != torch.float32 or not residual.isfinite().all():
            raise IntegrityError(f"{shape[:8]} {dtype} is not a residual of this model, or not finite")
        self._residual = residual.clone()
        self._in_flight = {}
