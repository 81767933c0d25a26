"""A node in the foreground: its output, and its end by signals."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from swarmnet.cli.commands.control import headline
from swarmnet.cli.foreground import Foreground
from swarmnet.reach import advice, describe
from swarmnet_protocols.models import Progress
from swarmnet_protocols.wire.control_pb2 import NodeStatus
from swarmnet_protocols.wire.report_pb2 import Reach
from tests.support.swarm.fake_node import ADDRESS, STATUS, FakeNode


class _Node(FakeNode):
    """A node that calls ``serving`` once a caller waits for its end, and ends only when ``may_end``
    is set."""

    def __init__(self, serving: Callable[[], None], *, ends: bool) -> None:
        super().__init__()
        self.closed = False
        self._serving = serving
        self._ends = ends
        self._finished = asyncio.Event()

    @asynccontextmanager
    async def start(self, _report: Progress) -> AsyncIterator["_Node"]:
        try:
            yield self
        finally:
            self.closed = True

    def finish(self, grace_s: float) -> None:
        super().finish(grace_s)
        if self._ends:
            self._finished.set()
        else:
            self._serving()

    async def finished(self) -> None:
        self._serving()
        await self._finished.wait()


def _events(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The event loop of a node in the foreground ends with its process, and so leaves its signal
    handlers behind."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _signal(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_lets_the_node_finish(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = _Node(_signal(number), ends=True)
    Foreground(node.start, tmp_path, as_json=True).run()

    assert _events(capsys) == ["ready", "finishing", "stopped"]
    assert node.graces_s == [30.0]
    assert node.closed


def test_the_second_signal_stops_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = _Node(_signal(signal.SIGINT), ends=False)  # the second signal arrives during `finish`
    with pytest.raises(KeyboardInterrupt):
        Foreground(node.start, tmp_path, as_json=True).run()

    assert _events(capsys) == ["ready", "finishing"]
    assert node.closed


def test_a_signal_while_the_node_starts_stops_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed = asyncio.Event()

    @asynccontextmanager
    async def start(_report: Progress) -> AsyncIterator[_Node]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
            yield _Node(lambda: None, ends=True)
        finally:
            closed.set()

    with pytest.raises(KeyboardInterrupt):
        Foreground(start, tmp_path, as_json=True).run()
    assert closed.is_set()
    assert _events(capsys) == []


def test_a_node_ends_with_the_process_that_started_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        node = _Node(lambda: os.close(writing), ends=True)
        Foreground(node.start, tmp_path, as_json=True, stop_on_eof=True).run()
    assert _events(capsys) == ["ready", "finishing", "stopped"]


def test_a_node_finishes_although_its_output_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)

        def lose_the_reader() -> None:
            os.close(reading)
            os.kill(os.getpid(), signal.SIGTERM)

        node = _Node(lose_the_reader, ends=True)
        Foreground(node.start, tmp_path, as_json=True).run()
        assert node.graces_s == [30.0]
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)


def test_people_see_how_to_reach_the_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Foreground(_Node(_signal(signal.SIGTERM), ends=True).start, tmp_path, as_json=False).run()

    shown = capsys.readouterr()
    assert f"--bootstrap {ADDRESS}\n" in shown.out
    assert "blocks 10:20 of 30" in shown.out
    assert "Ctrl-C" in shown.err
    assert (tmp_path / "addresses").read_text().splitlines() == list(STATUS.addresses)


@pytest.mark.parametrize(
    ("known", "mdns", "says"),
    [(0, False, "answers yet\n"), (0, True, "find this one by mDNS\n"), (2, True, "")],
)
def test_a_node_says_that_it_is_alone_only_if_it_is(
    known: int, mdns: bool, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = _Node(_signal(signal.SIGTERM), ends=True)
    node.shown = NodeStatus.FromString(STATUS.SerializeToString())
    node.shown.known_peers = known
    Foreground(node.start, tmp_path, as_json=False, mdns=mdns).run()
    said = capsys.readouterr().err
    assert says in said
    assert ("no other peer" in said) is (known == 0)


LAN = "/ip4/10.0.0.1/tcp/1"
LOOPBACK = "/ip4/127.0.0.1/tcp/1"


@pytest.mark.parametrize(
    ("reach", "addresses", "says"),
    [
        (Reach(kind="unknown"), [LAN], "not known yet: no other machine has connected to it"),
        (Reach(kind="unknown"), [LOOPBACK], "from this machine only: it listens on no other address"),
        (Reach(kind="open"), [LAN], "directly"),
        (Reach(kind="forwarded"), [LAN], "directly, through a port that the router forwards"),
        (
            Reach(kind="unreachable", nat="symmetric"),
            [LAN],
            "not at all (symmetric NAT): no relay takes this node",
        ),
        (
            Reach(kind="relayed", nat="cone", relays=["12D3KooWRelay"]),
            [LAN],
            "through the relay …ooWRelay, and directly by hole punching (cone NAT)",
        ),
    ],
)
def test_how_others_reach_a_node_is_said_in_words(reach: Reach, addresses: list[str], says: str) -> None:
    assert describe(reach, addresses) == says


def test_a_node_on_loopback_is_not_told_to_open_a_router() -> None:
    behind = Reach(kind="relayed", relays=["12D3KooWRelay"])
    assert "router" in advice(behind, [LAN, LOOPBACK])
    assert "loopback" in advice(behind, [LOOPBACK, f"{LAN}/p2p/12D3KooWRelay/p2p-circuit"])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "this node serves smollm2-135m-instruct, blocks 10:20 of 30, 2 sessions"),
        (
            {"public_name": "kitchen"},
            "kitchen serves smollm2-135m-instruct, blocks 10:20 of 30, 2 sessions",
        ),
        (
            {"state": "paused", "reason": "outside its hours (mon 03:00-04:00), until mon 03:00"},
            "this node is paused: outside its hours (mon 03:00-04:00), until mon 03:00",
        ),
        ({"state": "choosing"}, "this node chooses blocks of smollm2-135m-instruct"),
        (
            {"state": "joining"},
            "this node is about to serve smollm2-135m-instruct, blocks 10:20 of 30",
        ),
        (
            {"state": "leaving"},
            "this node stops: its sessions move to other hosts (smollm2-135m-instruct, blocks 10:20 of 30, 2 sessions)",
        ),
    ],
)
def test_status_begins_with_the_name_of_a_node_and_what_it_does(fields: dict[str, str], says: str) -> None:
    node = NodeStatus.FromString(STATUS.SerializeToString())
    node.MergeFrom(NodeStatus(**fields))  # type: ignore[arg-type]
    assert headline(node) == says
