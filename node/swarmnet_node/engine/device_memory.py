"""Device memory: how many blocks fit onto accelerators, and how they are spread over cards. Pure.

The usable memory of each card holds the weights of its blocks, their share of the KV caches, and
the temporary memory of one forward. If all wanted blocks fit that way, quantised weights are
expanded when loaded, because products with expanded weights move fewer bytes. Otherwise they stay
packed, so that more blocks fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnet_node.engine.memory_account import GIB, MIB, activation_bytes
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.machine.devices import MOST_SHARE, Card, allowed_bytes
from swarmnet_protocols.models.sizes import LayerWidths
from swarmnet_protocols.quantization.products import ACCELERATOR_PANEL_BYTES
from swarmnet_protocols.session.passes import MAX_POSITIONS

if TYPE_CHECKING:
    import torch

LIBRARY_BYTES = 256 * MIB
"""Bytes for workspaces of libraries, recorded graphs, and fragmentation."""
UNPACKED_PANELS = 4
"""Panels in memory while one is unpacked: digits, products, sums, and the panel in the dtype of the
product."""


@dataclass(frozen=True)
class BlockNeeds:
    """The memory that the largest block of the model needs on an accelerator."""

    packed_bytes: int
    """Bytes of its weights, with quantised matrices as the checkpoint stores them.
    ``expanded_bytes`` if it has none."""
    expanded_bytes: int
    widths: LayerWidths
    dtype_bytes: int

    def weight_bytes(self, *, packed: bool) -> int:
        return self.packed_bytes if packed else self.expanded_bytes

    def scratch_bytes(self, *, packed: bool) -> int:
        """Return the bytes that a card needs in addition to weights and caches.

        The larger need counts: the largest forward, or a second copy of one block while its
        matrices are joined.
        """
        forward = activation_bytes(MAX_POSITIONS, self.widths, self.dtype_bytes)
        unpacking = UNPACKED_PANELS * ACCELERATOR_PANEL_BYTES if packed else 0
        return LIBRARY_BYTES + max(forward + unpacking, self.weight_bytes(packed=packed))


@dataclass(frozen=True)
class DeviceLayout:
    """The numbers of consecutive blocks that ``cards`` hold.

    ``packed``: whether quantised weights stay packed.
    """

    cards: tuple[Card, ...]
    blocks: tuple[int, ...]
    packed: bool
    needs: BlockNeeds
    cache_bytes: int

    @property
    def total(self) -> int:
        return sum(self.blocks)

    def devices(self, blocks: int) -> "list[torch.device]":
        """Return the device of each of the first ``blocks`` blocks, card by card.

        ``blocks`` is ``total``, or 1 for a block to be measured.
        """
        spread_over = [
            card.device for card, count in zip(self.cards, self.blocks, strict=True) for _ in range(count)
        ]
        return spread_over[:blocks]

    def describe(self, total_blocks: int) -> str:
        """Return a sentence for the owner: how many blocks are hosted, and why."""
        each = self.needs.weight_bytes(packed=self.packed)
        scratch = self.needs.scratch_bytes(packed=self.packed)
        where = " and ".join(
            f"{count} on {card.name} ({card.free_bytes / GIB:.1f} of {card.total_bytes / GIB:.1f} GiB free)"
            for card, count in zip(self.cards, self.blocks, strict=True)
            if count
        )
        form = ", weights as the checkpoint packs them" if self.packed else ""
        return (
            f"{self.total} of {total_blocks} blocks fit: {where}; a block takes {each / MIB:.0f} MiB{form}, the sessions of clients "
            f"{self.cache_bytes / MIB:.0f} MiB, computing {scratch / MIB:.0f} MiB of each card"
        )


def fit_on_cards(  # noqa: PLR0913 - memory, needs and limits, each a number
    cards: Sequence[Card],
    needs: BlockNeeds,
    *,
    wanted: int,
    is_fixed: bool,
    cache_bytes: int,
    most: float | None,
    forms: Sequence[bool] = (False, True),
) -> DeviceLayout:
    """Lay out ``wanted`` blocks, or unless ``is_fixed`` as many as fit.

    - ``forms``: the permitted values of ``packed``. The first with the most blocks wins.
    - ``cache_bytes``: bytes for the KV caches of all blocks.
    - ``most``: the owner's limit for each card. At most 1: a share. Otherwise bytes.

    Raises ``OutOfResources`` if fixed blocks do not fit, or no block does.
    """
    packed, counts = forms[0], (0,) * len(cards)
    for form in forms:
        found = _counts(cards, needs, wanted, cache_bytes, most, packed=form)
        if sum(found) > sum(counts):
            packed, counts = form, found
    fitting = sum(counts)
    if fitting == 0 or (is_fixed and fitting < wanted):
        free = sum(card.free_bytes for card in cards) / GIB
        fewer = f"host fewer blocks: --num-blocks {fitting}, or " if fitting else ""
        raise OutOfResources(
            f"{wanted} blocks do not fit into the {free:.1f} GiB that are free on {', '.join(card.name for card in cards)}",
            hint=f"{fewer}allow less for sessions: --max-cache, or more in all: --max-gpu-mem; --device cpu uses the memory of the machine",
        )
    return DeviceLayout(tuple(cards), counts, packed, needs, cache_bytes)


def room_bytes(card: Card, most: float | None) -> int:
    """Return the bytes that a node may allocate on a card.

    At most ``most``, and together with other programs at most ``MOST_SHARE`` of the card.
    """
    unused = card.free_bytes - int((1 - MOST_SHARE) * card.total_bytes)
    return max(0, min(unused, allowed_bytes(most, card.total_bytes)))


def _counts(
    cards: Sequence[Card],
    needs: BlockNeeds,
    wanted: int,
    cache_bytes: int,
    most: float | None,
    *,
    packed: bool,
) -> tuple[int, ...]:
    """Return the number of blocks for each card: ``wanted`` in total, or as many as fit.

    A block's share of the caches is on the card of the block.
    """
    scratch = needs.scratch_bytes(packed=packed)
    rooms = [max(0, room_bytes(card, most) - scratch) for card in cards]
    for count in range(wanted, 0, -1):
        each = needs.weight_bytes(packed=packed) + -(-cache_bytes // count)
        if sum(room // each for room in rooms) >= count:
            return spread(count, rooms)
    return (0,) * len(cards)


def spread(count: int, rooms: Sequence[int]) -> tuple[int, ...]:
    """Divide ``count`` blocks in proportion to ``rooms`` by the method of D'Hondt.

    At least one room must be above 0. The method minimises the largest filled share of a card's
    room. So if blocks of one size fit at all, they fit this way.
    """
    counts = [0] * len(rooms)
    for _ in range(count):
        fullest = [
            (had + 1) / room if room else float("inf") for had, room in zip(counts, rooms, strict=True)
        ]
        counts[fullest.index(min(fullest))] += 1
    return tuple(counts)
