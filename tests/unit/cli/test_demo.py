"""``swarmnet demo`` with programs in the place of its nodes, client and gateway;
``e2e/test_cli.py`` has the real ones."""

import json
import sys
from pathlib import Path

import psutil
import pytest

from swarmnet.cli import execute
from swarmnet.cli.demo import demo, experts

PROGRAM = """#!{python} -S
import json, os, sys
command = sys.argv[3]
if command == "join":
    open(os.path.join({folder!r}, str(os.getpid())), "w").close()
events = {{
    "join": {{"event": "ready", "addresses": ["/ip4/127.0.0.1/tcp/1"]}},
    "page": {{"event": "dashboard", "url": "http://127.0.0.1:2"}},
    "run": {{"token_ids": [1], "text": "Paris", "longest_stall_s": 0.1}},
    "serve": {{"event": "ready", "url": "http://127.0.0.1:1"}},
}}
if command == "run":
    for _ in range({pieces}):
        print(json.dumps({{"event": "token", "text": "P"}}), flush=True)
if command == "join":
    print(json.dumps(events["page"]), flush=True)
print(json.dumps(events[command]), flush=True)
if command == "serve":
    sys.exit("no memory")
sys.stdin.read()
"""
"""Prints the event that the demo waits for. The gateway then ends; the others stay until their
stdin ends."""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file for each node that was started, named by its process id."""
    program, started = tmp_path / "program", tmp_path / "started"
    started.mkdir()
    program.write_text(
        PROGRAM.format(python=sys.executable, folder=str(started), pieces=experts.KILLED_AFTER)
    )
    program.chmod(0o700)
    monkeypatch.setattr(demo, "_count_blocks", lambda *_: 30)
    monkeypatch.setattr(experts, "_expected", lambda _: [1])
    monkeypatch.setattr(sys, "executable", str(program))
    return started


def test_a_demo_whose_gateway_ends_says_so_and_stops(
    started: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["demo", "--nodes", "2", "--keep", "--json"]) == 1
    error = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "gateway stopped unexpectedly: no memory" in error["message"]
    nodes = [int(path.name) for path in started.iterdir()]
    assert len(nodes) == 2
    assert not any(psutil.pid_exists(node) for node in nodes)


@pytest.mark.parametrize(
    ("platform", "environment", "opens"),
    [
        ("linux", {"DISPLAY": ":0"}, True),
        ("linux", {"WAYLAND_DISPLAY": "wayland-0"}, True),
        ("linux", {}, False),
        ("linux", {"DISPLAY": "localhost:10.0", "SSH_CONNECTION": "::1 1 ::1 22"}, False),
        ("darwin", {}, True),
        ("darwin", {"SSH_CONNECTION": "::1 1 ::1 22"}, False),
    ],
)
def test_a_demo_opens_a_browser_only_on_a_display_of_its_user(
    platform: str, environment: dict[str, str], opens: bool
) -> None:
    assert demo.has_display(platform, environment) is opens


def test_a_demo_of_experts_kills_a_peer_and_compares(
    started: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["demo", "--experts", "--json"]) == 0
    events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    tokens = ["token"] * experts.KILLED_AFTER
    assert events == [*["ready"] * 4, *tokens, "killed", "answer", "compared"]
    assert not any(psutil.pid_exists(int(path.name)) for path in started.iterdir())
