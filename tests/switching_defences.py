"""Defences of the choice of a model: a node takes only models that the swarm file lists, if its owner lets it, and leaves its own only where that can spare it."""

from collections.abc import Callable
from pathlib import Path

from swarmnet_node import other_models
from swarmnet_node.other_models import ListedModels
from swarmnet_protocols.directory import host_announcements
from swarmnet_protocols.routing import model_needs
from tests.defences import Defence, nothing, replacing, yes
from tests.support.weight_swarm import weight_swarm
from tests.unit.hosting import test_other_models
from tests.unit.hosting.test_other_models import Group
from tests.unit.routing import test_switching


def in_group(test: Callable[[Group], None]) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        with weight_swarm() as swarm:
            test(Group(swarm, folder))

    return run


SWITCHING = (
    Defence(
        "only models that the swarm file lists with their pieces are switched to",
        replacing(other_models, "listed", lambda rules: dict(rules.names)),
        in_group(test_other_models.test_only_models_that_the_swarm_file_lists_with_their_pieces_are_taken),
    ),
    Defence(
        "other files under the name of a listed model are not switched to",
        replacing(other_models, "_check", nothing),
        in_group(test_other_models.test_another_model_under_a_listed_name_is_not_taken),
    ),
    Defence(
        "a node whose owner forbids it does not switch",
        replacing(
            test_other_models,
            "other_models",
            lambda config, reader, notice, loaded: ListedModels(config, reader, notice, loaded.model),
        ),
        in_group(
            lambda group: test_other_models.test_a_node_whose_owner_forbids_it_has_no_other_models(
                group, {"keep_model": True}
            )
        ),
    ),
    Defence(
        "a host that its model needs does not switch",
        replacing(model_needs, "OTHER_HOSTS", 1),
        lambda _: test_switching.test_a_host_that_its_model_needs_stays(),
    ),
    Defence(
        "of hosts that would switch at once, enough stay",
        replacing(test_switching, "is_confirmed", yes),
        lambda _: test_switching.test_of_hosts_that_leave_at_once_enough_stay(seed=0),
    ),
    Defence(
        "few false loads draw no hosts to a model",
        replacing(model_needs, "median", max),
        lambda _: test_switching.test_few_false_loads_neither_draw_hosts_nor_keep_them(),
    ),
    Defence(
        "a load out of range counts as none",
        replacing(host_announcements, "load_of", lambda record: record.load),
        lambda _: test_other_models.test_a_load_out_of_range_or_of_one_client_counts_for_less(1.01, 20, 0.0),
    ),
)
