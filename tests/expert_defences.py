"""Defences of hosts and peers that share routed experts, and of hosts against values that are not finite."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_node import expert_node
from swarmnet_node.experts import (
    expert_choice,
    expert_dispatcher,
    expert_link,
    expert_links,
    expert_planner,
    expert_witness,
)
from swarmnet_node.experts.expert_dispatcher import ExpertDispatcher
from swarmnet_node.experts.expert_link import ExpertLink
from swarmnet_node.experts.expert_links import ExpertLinks
from swarmnet_node.experts.expert_service import ExpertService
from swarmnet_node.hosting import slots
from swarmnet_protocols.directory import expert_announcements, host_announcements, node_reports
from swarmnet_protocols.directory.expert_announcements import BlockExperts, ExpertHost
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.limits.resources import PEER_LIMITS, Rate, Resource, Scope
from swarmnet_protocols.net.limits.subnets import Place
from swarmnet_protocols.routing import expert_placement
from swarmnet_protocols.session import expert_rows, wire_tensors
from tests.defences import Defence, Patch, nothing, replacing, yes
from tests.sim import test_expert_attacks, test_experts
from tests.support.expert_lab import load_experts_reference
from tests.support.swarm_lab import Reference
from tests.unit.directory import test_expert_announcements, test_host_announcements
from tests.unit.hosting import test_expert_choice, test_expert_links, test_expert_planner, test_node_reports
from tests.unit.routing import test_expert_routing
from tests.unit.session import test_expert_rows, test_steps, test_wire_tensors


def of_mixtral(test: Callable[..., None], *arguments: object) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        reference: Reference = load_experts_reference("mixtral", folder)
        test(reference, *arguments)

    return run


def with_patch(test: Callable[..., None]) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            of_mixtral(test, patch)(folder)

    return run


def any_number_of_streams(patch: Patch) -> None:
    patch.setitem(PEER_LIMITS, Resource.EXPERTS, 4)  # what the test counts to
    reserve = Scope.reserve

    def unlimited(scope: Scope, resource: Resource, amount: int = 1) -> Any:
        return reserve(scope, resource, 0 if resource is Resource.EXPERTS else amount)

    patch.setattr(Scope, "reserve", unlimited)


def free_rows(patch: Patch) -> None:
    charge = Scope.charge

    def charged(scope: Scope, rate: Rate, amount: float, now: float) -> float:
        return 0.0 if rate is Rate.POSITIONS else charge(scope, rate, amount, now)

    patch.setattr(Scope, "charge", charged)


def let_gradients_pass(patch: Patch) -> None:
    """Outputs of peers enter the graph as constants."""
    elsewhere = ExpertDispatcher.elsewhere

    def detached(dispatcher: ExpertDispatcher, block: int) -> Any:
        start = elsewhere(dispatcher, block)
        return lambda hidden, rows: start(hidden.detach(), rows)

    patch.setattr(ExpertDispatcher, "elsewhere", detached)


def avoid_at_once(patch: Patch) -> None:
    """A peer is avoided for outputs that are not finite, whatever the outputs of others are."""
    take = ExpertDispatcher._take

    def avoiding(dispatcher: ExpertDispatcher, ask: Any, *others: Any) -> Any:
        taken = take(dispatcher, ask, *others)
        if taken != ask.pairs:
            ask.link.avoid(0.0)
        return taken

    patch.setattr(ExpertDispatcher, "_take", avoiding)


def keep_only_announced(patch: Patch) -> None:
    """Links end with the announcements of their peers."""
    update = ExpertLinks._update

    async def updating(links: ExpertLinks, hosts: Mapping[PeerId, ExpertHost]) -> None:
        for peer in links._links.keys() - hosts.keys():
            await links._drop(peer)
        await update(links, hosts)

    patch.setattr(ExpertLinks, "_update", updating)


def wait_as_announced(patch: Patch) -> None:
    for bound in ("MAX_ANSWER_S", "MAX_ROW_S"):
        patch.setattr(expert_link, bound, math.inf)


def end_links_by_any_error(patch: Patch) -> None:
    """An error that is none of swarmnet's ends the task of a link."""

    async def keep(link: ExpertLink) -> None:
        await link._run()

    patch.setattr(ExpertLink, "keep", keep)


async def believed(links: ExpertLinks, _compute: object) -> BlockExperts:
    """In place of a look at other peers."""
    return links.wanted


async def announced(links: ExpertLinks) -> list[BlockExperts]:
    """In place of what peers say when they answer."""
    return [each.host.experts for each in await links._sample.refresh()]


EXPERTS = (
    Defence(
        "a step with values that are not finite is refused by the hop that receives it",
        replacing(torch, "isfinite", torch.ones_like),
        lambda _: test_steps.test_a_step_with_values_that_are_not_finite_is_refused(torch.float32, math.nan),
    ),
    Defence(
        "finite values of 8 bits arrive finite, so that no honest sender is blamed for them",
        replacing(wire_tensors, "LARGEST", math.inf),
        lambda _: test_wire_tensors.test_finite_values_of_eight_bits_arrive_finite(),
    ),
    Defence(
        "rows that are not finite are sent to no peer with experts",
        replacing(expert_dispatcher, "finite_rows", lambda _, rows: (rows, False)),
        lambda _: test_expert_routing.test_rows_that_are_not_finite_are_sent_to_no_peer(math.nan),
    ),
    Defence(
        "a peer with experts refuses rows that are not finite",
        replacing(torch, "isfinite", torch.ones_like),
        lambda _: (
            test_expert_rows.test_rows_that_are_not_finite_are_refused_and_such_outputs_are_no_violation(
                math.nan
            )
        ),
    ),
    Defence(
        "no peer is blamed for rows that are too large for all",
        avoid_at_once,
        lambda _: test_expert_routing.test_no_peer_is_avoided_for_rows_that_are_too_large_for_all_of_them(),
    ),
    Defence(
        "no fault excludes a peer for good",
        replacing(expert_link, "FAULT_S", 1e9),
        of_mixtral(test_expert_attacks.test_a_peer_with_answers_of_the_wrong_shape_is_tried_again_ever_later),
    ),
    Defence(
        "dead announcements do not keep out peers that answer",
        replacing(expert_links, "in_turn", lambda peers, *_: sorted(peers)),
        of_mixtral(test_expert_attacks.test_dead_announcements_do_not_keep_out_peers_that_answer),
    ),
    Defence(
        "no flood of announcements ends links that are open",
        keep_only_announced,
        of_mixtral(test_expert_attacks.test_a_link_outlives_the_announcement_of_its_peer),
    ),
    Defence(
        "announcements of experts that are kept are bounded in number",
        replacing(expert_announcements, "MAX_KNOWN", 1 << 30),
        lambda _: test_expert_announcements.test_a_flood_of_announcements_takes_bounded_memory(),
    ),
    Defence(
        "announcements of experts take as much memory as their bytes",
        replacing(
            expert_announcements,
            "from_bits",
            lambda bits: frozenset(test_expert_announcements.from_bits(bits)),
        ),
        lambda _: test_expert_announcements.test_an_announcement_takes_little_more_memory_than_its_bytes(),
    ),
    Defence(
        "no error that an address causes ends the search for peers with experts",
        end_links_by_any_error,
        with_patch(test_expert_attacks.test_an_address_that_raises_any_error_ends_no_search),
    ),
    Defence(
        "an announced time does not make a host wait for ever",
        wait_as_announced,
        of_mixtral(test_expert_attacks.test_a_peer_that_never_answers_holds_a_forward_for_a_minute_at_most),
    ),
    Defence(
        "one subnet does not take all links to peers with experts",
        replacing(expert_links, "Place", lambda _, peer, *rest: Place(peer, peer, *rest)),
        lambda _: test_expert_links.closes_one_of_the_largest_subnet(),
    ),
    Defence(
        "silent streams give way to a host that needs experts",
        replacing(slots, "slot_to_evict", nothing),
        of_mixtral(test_expert_attacks.test_silent_streams_give_way_to_a_host_that_needs_experts),
    ),
    Defence(
        "a joining peer counts the experts of peers that answer",
        replacing(expert_node, "answering", announced),
        of_mixtral(test_expert_attacks.test_a_joining_peer_counts_the_experts_of_peers_that_answer),
    ),
    Defence(
        "no expert is dropped because an announcement names it",
        replacing(expert_node, "computed_elsewhere", believed),
        of_mixtral(test_expert_attacks.test_no_expert_is_dropped_because_an_announcement_names_it),
    ),
    Defence(
        "no expert is dropped for a peer that computes it wrongly",
        replacing(expert_witness, "is_alike", yes),
        of_mixtral(test_expert_attacks.test_no_expert_is_dropped_for_a_peer_that_computes_it_wrongly),
    ),
    Defence(
        "no expert is dropped for a peer that has it computed by its only holder",
        replacing(ExpertService, "withhold", nothing),
        of_mixtral(
            test_expert_attacks.test_no_expert_is_dropped_for_a_peer_that_has_it_computed_by_its_only_holder
        ),
    ),
    Defence(
        "one message moves a share of a peer's experts",
        replacing(expert_choice, "SHARE", 1.0),
        of_mixtral(
            test_expert_attacks.test_one_message_moves_a_share_of_the_experts_that_another_peer_computes
        ),
    ),
    Defence(
        "a peer moves experts for the host that sends most rows",
        replacing(expert_choice, "ARRANGER_S", 0.0),
        lambda _: test_expert_choice.test_a_peer_follows_the_host_that_sends_most_rows(
            test_expert_choice.B, test_expert_choice.PERIOD_S, {}, False
        ),
    ),
    Defence(
        "the memory of a plan does not grow with the square of the copies that peers claim",
        replacing(expert_placement, "MOST_COPIES", 1 << 30),
        lambda _: test_expert_planner.plan_for_many_copies(peers=12),
    ),
    Defence(
        "a plan considers a bounded number of copies",
        replacing(expert_planner, "MAX_COPIES", 1 << 60),
        lambda _: (
            test_expert_planner.test_a_plan_considers_bounded_copies_and_later_ones_take_the_other_blocks()
        ),
    ),
    Defence(
        "lists of experts in reports are bounded before they are read",
        replacing(node_reports, "_experts_checked", lambda _: []),
        lambda _: test_node_reports.test_impossible_experts_are_refused("too many experts"),
    ),
    Defence(
        "experts that a host names in a command of clients are numbers only",
        replacing(host_announcements, "MISSING_EXPERTS", re.compile(".*")),
        lambda _: test_host_announcements.test_missing_experts_that_are_no_list_are_ignored(
            "0:1'; reboot", ""
        ),
    ),
    Defence(
        "a request for rows is bounded before it is computed",
        replacing(expert_rows, "max_pairs", lambda *_: 1 << 30),
        lambda _: test_expert_rows.refuse_too_many_rows(),
    ),
    Defence(
        "outputs of experts that are not finite reach no session if another peer has the expert",
        replacing(torch, "isfinite", torch.ones_like),
        of_mixtral(test_experts.test_a_faulty_peer_changes_no_token, "NaN"),
    ),
    Defence(
        "a peer whose outputs are wrong is not asked for a while",
        replacing(expert_link, "FAULT_S", 0.0),
        of_mixtral(test_experts.test_a_faulty_peer_changes_no_token, "unknown request"),
    ),
    Defence(
        "a peer that answers no request is not waited for alone",
        replacing(expert_dispatcher, "HEDGE_S", 1e9),
        of_mixtral(test_experts.test_a_faulty_peer_changes_no_token, "no reply"),
    ),
    Defence(
        "experts that are far are not used",
        replacing(expert_link, "TRIALS", 0),
        of_mixtral(test_experts.test_experts_that_are_far_are_not_used),
    ),
    Defence(
        "a peer computes only for hosts of its swarm and model",
        replacing(ExpertService, "_check_model", nothing),
        of_mixtral(
            test_experts.test_a_peer_refuses_rows_that_it_cannot_compute,
            {"swarm": bytes(31) + b"1"},
            0,
            0,
            test_experts.refusal_pb2.REASON_WRONG_SWARM,
        ),
    ),
    Defence(
        "one host has few streams for experts",
        any_number_of_streams,
        of_mixtral(test_experts.test_one_host_has_few_streams_for_experts),
    ),
    Defence(
        "rows for experts count in the quota of a peer",
        free_rows,
        of_mixtral(test_experts.test_rows_count_in_the_quota_of_a_peer),
    ),
    Defence(
        "no training pass leaves out the gradients of experts on peers",
        let_gradients_pass,
        of_mixtral(test_experts.test_gradients_do_not_flow_through_experts_of_peers),
    ),
)
