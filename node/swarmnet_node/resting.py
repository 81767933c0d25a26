"""What the program that continues a pause needs to know of the node (``swarmnet/restart.py``)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Resting:
    """What a paused node hosted."""

    model: str
    manifest: str
    """Its SHA-256, as hexadecimal digits."""
    total_blocks: int
    start: int
    end: int
    """The end of the blocks. 0 if the node had not chosen any."""
    reason: str
    """The reason why the node serves these blocks, for its owner."""
    may_move: bool
