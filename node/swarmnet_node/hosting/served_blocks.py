"""The blocks that a host serves."""

from dataclasses import dataclass

from swarmnet_node.engine.engine import Engine
from swarmnet_node.engine.stage import Stage
from swarmnet_protocols.routing.spans import Span


@dataclass(frozen=True)
class ServedBlocks:
    """Blocks [start, end), numbered as in the whole model, and the engine that computes them."""

    engine: Engine
    start: int

    @property
    def end(self) -> int:
        return self.start + self.engine.stage.blocks

    def have(self, span: Span) -> bool:
        """Return whether all blocks of ``span`` [start, end) are served. False for an empty
        span."""
        return self.start <= span[0] < span[1] <= self.end

    def stage(self, span: Span) -> Stage:
        """Return the part of the engine's stage with the blocks of ``span``."""
        return self.engine.stage.part(span[0] - self.start, span[1] - self.start)
