"""Defences against hosts that give wrong outputs."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_client.audit import plan, verdict
from swarmnet_client.audit.verdict import Verdict
from swarmnet_client.chain import auditor, supervisor
from swarmnet_client.chain.auditor import Auditor
from swarmnet_client.chain.hops import LiveHop
from swarmnet_client.swarm.swarm import Swarm
from swarmnet_protocols.routing.chain_search import Hop
from swarmnet_protocols.routing.host_info import HostInfo
from tests.defences import Defence, Patch, nothing, replacing, yes
from tests.properties import test_audit as decisions
from tests.sim import test_audit, test_handover
from tests.support.swarm_lab import Reference, load_reference


def of_a_swarm(test: Callable[[Reference], object]) -> Callable[[Path], object]:
    return lambda folder: test(load_reference(folder / "model", folder / "cache"))


def plain_norm(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One bound, on the norm of a position alone."""
    whole = (one - other).norm(dim=1) / other.norm(dim=1)
    return whole, torch.zeros_like(whole)


def judge_unread(*outputs: torch.Tensor, read: object) -> Verdict:
    del read
    return verdict.judge(*outputs)


def whole_alone(patch: Patch) -> None:
    """Compare hidden states as they are, without a bound on single channels."""
    patch.setattr(verdict, "views", lambda one, other, read: [(one, other, verdict.STATES)])
    patch.setattr(verdict, "STATES", verdict.Bound(verdict.STATES.whole, torch.inf))


def repeats_nothing(patch: Patch) -> None:
    """First audits of one position, before which there is none."""
    patch.setattr(plan, "NEWCOMER_POSITIONS", 1)
    patch.setattr(plan, "MAX_DIGEST_POSITIONS", 1)


def believe_the_second(
    said: torch.Tensor, second: torch.Tensor, third: Any = None, **_options: object
) -> Verdict:
    return Verdict.RIGHT if verdict.agree(said, second) else Verdict.WRONG


def patched(test: Callable[..., object], *arguments: object) -> Callable[[Path], object]:
    """Run a test that takes a ``MonkeyPatch`` of its own."""

    def fails(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            test(load_reference(folder / "model", folder / "cache"), *arguments, patch)

    return fails


def stands_by_never(live: LiveHop, name: str) -> Any:
    caller = sys._getframe(1).f_code.co_name
    return False if name == "stands_by" and caller == "_take_output" else object.__getattribute__(live, name)


def witnesses_of_any_precision(patch: Patch) -> None:
    def witnesses(hosts: Sequence[HostInfo], audited: Hop, *rest: Any) -> list[Hop]:
        alike = [dataclasses.replace(host, precision=audited.precision) for host in hosts]
        return plan.witnesses(alike, audited, *rest)

    patch.setattr(auditor, "witnesses", witnesses)


async def never(self: object) -> None:
    """Audit nothing."""


def found(liar: str) -> Callable[[Path], object]:
    return of_a_swarm(
        lambda reference: (
            test_audit.test_a_host_of_a_chain_that_gives_wrong_outputs_is_found_within_200_steps(
                reference, liar, "rolled"
            )
        )
    )


AUDITS = (
    Defence(
        "the outputs that hops send are computed again by others",
        replacing(Auditor, "run", never),
        found("b1"),
    ),
    Defence(
        "the last hop returns outputs that no row asked for",
        replacing(Auditor, "add_audited_outputs", lambda _, rows: rows),
        lambda _: test_audit.test_the_last_hop_returns_outputs_of_first_positions(),
    ),
    Defence(
        "a third host decides between two that differ",
        replacing(auditor, "judge", believe_the_second),
        of_a_swarm(
            lambda reference: test_audit.test_a_lying_witness_convicts_no_honest_host(reference, liar="b2")
        ),
    ),
    Defence(
        "hosts of different precision do not audit each other",
        witnesses_of_any_precision,
        of_a_swarm(test_audit.test_hosts_of_another_precision_accuse_no_host_and_are_not_accused),
    ),
    Defence(
        "a convicted host is not used",
        replacing(Swarm, "convict", nothing),
        of_a_swarm(test_audit.test_a_convicted_host_is_not_used_even_if_it_is_the_only_one),
    ),
    Defence(
        "a channel of large values hides no error in the others",
        replacing(verdict, "differences", plain_norm),
        lambda _: decisions.test_a_lie_in_ordinary_channels_is_not_hidden_by_a_huge_one(),
    ),
    Defence(
        "a single channel has a bound of its own",
        whole_alone,
        lambda _: decisions.test_no_lie_hides_in_a_few_channels(17),
    ),
    Defence(
        "hidden states are compared after a norm, too",
        replacing(verdict, "after_norm", lambda states: states),
        lambda _: decisions.test_what_a_norm_makes_of_large_channels_is_compared(),
    ),
    Defence(
        "the last hop's outputs are compared as logits, too",
        replacing(auditor, "judge", judge_unread),
        of_a_swarm(test_audit.test_a_last_hop_that_favours_one_token_is_found_by_its_logits),
    ),
    Defence(
        "a first audit covers several positions",
        repeats_nothing,
        lambda _: decisions.test_wrong_outputs_are_found_within_200_steps_in_a_thousand_runs(),
    ),
    Defence(
        "audits cost a limited share of the work",
        replacing(plan.Ledger, "may_spend", yes),
        lambda _: decisions.test_audits_cost_at_most_three_percent_and_accuse_no_honest_host(),
    ),
    Defence(
        "two hops must agree on the activations between them",
        replacing(Auditor, "_disagree", nothing),
        patched(
            test_audit.test_a_host_that_lies_about_the_activations_between_two_hops_convicts_no_neighbour,
            "c1",
        ),
    ),
    Defence(
        "a host that does not answer an audit is replaced",
        replacing(supervisor.ChainSupervisor, "give_up", nothing),
        patched(test_audit.test_a_host_that_does_not_report_its_outputs_is_replaced),
    ),
    Defence(
        "outputs of a standby are not answers",
        lambda patch: patch.setattr(LiveHop, "__getattribute__", stands_by_never),
        of_a_swarm(test_handover.test_outputs_of_a_standby_are_not_answers),
    ),
)
