"""Defences of hosts and peers that share routed experts."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from swarmnet_node.experts import expert_dispatcher, expert_link
from swarmnet_node.experts.expert_dispatcher import ExpertDispatcher
from swarmnet_node.experts.expert_link import ExpertLink
from swarmnet_node.experts.expert_service import ExpertService
from swarmnet_protocols.directory import host_announcements, node_reports
from swarmnet_protocols.net.limits.resources import PEER_LIMITS, Rate, Resource, Scope
from swarmnet_protocols.session import expert_rows
from tests.defences import Defence, Patch, nothing, replacing
from tests.sim import test_experts
from tests.support.expert_lab import load_experts_reference
from tests.support.swarm_lab import Reference
from tests.unit.directory import test_host_announcements
from tests.unit.hosting import test_node_reports
from tests.unit.session import test_expert_rows


def of_mixtral(test: Callable[..., None], *arguments: object) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        reference: Reference = load_experts_reference("mixtral", folder)
        test(reference, *arguments)

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


EXPERTS = (
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
        "outputs of experts that are not finite reach no session",
        replacing(torch, "isfinite", torch.ones_like),
        of_mixtral(test_experts.test_a_faulty_peer_changes_no_token, "NaN"),
    ),
    Defence(
        "a peer whose outputs are wrong is not asked again",
        replacing(ExpertLink, "blame", nothing),
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
