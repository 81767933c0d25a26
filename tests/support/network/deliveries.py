"""Faults of the simulated network, injected when a message is about to arrive."""

from collections.abc import Callable

from tests.support.network.memory_network import Delivery, MemoryNetwork


def once(
    network: MemoryNetwork, matches: Callable[[Delivery], bool], action: Callable[[Delivery], None]
) -> list[Delivery]:
    """Do ``action`` at the first delivery that ``matches``, before its receiver sees it.

    Returns a list that holds that delivery afterwards.
    """
    seen: list[Delivery] = []

    def observe(delivery: Delivery) -> None:
        if not seen and matches(delivery):
            seen.append(delivery)
            action(delivery)

    network.observers.append(observe)
    return seen
