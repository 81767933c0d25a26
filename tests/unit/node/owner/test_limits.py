"""When a node may run: a table for everything that an owner can say."""

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from swarmnet_node.engine.memory_account import (
    MARGIN,
    MIB,
    P2PD_BYTES,
    Footprint,
    check_headroom,
    least_limit,
    resource_limits,
)
from swarmnet_node.owner.limits import NOT_PAUSED, MonthlyUsage, Observed, OwnerLimits, reason_to_pause
from swarmnet_node.owner.schedule import DAYS, Schedule
from swarmnet_protocols.errors import ConfigError, OutOfResources
from swarmnet_protocols.models.sizes import LayerWidths
from swarmnet_protocols.net.limits.resource_limits import Resource

MONDAY, TUESDAY, FRIDAY, SATURDAY, SUNDAY = 23, 24, 27, 28, 29
"""In November 2026."""


def at(day: int, clock: str) -> datetime:
    hour, minute = map(int, clock.split(":"))
    return datetime(2026, 11, day, hour, minute)  # noqa: DTZ001 - as an owner's clock shows it


@pytest.mark.parametrize(
    ("schedule", "day", "clock", "allowed"),
    [
        ("19:00-07:00", MONDAY, "18:59", False),
        ("19:00-07:00", MONDAY, "19:00", True),
        ("19:00-07:00", MONDAY, "23:59", True),
        ("19:00-07:00", TUESDAY, "00:00", True),
        ("19:00-07:00", TUESDAY, "06:59", True),
        ("19:00-07:00", TUESDAY, "07:00", False),
        ("mon-fri 19:00-07:00", MONDAY, "06:00", False),  # this would be the night of Sunday
        ("mon-fri 19:00-07:00", SATURDAY, "06:00", True),  # the night of Friday
        ("mon-fri 19:00-07:00", SATURDAY, "19:00", False),
        ("fri-mon 08:00-09:00", SUNDAY, "08:30", True),
        ("fri-mon 08:00-09:00", TUESDAY, "08:30", False),
        ("Sat, Sun 00:00-24:00", SUNDAY, "23:59", True),
        ("sat,sun 00:00-24:00", MONDAY, "00:00", False),
        ("mon-fri 19:00-07:00; sat,sun 00:00-24:00", SATURDAY, "12:00", True),
        ("mon-fri 19:00-07:00; sat,sun 00:00-24:00", FRIDAY, "12:00", False),
        ("22:00-00:00", MONDAY, "23:59", True),
        ("22:00-00:00", TUESDAY, "00:00", False),
    ],
)
def test_a_schedule_with_nights_and_weekends_is_followed(
    schedule: str, day: int, clock: str, allowed: bool
) -> None:
    assert Schedule.parse(schedule).allows(at(day, clock)) is allowed


@pytest.mark.parametrize(
    "hour", ["2026-03-29 00:30", "2026-03-29 01:30", "2026-10-25 00:30", "2026-10-25 01:30"]
)
def test_a_schedule_follows_the_clock_on_the_wall_when_it_changes(hour: str) -> None:
    """In Berlin, the hour from 2:00 to 3:00 is skipped in March, and occurs twice in October."""
    local = datetime.fromisoformat(f"{hour}+00:00").astimezone(ZoneInfo("Europe/Berlin"))
    assert Schedule.parse("00:00-05:00").allows(local)
    assert not Schedule.parse("05:00-23:00").allows(local)
    assert Schedule.parse("02:00-03:00").allows(local) is (local.hour == 2)


@pytest.mark.parametrize(
    "text",
    ["", "mon", "7-9", "25:00-26:00", "10:61-11:00", "10:00-10:00", "24:00-07:00", "foo 10:00-11:00", "mon fri 10:00-11:00", "10:00-11:00;", "1" * 300],
)  # fmt: skip
def test_invalid_schedules_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="schedule"):
        OwnerLimits(schedule=text)


@pytest.mark.parametrize(
    ("text", "day", "time", "opens"),
    [
        ("19:00-07:00", MONDAY, "12:00", "mon 19:00"),
        ("sat,sun 10:00-24:00; mon 13:00-14:00", MONDAY, "12:00", "mon 13:00"),
        ("sat,sun 10:00-24:00; mon 13:00-14:00", MONDAY, "14:00", "sat 10:00"),
        ("mon 08:00-09:00", MONDAY, "09:00", "mon 08:00"),
        ("mon 11:00-13:00", MONDAY, "12:00", "mon 12:00"),
    ],
)
def test_a_schedule_says_when_it_opens_next(text: str, day: int, time: str, opens: str) -> None:
    now = at(day, time)
    found = Schedule.parse(text).opens(now)
    assert f"{DAYS[found.weekday()]} {found:%H:%M}" == opens
    assert found >= now
    assert Schedule.parse(text).allows(found)


QUIET = Observed(at(MONDAY, "12:00"), idle_s=600.0, on_battery=False)
BUSY = Observed(at(MONDAY, "12:00"), idle_s=1.0, on_battery=False)
UNKNOWN = Observed(at(MONDAY, "12:00"), idle_s=None, on_battery=True)
NOTHING_USED = MonthlyUsage("2026-11")


@pytest.mark.parametrize(
    ("limits", "observed", "usage", "owner", "reason"),
    [
        (OwnerLimits(), UNKNOWN, NOTHING_USED, False, ""),
        (OwnerLimits(), QUIET, NOTHING_USED, True, "its owner paused it"),
        (OwnerLimits(idle_only=True), QUIET, NOTHING_USED, False, ""),
        (OwnerLimits(idle_only=True), BUSY, NOTHING_USED, False, "this machine is in use"),
        (
            OwnerLimits(idle_only=True, idle_after_s=601),
            QUIET,
            NOTHING_USED,
            False,
            "until nobody has used it for 601 s",
        ),
        (OwnerLimits(idle_only=True), UNKNOWN, NOTHING_USED, False, "it is not known"),
        (OwnerLimits(no_battery=True), UNKNOWN, NOTHING_USED, False, "until it is plugged in"),
        (OwnerLimits(no_battery=True), QUIET, NOTHING_USED, False, ""),
        (OwnerLimits(schedule="13:00-14:00"), QUIET, NOTHING_USED, False, "(13:00-14:00), until mon 13:00"),
        (OwnerLimits(monthly_bytes=10), QUIET, MonthlyUsage("2026-11", 5, 4), False, ""),
        (OwnerLimits(monthly_bytes=10), QUIET, MonthlyUsage("2026-11", 5, 5), False, "until 2026-12-01"),
        (OwnerLimits(monthly_bytes=10), QUIET, MonthlyUsage("2026-10", 500, 500), False, ""),
    ],
)
def test_a_node_runs_unless_something_forbids_it(
    limits: OwnerLimits, observed: Observed, usage: MonthlyUsage, owner: bool, reason: str
) -> None:
    paused_until = observed.now.timestamp() + 1 if owner else NOT_PAUSED
    found = reason_to_pause(limits, observed, usage, paused_until=paused_until)
    assert reason in found
    assert bool(found) == bool(reason)


def test_a_month_begins_with_nothing() -> None:
    usage = MonthlyUsage("2026-11").plus("2026-11", 3, 4).plus("2026-11", 1, 1)
    assert usage == MonthlyUsage("2026-11", 4, 5)
    assert usage.plus("2026-12", 2, 0) == MonthlyUsage("2026-12", 2, 0)


ALL = OwnerLimits(1 << 30, 0.8, 1e6, 2e6, 1 << 40, "19:00-07:00", True, 60.0, True, 4)


@pytest.mark.parametrize("limits", [OwnerLimits(), ALL])
def test_limits_are_read_back_as_they_were_written(limits: OwnerLimits) -> None:
    assert OwnerLimits.from_json(limits.to_json()) == limits


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"up": 3}', '{"cores": "4"}', '{"cores": true}', '{"idle_only": null}', '{"idle_only": 1}', '{"max_ram_bytes": 1.5}',
     '{"max_ram_bytes": -1}', '{"up_bytes_per_s": 1}', '{"up_bytes_per_s": NaN}', '{"schedule": 7}', "[" * 100_000, f'{{"cores": {"9" * 400}}}', f'{{"up_bytes_per_s": {"9" * 400}}}'],
)  # fmt: skip
def test_a_damaged_file_of_limits_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        OwnerLimits.from_json(text)


FOOTPRINT = Footprint(runtime_bytes=400 * MIB, block_bytes=14 * MIB, widths=LayerWidths(576, 576, 1536))


def test_the_blocks_that_fit_and_the_smallest_limit_are_reported() -> None:
    fitting = FOOTPRINT.blocks_within(900 * MIB)
    assert FOOTPRINT.min_ram_bytes(fitting) <= 900 * MIB < FOOTPRINT.min_ram_bytes(fitting + 1)
    FOOTPRINT.check(900 * MIB, fitting)
    with pytest.raises(OutOfResources) as refused:
        FOOTPRINT.check(900 * MIB, fitting + 1)
    assert f"--num-blocks {fitting}" in refused.value.hint
    least = int(refused.value.hint.split("--max-ram ")[1].split("MiB")[0])
    FOOTPRINT.check(least * MIB, fitting + 1)


def allowed(held: int, limit_mib: int | None, most: int = 30, free_mib: int = 1 << 20) -> int:
    limit = None if limit_mib is None else limit_mib * MIB
    return FOOTPRINT.blocks_allowed(held, most=most, max_ram_bytes=limit, free_bytes=free_mib * MIB)


def test_a_limit_that_is_raised_allows_as_many_blocks_as_at_a_start() -> None:
    fitting = FOOTPRINT.blocks_within(900 * MIB)
    assert 4 < fitting < 30
    assert allowed(4, 900) == fitting
    assert allowed(4, None) == 30
    assert allowed(4, 900, most=6) == 6, "the owner asked for no more"
    assert allowed(4, 900, free_mib=2 * 14) == 6, "other programs use the memory"
    assert allowed(4, 900, free_mib=-100) == 4


def test_a_lower_limit_drops_blocks_only_if_clients_lack_room() -> None:
    held = 20
    fixed = FOOTPRINT.runtime_bytes + P2PD_BYTES + held * FOOTPRINT.block_bytes
    least = -(-least_limit(fixed) // MIB)
    check_headroom(least * MIB, fixed)
    assert FOOTPRINT.blocks_within(least * MIB) < held
    assert allowed(held, least) == held, (
        "a node does not drop blocks because of memory that it may need later"
    )
    found = allowed(held, least - 1)
    assert found == FOOTPRINT.blocks_within((least - 1) * MIB) < held
    assert allowed(found, least - 1) == found, "once it has dropped some, it keeps the others"
    assert allowed(held, 1) == 1
    assert allowed(held, least - 1, free_mib=0) == found, "the machine's free memory does not matter"


def test_blocks_in_the_memory_of_an_accelerator_stay() -> None:
    footprint = Footprint(400 * MIB, 0, FOOTPRINT.widths)
    assert footprint.blocks_allowed(4, most=30, max_ram_bytes=1, free_bytes=0) == 4


def test_limits_of_clients_never_add_up_to_more_than_is_free() -> None:
    limit, fixed = 1000 * MIB, 600 * MIB
    held = {Resource.CACHE: 100 * MIB, Resource.LOG: 20 * MIB}
    found = resource_limits(limit, fixed + 120 * MIB, held, FOOTPRINT, fixed)
    assert sum(found.values()) <= limit * (1 - MARGIN) - fixed - FOOTPRINT.work_bytes
    assert all(found[resource] > amount for resource, amount in held.items())


@pytest.mark.parametrize("rss_mib", [720, 900, 1200])
def test_memory_that_is_counted_nowhere_reduces_the_limits(rss_mib: int) -> None:
    held = {Resource.CACHE: 100 * MIB}
    found = resource_limits(1000 * MIB, rss_mib * MIB, held, FOOTPRINT, 600 * MIB)
    if rss_mib >= 980:
        assert found[Resource.CACHE] == held[Resource.CACHE]
    assert sum(found.values()) + (rss_mib - 100) * MIB <= max(980, rss_mib) * MIB


def test_reserved_memory_that_is_not_resident_is_not_given_away_twice() -> None:
    held = {Resource.CACHE: 300 * MIB}
    assert resource_limits(1000 * MIB, 600 * MIB, held, FOOTPRINT, 600 * MIB) == resource_limits(
        1000 * MIB, 900 * MIB, held, FOOTPRINT, 600 * MIB
    )


def test_a_limit_below_what_a_running_node_has_is_refused() -> None:
    check_headroom(700 * MIB, 600 * MIB)
    with pytest.raises(OutOfResources) as refused:
        check_headroom(640 * MIB, 600 * MIB)
    assert "--max-ram 678MiB" in refused.value.hint
