"""Whom a host tries among announced peers with experts, and which of too many open links it
closes."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from swarmnet_node.experts import expert_links
from swarmnet_node.experts.expert_link import Backoff
from swarmnet_node.experts.expert_links import ExpertLinks, in_turn, only_holders
from swarmnet_protocols.directory.expert_announcements import ExpertBits
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.limits.subnets import Place
from tests.defences import defence, replacing

PEERS = [PeerId(each) for each in "abcdef"]


def test_peers_that_were_never_tried_come_first_in_random_order() -> None:
    tried = {PEERS[0]: 5.0, PEERS[1]: 3.0, PEERS[2]: 11.0}
    orders = {tuple(in_turn(PEERS, tried, 10.0, random.Random(seed))) for seed in range(50)}
    assert {order[3:] for order in orders} == {(PEERS[1], PEERS[0])}, (
        "the last tried comes last, a resting one not"
    )
    assert len({order[:3] for order in orders}) == 6


def test_pauses_double_up_to_a_limit_and_begin_anew() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.next_s() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    backoff.reset()
    assert backoff.next_s() == 1.0


def link(name: str, subnet: str, experts: set[int], **fields: bool) -> Any:
    link = Mock(host=SimpleNamespace(peer=PeerId(name)), subnet=subnet, experts={0: ExpertBits.of(experts)})
    link.is_open, link.is_asked = True, fields.get("is_asked", False)
    return link


def surplus(links: list[Any]) -> Any:
    async def find() -> Any:
        found = ExpertLinks(*(Mock(),) * 3, {0: ExpertBits.of(range(8))}, Mock(), random.Random(0))  # type: ignore[arg-type]
        found._links = {each.host.peer: each for each in links}
        return found._surplus()

    return asyncio.run(find())


@defence(
    "one subnet does not take all links to peers with experts",
    off=replacing(expert_links, "Place", lambda _, peer, *rest: Place(peer, peer, *rest)),
)
def test_of_too_many_links_one_of_the_largest_subnet_is_closed() -> None:
    many = [link(f"many{number}", "10.0.0.0/24", {0, 1}) for number in range(expert_links.MAX_LINKS)]
    few = link("few", "10.0.1.0/24", {0, 1})
    assert surplus(many) is None
    assert surplus([few, *many]) in many


def test_a_link_that_is_needed_is_not_closed() -> None:
    asked = [
        link(f"many{number}", "10.0.0.0/24", {0}, is_asked=True) for number in range(expert_links.MAX_LINKS)
    ]
    alone = link("alone", "10.0.0.0/24", {5})
    assert only_holders([*asked, alone], {0: ExpertBits.of({0, 5})}) == {alone}
    assert surplus([*asked, alone]) is None
    free = link("free", "10.0.1.0/24", {0})
    assert surplus([*asked, alone, free]) is free
