"""The options of a node."""

from dataclasses import dataclass, field
from pathlib import Path

from swarmnet_node.owner.limits import ONE_CLIENT, OwnerLimits
from swarmnet_node.resting import Resting
from swarmnet_protocols.joining.network import Network


@dataclass(frozen=True)
class NodeConfig:
    """The options of a node.

    The node hosts ``blocks`` [start, end), or ``num_blocks`` that it chooses. With neither, it
    hosts the whole model.
    """

    model: str
    network: Network
    swarm_name: str
    cache_dir: Path
    folder: Path
    """Folder of the files with the limits and the usage of this month."""
    max_disk_bytes: int | None = None
    """Most bytes for parts of models on disk. None for no limit."""
    blocks: tuple[int, int] | None = None
    num_blocks: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    """``auto``, or a name in ``devices.DTYPES`` or ``quantize.PRECISIONS``."""
    max_cache_bytes: int = 1 << 30
    max_block_bytes: int | None = None
    """Most bytes of the weights of all blocks. Only a switch to another model sets it. None for no
    such limit."""
    stay: bool = False
    """True if the node keeps the blocks that it chose when it joined."""
    keep_model: bool = False
    """True if the node never switches to another model of the swarm."""
    client_share: float = ONE_CLIENT
    """One client's share of sessions, passes, adapters, logs and KV caches, unless the swarm sets
    it."""
    max_wait_s: float = 20.0
    """Longest expected wait in seconds for a new session. Beyond it, the node refuses."""
    experts: str | None = None
    """Routed experts that the node hosts: text for ``parse_experts``, ``auto`` or ``none``. Without
    ``blocks`` and ``num_blocks`` the node hosts only experts. With them, peers compute the missing
    experts of its blocks. None for all experts of its blocks."""
    expert_memory_bytes: int | None = None
    """Bytes of memory for the routed experts of its blocks. The others stay on disk until they are
    needed. None: all experts, or as many as the memory limit holds."""
    max_expert_round_trip_s: float | None = None
    """Longest round trip in seconds to peers that compute experts. None: ``MAX_ROUND_TRIP_S``."""
    public_name: str = ""
    limits: OwnerLimits = field(default_factory=OwnerLimits)
    resting: Resting | None = None
    """The node before its restart for a pause. None without such a restart."""

    @property
    def may_switch(self) -> bool:
        """True if the owner lets the node switch to another model of the swarm."""
        names_parts = self.blocks is not None or self.experts is not None
        return not (self.keep_model or self.stay or names_parts or self.expert_memory_bytes is not None)
