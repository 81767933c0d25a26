"""The totals of what a machine has given: how they are counted, kept and shown."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from swarmnet_node.owner.given import (
    COUNT_EVERY_S,
    GIVEN_NAME,
    SAVE_EVERY_S,
    DistinctNames,
    Given,
    GivenKeeper,
    load_given,
)
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.machine.aio import in_background
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter, wire_bytes
from tests.support.network.virtual_time import run


def _names(count: int) -> DistinctNames:
    found = DistinctNames(salt=bytes(16))
    for number in range(count):
        found.add(f"peer {number}")
        found.add(f"peer {number}")
    return found


@pytest.mark.parametrize("count", [0, 1, 2, 30, 1023])
def test_up_to_a_thousand_clients_are_counted_exactly(count: int) -> None:
    assert _names(count).count() == count


@pytest.mark.parametrize("count", [1024, 3000, 30_000])
def test_many_clients_are_counted_within_ten_percent(count: int) -> None:
    assert abs(_names(count).count() - count) < 0.1 * count


def _given() -> Given:
    given = Given(since=1.8e9, clients=_names(5))
    given.computed(400, 10, gpu_s=3.5)
    given.trained(640, 64, 4, 0.0)
    given.sent_bytes, given.received_bytes, given.active_s, given.cpu_s = 5, 6, 7.5, 8.5
    given.new_thanks()
    return given


def test_totals_are_read_back_as_they_were_written() -> None:
    given = _given()
    assert Given.from_json(given.to_json()) == given
    assert (given.block_positions, given.samples) == (400 * 10 + 2 * 640 * 4, 10)
    assert given.message().clients == 5


def test_totals_of_other_versions_are_read(tmp_path: Path) -> None:
    fields = json.loads(_given().to_json())
    del fields["gpu_s"], fields["client_hashes"], fields["client_salt"]
    (tmp_path / GIVEN_NAME).write_text(json.dumps(fields | {"of_a_later_version": [1]}))
    found = load_given(tmp_path)
    assert found is not None
    assert (found.gpu_s, found.block_positions) == (0, _given().block_positions)


def _damaged(**changes: Any) -> str:
    return json.dumps(json.loads(_given().to_json()) | changes)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "[" * 60_000, "\0" * (1 << 20), _damaged(samples=-1), _damaged(samples=1.5),
     _damaged(cpu_s=float("nan")), _damaged(active_s=10**400), _damaged(cpu_s=True), _damaged(cpu_s="1"), _damaged(client_hashes="AAAA"), _damaged(client_hashes=[2, 1]),
     _damaged(client_hashes=[-1]), _damaged(client_hashes=[*range(1025)]), _damaged(client_hashes=3),
     _damaged(client_salt=""), _damaged(client_salt=3), _damaged(thanked=[1]), _damaged(thanked=None)],
)  # fmt: skip
def test_a_damaged_file_of_totals_is_set_aside(tmp_path: Path, text: str) -> None:
    (tmp_path / GIVEN_NAME).write_text(text)
    told: list[str] = []
    assert load_given(tmp_path, told.append) is None
    [aside] = tmp_path.iterdir()
    assert aside.read_text() == text
    assert str(aside) in told[0]


def test_what_was_used_survives_a_restart(tmp_path: Path) -> None:
    async def use(sent: int, received: int) -> None:
        link = LinkLimiter()
        keeper = GivenKeeper(tmp_path, link)
        link.up.count(sent)
        link.down.count(received)
        keeper.given.computed(10, 3)
        keeper.close()

    for _ in range(2):
        asyncio.run(use(1000, 300))
    found = load_given(tmp_path)
    assert found is not None
    assert (found.sent_bytes, found.received_bytes) == (2 * int(wire_bytes(1000)), 2 * int(wire_bytes(300)))
    assert found.block_positions == 60


def _keep(folder: Path, seconds: float, *, computed: int = 0, active: bool = True) -> list[str]:
    """Keep totals for some seconds, and return the thanks. The process is killed then."""
    told: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        keeper = GivenKeeper(folder, LinkLimiter(), is_active=lambda: active, clock=loop.time)
        keeper.given.computed(computed, 1)
        async with in_background(keeper.run(told.append)):
            await asyncio.sleep(seconds)

    run(main())
    return told


def test_a_killed_process_loses_at_most_a_minute(tmp_path: Path) -> None:
    _keep(tmp_path, 10 * SAVE_EVERY_S - COUNT_EVERY_S / 2)
    found = load_given(tmp_path)
    assert found is not None
    assert found.active_s >= 9 * SAVE_EVERY_S - COUNT_EVERY_S
    assert found.cpu_s > 0


def test_a_paused_node_gives_no_time(tmp_path: Path) -> None:
    _keep(tmp_path, 3 * SAVE_EVERY_S, active=False)
    found = load_given(tmp_path)
    assert found is not None
    assert found.active_s == 0


def test_an_owner_is_thanked_once_for_a_milestone(tmp_path: Path) -> None:
    first = _keep(tmp_path, 2 * COUNT_EVERY_S, computed=10**9)
    assert first == ["thank you! this machine has computed a billion positions × blocks"]
    assert _keep(tmp_path, 2 * COUNT_EVERY_S) == []
    assert _keep(tmp_path, 25 * 3600) == ["thank you! this machine has given a day of its time"]


def test_energy_is_busy_time_by_assumed_power() -> None:
    given = Given(cpu_s=3600.0, gpu_s=2 * 3600.0)
    assert given.kwh == pytest.approx(0.010 + 0.500)


def test_a_full_disk_ends_no_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "file"
    folder.write_text("")
    _keep(folder, 3 * SAVE_EVERY_S)
    assert "cannot be written" in caplog.text
    with pytest.raises(OutOfResources, match="cannot write"):
        GivenKeeper(folder, LinkLimiter(), clock=lambda: 0.0).close()
