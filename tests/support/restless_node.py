"""``swarmnet join`` whose node moves to other blocks every few seconds, and not only when the swarm needs it. It is unchanged otherwise.

python -m tests.support.restless_node PERIOD_S join SWARM --num-blocks N ...
"""

import sys
from typing import Any

from swarmnet.cli import main
from swarmnet_node import moving
from swarmnet_protocols.routing.rebalancing import Looks, Move, Outlook
from swarmnet_protocols.routing.throughput import Claim


def next_blocks(outlook: Outlook, mine: Claim, looks: Looks, **_: Any) -> tuple[Move, Looks]:
    """A move to the blocks that follow those of ``mine``; from the last blocks to the first."""
    length = mine.end - mine.start
    start = mine.end if mine.end + length <= outlook.blocks else 0
    return Move(start, start + length, "every look moves it"), looks


if __name__ == "__main__":
    moving.LOOK_S = float(sys.argv.pop(1))  # type: ignore[misc]
    moving.should_move = next_blocks  # type: ignore[assignment]
    main()
