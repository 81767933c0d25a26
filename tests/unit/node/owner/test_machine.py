"""A node's stored limits and monthly usage, and its priority among other programs."""

import asyncio
import errno
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnet_node.owner import machine as machine_module
from swarmnet_node.owner.idleness import idle_s
from swarmnet_node.owner.limits import NOT_PAUSED, MonthlyUsage, OwnerLimits
from swarmnet_node.owner.machine import LIMITS_NAME, PAUSE_NAME, USAGE_NAME, OwnersMachine, load_limits
from swarmnet_protocols.errors import ConfigError, OutOfResources
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter, wire_bytes

NOVEMBER = 1_795_000_000.0


def _machine(folder: Path, link: LinkLimiter | None = None, now: float = NOVEMBER) -> OwnersMachine:
    return OwnersMachine(folder, link or LinkLimiter(), lambda: now, lambda limits: None)


def test_limits_hold_after_a_restart(tmp_path: Path) -> None:
    limits = OwnerLimits(up_bytes_per_s=1e6, schedule="19:00-07:00", cores=2)

    async def enforce() -> LinkLimiter:
        link, told = LinkLimiter(), list[OwnerLimits]()
        OwnersMachine(tmp_path, link, lambda: NOVEMBER, told.append).enforce(limits)
        assert told == [limits]
        return link

    link = asyncio.run(enforce())
    assert (link.up.is_limited, link.down.is_limited) == (True, False)
    assert load_limits(tmp_path) == limits
    assert stat.S_IMODE((tmp_path / LIMITS_NAME).stat().st_mode) == 0o600


def test_a_full_disk_at_the_end_is_out_of_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(machine_module, "write_whole", write)
    with pytest.raises(OutOfResources, match=f"{tmp_path}: No space left") as caught:
        _machine(tmp_path).close()
    assert caught.value.hint == "make room on its disk"


def test_without_a_file_nothing_is_limited(tmp_path: Path) -> None:
    assert load_limits(tmp_path) == OwnerLimits()


@pytest.mark.parametrize("text", ["", "nonsense", '{"up": 1}', "\0" * (1 << 20)])
def test_a_damaged_file_of_limits_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / LIMITS_NAME).write_text(text)
    with pytest.raises(ConfigError, match=LIMITS_NAME) as caught:
        load_limits(tmp_path)
    assert "delete it" in caught.value.hint


def test_a_pause_holds_over_a_restart_until_it_ends(tmp_path: Path) -> None:
    assert _machine(tmp_path).paused_until == NOT_PAUSED
    _machine(tmp_path).pause(7200)
    assert _machine(tmp_path, now=NOVEMBER + 60).paused_until == NOVEMBER + 7200
    _machine(tmp_path).pause(math.inf)
    assert _machine(tmp_path).paused_until == math.inf
    _machine(tmp_path).resume()
    assert _machine(tmp_path).paused_until == NOT_PAUSED


@pytest.mark.parametrize("text", ["", "[", "{}", '{"until": "x"}', '{"until": true}'])
def test_a_damaged_pause_lasts_until_resume(tmp_path: Path, text: str) -> None:
    (tmp_path / PAUSE_NAME).write_text(text)
    assert _machine(tmp_path).paused_until == math.inf


def test_the_bytes_of_a_month_survive_a_restart(tmp_path: Path) -> None:
    async def use(up: int, down: int) -> MonthlyUsage:
        link = LinkLimiter()
        machine = _machine(tmp_path, link)
        link.up.count(up)
        link.down.count(down)
        machine.save_usage()
        return machine.usage()

    first, second = asyncio.run(use(1000, 300)), asyncio.run(use(7, 5))
    assert (first.up_bytes, first.down_bytes) == (int(wire_bytes(1000)), int(wire_bytes(300)))
    more_up, more_down = int(wire_bytes(7)), int(wire_bytes(5))
    assert second == MonthlyUsage(first.month, first.up_bytes + more_up, first.down_bytes + more_down)
    assert _machine(tmp_path, now=NOVEMBER + 40 * 24 * 3600).usage().up_bytes == 0


@pytest.mark.parametrize(
    "text", ["", "[]", '{"month": 3}', '{"month": "2026-11", "up_bytes": -1, "down_bytes": 0}']
)
def test_a_damaged_file_of_usage_counts_for_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / USAGE_NAME).write_text(text)
    assert _machine(tmp_path).usage().up_bytes == 0


def test_the_memory_of_children_counts(tmp_path: Path) -> None:
    code = "import sys; data = b'x' * (100 << 20); print(flush=True); sys.stdin.read()"
    alone = _machine(tmp_path).ram_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        if child.stdout is None:
            raise RuntimeError("no pipe")
        child.stdout.readline()
        assert _machine(tmp_path).ram_bytes() >= alone + (100 << 20)
        child.communicate()


def test_other_processes_have_priority() -> None:
    code = (
        "import os; from swarmnet_node.owner.machine import yield_to_others as y; y(); y(); print(os.nice(0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == max(os.nice(0), 10)


def _say(monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    monkeypatch.setattr("swarmnet_node.owner.idleness._output_of", lambda *command: output)
    monkeypatch.setattr("swarmnet_node.owner.idleness._x_idle_s", lambda: None)
    monkeypatch.setattr("swarmnet_node.owner.idleness._TERMINALS", ())


@pytest.mark.skipif(sys.platform != "linux", reason="asks logind")
@pytest.mark.parametrize(
    ("said", "idle"),
    [
        ("", None),
        ("IdleHint=no\nIdleSinceHint=1794999000000000\n", 0.0),
        ("IdleHint=yes\nIdleSinceHint=1794999000000000\n", 1000.0),
        ("IdleHint=yes\nIdleSinceHint=0\n", None),
        ("nonsense", None),
    ],
)
def test_sessions_of_people_are_read_from_logind(
    monkeypatch: pytest.MonkeyPatch, said: str, idle: float | None
) -> None:
    _say(monkeypatch, said)
    assert idle_s(lambda: NOVEMBER) == idle


@pytest.mark.skipif(sys.platform != "linux", reason="looks at terminals")
def test_the_latest_input_of_any_user_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _say(monkeypatch, "IdleHint=yes\nIdleSinceHint=1794999000000000\n")
    terminals = tmp_path / "pts"
    terminals.mkdir()
    for name, ago in (("1", 500), ("2", 60)):
        (terminals / name).touch()
        os.utime(terminals / name, (NOVEMBER - ago, NOVEMBER))
    monkeypatch.setattr("swarmnet_node.owner.idleness._TERMINALS", (f"{terminals}/[0-9]*",))
    assert idle_s(lambda: NOVEMBER) == 60.0


def test_only_the_sources_that_limits_need_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = list[str]()

    def idle(_clock: object) -> float:
        asked.append("idle")
        return 7.0

    def battery() -> None:
        asked.append("battery")

    monkeypatch.setattr(machine_module, "idle_s", idle)
    monkeypatch.setattr(machine_module.psutil, "sensors_battery", battery, raising=False)
    machine = _machine(tmp_path)
    seen = machine.observe(OwnerLimits(up_bytes_per_s=1e6, schedule="19:00-07:00"))
    assert (seen.idle_s, seen.on_battery, asked) == (None, False, [])
    assert machine.observe(OwnerLimits(idle_only=True)).idle_s == 7.0
    assert not machine.observe(OwnerLimits(no_battery=True)).on_battery
    assert asked == ["idle", "battery"]


def test_freed_memory_goes_back_to_the_system() -> None:
    machine_module.release_memory()  # does no harm at any time
