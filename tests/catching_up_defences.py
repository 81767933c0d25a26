"""The defences of workers against those who claim to be further."""

from pathlib import Path

from swarmnet_node.training import worker
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.catch_up import Move, Position
from tests.defences import Defence, Patch, replacing, yes
from tests.sim import test_training_takeover
from tests.unit import test_training_catching_up


def believe_the_latest(patch: Patch) -> None:
    def latest(_: Position, said: dict[PeerId, Position], **__: bool) -> Move:
        place = max(said.values(), key=lambda each: each.round)
        return Move(place, tuple(peer for peer, each in said.items() if each == place))

    patch.setattr(worker, "catch_up", latest)


def one_of_four(folder: Path) -> None:
    test_training_takeover.test_claims_of_a_later_round_by_newcomers_are_ignored(3, 1, folder)


CATCHING_UP = (
    Defence("nobody is taken over by a claim of a later round", believe_the_latest, one_of_four),
    Defence(
        "a crowd of strangers continues no roster",
        replacing(test_training_catching_up, "continued", yes),
        lambda _: (
            test_training_catching_up.test_a_crowd_of_strangers_and_a_part_that_was_cut_off_do_not_continue_a_roster()
        ),
    ),
)
