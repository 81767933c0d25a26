"""Output of commands for people."""

import json
import logging
import re
import sys

import pytest
from rich.console import Console

from swarmnet import logs
from swarmnet.cli import output
from swarmnet.cli.chat.generation import RunAnswer, Screen
from swarmnet.cli.failures import explain
from swarmnet.cli.output import clear_terminal, note, print_folded, print_table, print_text
from swarmnet.cli.training import displays
from swarmnet.cli.training.displays import Lines, Telling, bars
from swarmnet.logs import configure
from swarmnet_protocols.errors import SwarmnetError
from tests.defences import Patch, defence


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
    words = "each member sees what passes through"
    print_table("", {"does not": words, "address": address})
    assert re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines() == [
        "does not  each member sees what passes",
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


HOSTILE = "a\x1b]0;owned\x07\x1b]52;c;cm0gLXJm\x07\x1b[2J\x9b2J\r\u202eb\tc\nd"


def print_everywhere(text: str) -> None:
    """Print ``text`` through every function that may print text of peers."""
    Screen().show(text)
    explain(SwarmnetError(text, hint=text)).show(as_json=False)
    explain(SwarmnetError(text, hint=text)).show(as_json=True)
    for printing in (note, print_folded, print_text):
        printing(text)
    print_table(text, {"name": text})
    Lines().progress(text, 0, None)
    with bars(Console(stderr=True)) as display:
        display.progress(text, 0, None)
        display.show({}, Telling(text, summary=text, is_news=True))
    configure(log_format="text", level="warning")
    logging.getLogger("peer").warning("%s", text)


def show_as_it_is(patch: Patch) -> None:
    for module in (output, displays, logs):
        patch.setattr(module, "shown", lambda text: text)


@defence("text of peers does not control the terminal", off=show_as_it_is)
def test_text_of_a_peer_does_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_everywhere(HOSTILE)
    out, err = capsys.readouterr()
    assert not re.findall(r"[^\n\t\x20-\x7e\u00a0-\u2029\u202f-\u2065\u206a-\U0010ffff]", out + err)
    assert "a\u241b]0;owned\u2407" in out
    assert "b\tc\nd" in out
    assert "a\u241b]0;owned\u2407" in err


def test_letters_and_emoji_of_all_languages_are_printed_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "नमस्ते می‌خواهم 👩‍👩‍👧 e\u0301 \u200f\u200e"
    Screen().show(text)
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("as_json", [True, False])
def test_a_notice_is_printed_at_once_or_is_part_of_every_json(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen(as_json)
    screen.notice("IQ2_XXS is computed in float32")
    before = capsys.readouterr()
    assert (before.out, before.err) == ("", "" if as_json else "IQ2_XXS is computed in float32\n")
    answer = RunAnswer("!", [1], 1, 0.1, 0.2, 5.0, [], 1, 1.0, 0, 0.0)
    for _ in range(2):
        screen.end(answer)
    if as_json:
        found = [json.loads(line)["notices"] for line in capsys.readouterr().out.splitlines()]
        assert found == [["IQ2_XXS is computed in float32"]] * 2
