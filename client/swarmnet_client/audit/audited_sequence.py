"""The sequence of a chain that is audited next: what the client sent, and what came back. No I/O."""

from dataclasses import dataclass, field

import torch

from swarmnet_client.audit.plan import Plan
from swarmnet_protocols.session.received_digests import MAX_DIGEST_POSITIONS
from swarmnet_protocols.session.steps import Row


@dataclass(eq=False)
class AuditedSequence:
    """The first positions of a sequence. ``failovers``: of the chain, when the sequence began.

    ``changes`` counts the times that positions were dropped: answers of hops from before such a change are of no use after it.
    """

    sequence: int
    failovers: int
    changes: int = 0
    length: int = 0
    plan: Plan | None = None
    _inputs: list[torch.Tensor] = field(default_factory=list)
    _outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    def cut(self, length: int) -> None:
        """Drop the positions from ``length`` on."""
        self.changes += 1
        self.length = min(self.length, length)
        self._inputs = [torch.cat(self._inputs)[:length]] if self._inputs and length else []
        self._outputs = {at: output for at, output in self._outputs.items() if at < length}

    def add(self, row: Row, values: torch.Tensor, outputs: torch.Tensor) -> None:
        """Add a row: ``values`` [count, ...] were sent, ``outputs`` [wanted, D] came back."""
        if row.start < MAX_DIGEST_POSITIONS:
            self._inputs.append(values[: MAX_DIGEST_POSITIONS - row.start].clone())
        wanted = [*range(row.start, row.start + row.first), *range(row.end - row.outputs, row.end)]
        for at, output in zip(wanted, outputs, strict=True):
            if at < MAX_DIGEST_POSITIONS:
                self._outputs[at] = output.clone()
        self.length = row.end

    def inputs(self, count: int) -> torch.Tensor:
        """The inputs of the first ``count`` positions, as they were sent; ``count`` is at most ``MAX_DIGEST_POSITIONS``."""
        return torch.cat(self._inputs)[:count]

    def outputs(self, count: int) -> tuple[list[int], torch.Tensor]:
        """The positions among the first ``count`` whose outputs the client has, and these outputs."""
        known = sorted(at for at in self._outputs if at < count)
        return known, torch.stack([self._outputs[at] for at in known])
