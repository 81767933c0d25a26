"""The description of a paused node for the program that replaces it (``swarmnet/restart.py``)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Resting:
    """A paused node: its model and the blocks that it hosted."""

    model: str
    manifest: str
    """The SHA-256 of the model's manifest, as hexadecimal digits."""
    total_blocks: int
    start: int
    end: int
    """The end of the blocks. 0 if the node had not chosen any."""
    reason: str
    """The reason why the node serves these blocks, for its owner."""
    may_move: bool
