"""The blocks of a model that a node hosts: how they are loaded, and what may take their place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swarmnet_node.engine.stage import Stage
from swarmnet_node.experts.trunk import ExpertOptions
from swarmnet_node.hosting.client_limits import ClientLimits
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_node.resting import Resting
from swarmnet_node.running_node import Hosted
from swarmnet_protocols.routing.model_needs import ServedModel
from swarmnet_protocols.routing.relocation import Relocation, Remembered
from swarmnet_protocols.routing.spans import Span


@dataclass(frozen=True)
class Placed:
    """The blocks [start, end) ``span`` that a node serves, and why. The node keeps them across a
    pause."""

    span: Span
    reason: str
    """The reason why the node serves these blocks, for its owner."""
    moved_from: Span | None = None
    """The blocks that the node served before. None if it has not moved."""

    def after(self, relocation: Relocation) -> "Placed":
        """Return what the node serves after ``relocation`` within its model."""
        return Placed(relocation.span, relocation.reason, self.span)


class OtherModels(Protocol):
    """The other models of the swarm that a node may switch to."""

    @property
    def manifests(self) -> Sequence[bytes]:
        """The manifest hashes of the models in the swarm file, without the node's own model."""

    def own(self) -> ServedModel:
        """Return the model of the node, without claims."""

    async def read(self, manifest: bytes, blocks: int) -> ServedModel:
        """Return another model, without claims.

        ``blocks``: how many the node hosts now. They decide how many blocks of the other model fit
        in their place. Raises ``SwarmnetError`` if its outline is not on this machine and cannot be
        fetched.
        """

    async def hosting(self, manifest: bytes, weight_bytes: int, limits: OwnerLimits) -> "Hosting":
        """Return the hosting of one of the models, within ``limits``.

        If the limits do not bound memory, the blocks take at most ``weight_bytes``, like the
        current ones. Raises ``SwarmnetError`` if the model cannot be read or does not fit.
        """


@dataclass(frozen=True, kw_only=True)
class Hosting(Hosted):
    """The blocks that a node hosts: ``placed``, or ``num_blocks`` where the swarm needs them most.

    ``load(start, end)`` loads the stage: on the torch thread, or on another thread for a move.
    """

    load: Callable[[int, int], Stage]
    load_on_cpu: Callable[[int, int], Stage] | None = None
    """Loads blocks into the machine's memory, to check other hosts. None for ``load``."""
    num_blocks: int = 0
    may_move: bool = False
    """True if the node may serve other blocks when the swarm needs them more, and fewer when its
    owner allows less memory."""
    most_blocks: int = 0
    """The number of blocks that it may grow to when it moves. 0 forbids growing."""
    max_cache_bytes: int = 1 << 30
    limits: ClientLimits = field(default_factory=ClientLimits)
    experts: ExpertOptions | None = None
    """Options for experts that peers compute for the node, and the node for other hosts. None if
    the node has all experts of its blocks."""
    others: OtherModels | None = None
    """The models that the node may switch to. None if it keeps its own."""

    # The supervisor of the node sets these.
    fitting: Callable[[int], int] = int
    """Takes the node's number of blocks. Returns how many its owner's limits allow, at least 1."""
    has_room: Callable[[int], bool] = lambda _: True
    """Returns whether this many bytes of further weights fit into the memory."""
    on_move: Callable[[], None] = lambda: None
    """Called when the node has moved to other blocks while it serves."""

    # These change from one run of the node to the next.
    placed: Placed | None = None
    former_model: str = ""
    """The name of the model before a switch to this one. Empty if the node joined with this one."""
    model_reason: str = ""
    """The reason why the node switched, for its owner."""
    memory: Remembered = field(default_factory=Remembered)
    """Memory of the swarm and of earlier relocations."""

    @property
    def resting(self) -> Resting:
        """The description of this node for the program that replaces it in a pause."""
        span, reason = ((0, 0), "") if self.placed is None else (self.placed.span, self.placed.reason)
        return Resting(
            self.model, self.manifest.hex(), self.total_blocks, *span, reason, may_move=self.may_move
        )

    @property
    def is_chosen(self) -> bool:
        """True if the blocks of the node are already known."""
        return self.placed is not None

    @property
    def may_relocate(self) -> bool:
        """True if the node may serve other blocks, or another model."""
        return self.may_move or self.others is not None
