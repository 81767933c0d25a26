"""The workers that a training worker knows: excluded ones neither vote nor lead, nor send a
state."""

import random

from swarmnet_node.training import known_workers
from swarmnet_node.training.known_workers import MAX_EXCLUDED, KnownWorkers
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.job_records import worker_announcement
from swarmnet_protocols.training.rounds.terms import RoundMember
from tests.defences import defence, nothing, replacing
from tests.support.network.memory_directory import MemoryBoard, MemoryDirectory
from tests.support.network.memory_network import MemoryNetwork
from tests.support.network.virtual_time import run

JOB = "ab" * 32
ME = Identity.from_seed(b"me").peer_id
LIAR = Identity.from_seed(b"liar")


def roster(*names: str) -> list[RoundMember]:
    return [RoundMember(PeerId(name)) for name in names]


def new_workers() -> tuple[KnownWorkers, MemoryBoard]:
    board = MemoryBoard(MemoryNetwork(random.Random(0)), lambda: 1_800_000_000.0)
    directory = MemoryDirectory(board, Identity.from_seed(b"me"), bytes(32))
    return KnownWorkers(directory, JOB, ME, has_trained=lambda: True), board


def names(members: list[RoundMember]) -> set[str]:
    return {member.peer for member in members}


@defence("an excluded worker has no vote in catching up", off=replacing(KnownWorkers, "exclude", nothing))
def test_an_excluded_worker_neither_votes_nor_sends_a_state() -> None:
    async def scenario() -> None:
        workers, board = new_workers()
        workers.set_roster(roster(ME, LIAR.peer_id, "a", "b"))
        assert names(workers.voters()) == {LIAR.peer_id, "a", "b"}
        workers.exclude([LIAR.peer_id])
        lie = worker_announcement(JOB, (), WorkerPosition(900, bytes(32)))
        await lie.publish(MemoryDirectory(board, LIAR, bytes(32)))
        await workers.refresh(at_once=True)
        workers.set_roster(roster(ME, LIAR.peer_id, "a", "b"))
        assert names(workers.voters()) == names(workers.alive()) == {"a", "b"}
        assert LIAR.peer_id not in [source.peer for source in workers.sources([PeerId("a")], only=False)]

    run(scenario())


def test_excluded_workers_let_no_roster_of_newcomers_continue() -> None:
    async def scenario() -> None:
        workers, _ = new_workers()
        workers.set_roster(roster(ME, "a", "b", "liar"))
        workers.exclude([PeerId("liar")])
        workers.set_roster(roster("liar", "x", "y", ME))
        assert names(workers.voters()) == {"a", "b"}

    run(scenario())


@defence("the list of excluded workers is bounded", off=replacing(known_workers, "MAX_EXCLUDED", 1 << 30))
def test_the_list_of_excluded_workers_is_bounded() -> None:
    async def scenario() -> None:
        workers, _ = new_workers()
        workers.exclude(PeerId(f"p{number}") for number in range(MAX_EXCLUDED + 9))
        assert [*workers.excluded] == [f"p{number}" for number in range(9, MAX_EXCLUDED + 9)]

    run(scenario())
