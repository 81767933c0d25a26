"""Limits on the command line: units, removal, display, and consent."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from swarmnet import units
from swarmnet.cli.consent import AGREED_NAME, TRAINING, ask_once
from swarmnet.cli.limit_options import lifted, read_options, rows
from swarmnet_node.owner.limits import OwnerLimits
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


def test_every_limit_option_is_read() -> None:
    options = {
        "max_ram": "8G",
        "max_gpu_mem": "80%",
        "up": "20mbit",
        "down": "50mbit",
        "monthly": "200G",
        "schedule": "mon-fri 19:00-07:00",
        "idle_only": True,
        "idle_after": "5m",
        "no_battery": True,
        "cores": 2,
    }
    limits = OwnerLimits(**read_options(options))
    assert limits == OwnerLimits(
        8 * 10**9, 0.8, 2.5e6, 6.25e6, 200 * 10**9, "mon-fri 19:00-07:00", True, 300, True, 2
    )
    assert read_options({"up": None, "down": "1mbit"}) == {"down_bytes_per_s": 125_000.0}
    assert replace(limits, **lifted([name.replace("_", "-") for name in options])) == OwnerLimits()
    assert rows(limits)["when"].startswith("mon-fri 19:00-07:00, while the machine")


def test_impossible_values_are_named_by_their_option() -> None:
    with pytest.raises(typer.BadParameter) as caught:
        read_options({"up": "fast"})
    assert caught.value.param_hint == "'--up'"
    with pytest.raises(typer.BadParameter, match="max-ram, max-gpu-mem"):
        lifted(["upload"])
    with pytest.raises(ConfigError, match="up of 1 kbit/s") as too_low:
        read_options({"up": "1kbit"})
    assert too_low.value.hint == "choose 512 kbit/s or more"


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
