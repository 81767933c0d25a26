"""What commands print for people."""

import re
import sys

import pytest

from swarmnet.cli.output import clear_terminal, note_if_first, print_table


def test_a_long_value_stays_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address that was folded could not be copied."""
    monkeypatch.setenv("COLUMNS", "40")
    address = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWNvSZnPi3RrhrTwEY4LuuBeB6K6facKUCJcyWG1aoDd2p"
    print_table("a node", {"name": "kitchen [1]", "addresses": f"{address}\n{address}"})
    assert capsys.readouterr().out.splitlines() == [
        "a node",
        "name       kitchen [1]",
        f"addresses  {address}",
        f"           {address}",
    ]


def test_on_a_terminal_words_go_on_under_their_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    address = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWNvSZnPi3RrhrTwEY4LuuBeB6K6facKUCJcyWG1aoDd2p"
    words = "whoever is in sees what passes through"
    print_table("", {"does not": words, "address": address})
    assert re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines() == [
        "does not  whoever is in sees what passes",
        "          through",
        f"address   {address}",
    ]


def test_only_a_terminal_is_cleared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    clear_terminal()
    assert not capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    clear_terminal()
    assert "\x1b[2J" in capsys.readouterr().out


def test_who_has_nobody_to_start_from_reads_that_it_is_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    note_if_first(["/ip4/127.0.0.1/tcp/4001"], as_json=False)
    note_if_first([], as_json=True)
    assert capsys.readouterr() == ("", "")
    note_if_first([], as_json=False)
    assert "the first of its swarm" in capsys.readouterr().err
