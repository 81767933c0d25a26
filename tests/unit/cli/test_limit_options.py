"""Limits on the command line: units, removal, display, and consent."""

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import pytest
import typer

from swarmnet import units
from swarmnet.cli.consent import AGREED_NAME, TRAINING, ask_once
from swarmnet.cli.limit_options import NOTHING, LimitOptions, lifted, rows
from swarmnet.cli.option_groups import From, command_for_typer
from swarmnet_node.owner.limits import PRESETS, OwnerLimits
from swarmnet_protocols.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("20mbit", 2.5e6), ("500kbit", 62_500.0), ("1gbit/s", 1.25e8), ("2.5MB/s", 2.5e6), ("1MiB/s", 1 << 20), ("0.5 Mbit", 62_500.0)],
)  # fmt: skip
def test_rates_are_read(text: str, bytes_per_s: float) -> None:
    assert units.parse_rate_bytes_per_s(text) == bytes_per_s


@pytest.mark.parametrize("text", ["", "20", "20m", "mbit", "-1mbit", "0mbit", "1e3mbit", "20mbit/h", "5MB"])
def test_invalid_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write a "):
        units.parse_rate_bytes_per_s(text)


@pytest.mark.parametrize(("text", "share"), [("80%", 0.8), ("100 %", 1.0), ("6GB", 6e9), ("8GiB", 8 << 30)])
def test_shares_are_read(text: str, share: float) -> None:
    assert units.parse_share(text) == share


@pytest.mark.parametrize("text", ["0%", "101%", "x", "%", "-1%"])
def test_invalid_shares_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write a "):
        units.parse_share(text)


def typed(*arguments: str) -> LimitOptions:
    """The options that a command takes from these arguments."""
    found = []

    def command(options: LimitOptions) -> None:
        found.append(options)

    app = typer.Typer()
    app.command()(command_for_typer(command))
    typer.main.get_command(app).main(list(arguments), standalone_mode=False)
    return found[0]


def test_every_limit_option_is_read() -> None:
    given = {
        "max-ram": "8G",
        "max-gpu-mem": "80%",
        "up": "20mbit",
        "down": "50mbit",
        "monthly": "200G",
        "schedule": "mon-fri 19:00-07:00",
        "idle-after": "5m",
        "cores": "2",
        "relay": "off",
    }
    options = typed("--idle-only", "--no-battery", *(f"--{name}={text}" for name, text in given.items()))
    limits = OwnerLimits(**options.given())
    assert limits == OwnerLimits(
        8 * 10**9, 0.8, 2.5e6, 6.25e6, 200 * 10**9, "mon-fri 19:00-07:00", True, 300, True, 2, 0.0
    )
    assert typed("--down", "1mbit").given() == {"down_bytes_per_s": 125_000.0}
    assert replace(limits, **lifted([*given, "idle-only", "no-battery"])) == OwnerLimits()
    named = {*given, "idle-only", "no-battery", "preset"}
    assert {*rows(replace(limits, preset="laptop"))} == named - {"idle-after"}, "words are those of options"
    assert rows(limits)["idle-only"] == "after 5 minutes without keyboard or mouse"
    assert {*rows(OwnerLimits(relay_bytes_per_s=0.0)).values()} == {*NOTHING, "off"}


@pytest.mark.parametrize("option", ["--max-ram", "--max-gpu-mem", "--monthly"])
@pytest.mark.parametrize("text", ["8", "0.5", "8000000000"])
def test_a_size_without_a_unit_is_refused(option: str, text: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"write the unit of the size: {text}GiB or {text}MiB"):
        typed(option, text)


def test_the_presets_are_sets_of_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=16 << 30))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    found = {name: typed("--preset", name).applied_to(OwnerLimits()) for name in PRESETS}
    assert [each.max_ram_bytes for each in found.values()] == [4 << 30, 8 << 30, (16 << 30) * 4 // 5]
    assert [each.cores for each in found.values()] == [4, 4, None]
    assert found["laptop"].idle_only
    assert found["laptop"].no_battery
    assert not found["desktop"].are_conditional
    for name, limits in found.items():
        assert rows(limits)["preset"] == name
        assert OwnerLimits.from_json(limits.to_json()) == limits
    with pytest.raises(typer.BadParameter, match="use laptop, desktop or server"):
        typed("--preset", "phone")
    with pytest.raises(ConfigError, match="no preset 'phone'"):
        OwnerLimits.from_json('{"preset": "phone"}')


def test_other_options_win_over_a_preset() -> None:
    limits = typed("--preset", "laptop", "--up", "1mbit").applied_to(OwnerLimits(schedule="19:00-07:00"))
    assert (limits.preset, limits.up_bytes_per_s, limits.schedule) == ("laptop", 125_000.0, None)


def test_a_stored_change_wins_over_its_preset_at_a_restart() -> None:
    given = typed("--preset", "laptop")
    changed = replace(given.applied_to(OwnerLimits()), up_bytes_per_s=125_000.0)
    assert given.applied_to(changed) == changed
    assert given.applied_to(changed, anew=True).up_bytes_per_s == 625_000.0
    assert typed("--preset", "server").applied_to(changed).up_bytes_per_s is None


def test_every_limit_has_an_option_of_its_name() -> None:
    assert {each.name for each in fields(LimitOptions)} == {each.name for each in fields(OwnerLimits)}


def test_impossible_values_are_named_by_their_option() -> None:
    with pytest.raises(typer.BadParameter) as caught:
        typed("--up", "fast")
    assert caught.value.format_message().startswith("Invalid value for '--up': 'fast' is not possible")
    with pytest.raises(typer.BadParameter, match="max-ram, max-gpu-mem"):
        lifted(["upload"])
    with pytest.raises(ConfigError, match="--up of 1 kbit/s") as too_low:
        typed("--up", "1kbit").given()
    assert too_low.value.hint == "choose 512 kbit/s or more"


@dataclass(frozen=True, kw_only=True)
class _Outer:
    share: Annotated[float, typer.Option("--share", min=1), From(int, lambda percent: percent / 100, 25)]
    inner: LimitOptions
    names: Annotated[list[str], typer.Option("--name")] = field(default_factory=list)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], _Outer(share=0.25, inner=LimitOptions(), names=[])),
        (
            ["--share", "50", "--name", "a", "--name", "b", "--cores", "3"],
            _Outer(share=0.5, inner=LimitOptions(cores=3), names=["a", "b"]),
        ),
    ],
)
def test_options_fill_dataclasses_within_dataclasses(arguments: list[str], expected: _Outer) -> None:
    found = []
    app = typer.Typer()

    def command(outer: _Outer, *, plain: int = 7) -> None:
        found.append((outer, plain))

    app.command()(command_for_typer(command))
    typer.main.get_command(app).main(arguments, standalone_mode=False)
    assert found == [(expected, 7)]


class _Terminal:
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("answer", [True, False])
def test_the_owner_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, answer: bool
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin", _Terminal())
    monkeypatch.setattr(typer, "confirm", lambda text, **options: asked.append(text) or answer)
    if answer:
        ask_once(tmp_path, {"memory": "8 GB"}, asking=True)
        ask_once(tmp_path, {"memory": "8 GB"}, asking=True)
    else:
        with pytest.raises(typer.Abort):
            ask_once(tmp_path, {"memory": "8 GB"}, asking=True)
    shown = capsys.readouterr()
    assert len(asked) == 1
    assert shown.err.count("memory  8 GB") == 1
    assert not shown.out
    assert (tmp_path / AGREED_NAME).exists() is answer


@pytest.mark.parametrize("asking", [True, False])
def test_without_a_terminal_or_with_yes_no_question_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, asking: bool
) -> None:
    if not asking:
        monkeypatch.setattr("sys.stdin", _Terminal())
    monkeypatch.setattr(typer, "confirm", lambda *_, **__: pytest.fail("asked"))
    ask_once(tmp_path, {"memory": "8 GB"}, asking=asking)
    assert (tmp_path / AGREED_NAME).exists()


@pytest.mark.parametrize("as_json", [True, False])
def test_a_script_that_trains_a_job_has_to_say_yes_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    folder = tmp_path / "training" / "job"
    with pytest.raises(typer.BadParameter, match="--yes"):
        ask_once(folder, {"reads": "texts"}, TRAINING, asking=True, as_json=as_json)
    assert not folder.exists()
    assert ("reads" in capsys.readouterr().err) is not as_json
    for asking in (False, True):
        ask_once(folder, {"reads": "texts"}, TRAINING, asking=asking, as_json=as_json)
    assert (folder / AGREED_NAME).exists()


@pytest.mark.parametrize("asking", [True, False])
def test_with_json_nothing_is_asked_and_a_person_has_to_have_agreed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, asking: bool
) -> None:
    monkeypatch.setattr("sys.stdin", _Terminal())
    monkeypatch.setattr(typer, "confirm", lambda *_, **__: pytest.fail("asked"))
    if asking:
        with pytest.raises(typer.BadParameter, match="--yes"):
            ask_once(tmp_path, {"memory": "8 GB"}, asking=True, as_json=True)
        assert not (tmp_path / AGREED_NAME).exists()
        assert not capsys.readouterr().out
        return
    for _ in range(2):
        ask_once(tmp_path, {"memory": "8 GB"}, asking=False, as_json=True)
    ask_once(tmp_path, {"memory": "8 GB"}, asking=True, as_json=True)
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"event": "sharing", "uses": {"memory": "8 GB"}}
    assert not shown.err


def test_memory_is_shown_as_it_is_asked_for() -> None:
    for text in ("6 GiB", "1.5 GiB", "512 MiB", "1000 MiB", "20480 GiB"):
        assert units.show_memory(units.parse_size_bytes(text.replace(" ", ""))) == text


def test_no_number_is_shown_with_an_exponent() -> None:
    assert [units.show_rate(rate) for rate in (8e3, 2.5e6, 1.25e8, 1.25e9)] == [
        "64 kbit/s",
        "20 mbit/s",
        "1000 mbit/s",
        "10000 mbit/s",
    ]
    assert [units.show_size(size) for size in (999, 1145, 999_700, 2e15)] == [
        "999 B",
        "1.15 kB",
        "1 MB",
        "2000 TB",
    ]


def test_durations_are_shown_in_their_largest_unit_from_two_on() -> None:
    shown = [units.show_duration(seconds) for seconds in (0, 119, 120, 7199, 7200, 172_799, 172_800)]
    assert shown == ["0 s", "119 s", "2 minutes", "120 minutes", "2 hours", "48 hours", "2 days"]
