"""``swarmnet join`` whose node moves to other blocks every few seconds, and not only when the swarm
needs it. It is unchanged otherwise.

python -m tests.bench.restless_node PERIOD_S join SWARM --num-blocks N ...
"""

import sys
from typing import Any

from swarmnet.cli import main
from swarmnet_node import relocating
from swarmnet_protocols.routing.relocation import Kind, Look, Relocation, Remembered


def next_blocks(look: Look, memory: Remembered, **_: Any) -> tuple[Relocation | None, Remembered]:
    """A move to the blocks that follow those of the node; from the last blocks to the first."""
    mine, blocks = look.mine, look.own.blocks
    length = mine.end - mine.start
    start = mine.end if mine.end + length <= blocks else 0
    if start == mine.start:
        return None, memory
    return Relocation(Kind.MOVE, start, start + length, "every look moves it"), memory


if __name__ == "__main__":
    relocating.LOOK_S = float(sys.argv.pop(1))  # type: ignore[misc]
    relocating.should_relocate = next_blocks  # type: ignore[assignment]
    main()
