"""One lane of a chain, as the client remembers it for an audit: what it sent, and what came home. No I/O."""

from dataclasses import dataclass, field

import torch

from swarmnet_client.audit.plan import Plan
from swarmnet_protocols.session.received_digests import MAX_DIGEST_POSITIONS
from swarmnet_protocols.session.steps import Row


@dataclass(eq=False)
class Watched:
    """The first positions of a lane since it began. ``failovers``: how often the chain had been mended by then.

    ``changes`` counts how often positions were dropped since: what was asked before such a change says nothing after it.
    """

    sequence: int
    failovers: int
    changes: int = 0
    length: int = 0
    plan: Plan | None = None
    _inputs: list[torch.Tensor] = field(default_factory=list)
    _outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    def cut(self, length: int) -> None:
        """Positions from ``length`` on are dropped."""
        self.changes += 1
        self.length = min(self.length, length)
        self._inputs = [torch.cat(self._inputs)[:length]] if self._inputs and length else []
        self._outputs = {at: output for at, output in self._outputs.items() if at < length}

    def add(self, row: Row, values: torch.Tensor, outputs: torch.Tensor) -> None:
        """A row has come home: ``values`` [count, ...] were sent, ``outputs`` [wanted, D] came."""
        if row.start < MAX_DIGEST_POSITIONS:
            self._inputs.append(values[: MAX_DIGEST_POSITIONS - row.start].clone())
        wanted = [*range(row.start, row.start + row.first), *range(row.end - row.outputs, row.end)]
        for at, output in zip(wanted, outputs, strict=True):
            if at < MAX_DIGEST_POSITIONS:
                self._outputs[at] = output.clone()
        self.length = row.end

    def inputs(self, count: int) -> torch.Tensor:
        """What was sent for the first ``count`` positions, ``MAX_DIGEST_POSITIONS`` at most."""
        return torch.cat(self._inputs)[:count]

    def outputs(self, count: int) -> tuple[list[int], torch.Tensor]:
        """Those of the first ``count`` positions whose outputs the client has, and the outputs."""
        known = sorted(at for at in self._outputs if at < count)
        return known, torch.stack([self._outputs[at] for at in known])
