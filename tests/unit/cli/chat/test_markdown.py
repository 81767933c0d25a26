"""Answers on a terminal: rendered Markdown, which completed blocks do not wait for."""

import re

import pytest

from swarmnet.cli.chat.generation import RunAnswer, RunHop, in_words
from swarmnet.cli.chat.markdown import MarkdownScreen, completed

ANSWER = RunAnswer(
    "", [5] * 48, 9, 0.31, 3.2, 15.0, [RunHop("a", 0, 10), RunHop("b", 10, 30)], 24, 2.0, 0, 0.0
)
CODE = "Text.\n\n```python\nx = 1\n\ny = 2\n```"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One", ("", "One")),
        ("One\n\nTwo", ("One", "Two")),
        (CODE, ("Text.", CODE[7:])),
        (f"{CODE}\n\nEnd", (CODE, "End")),
    ],
)
def test_only_complete_blocks_are_final(text: str, expected: tuple[str, str]) -> None:
    assert completed(text) == expected


def test_an_answer_is_wrapped_at_words_and_rendered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    screen = MarkdownScreen()
    for piece in re.findall(r".{1,7}", f"{'words of **several** letters ' * 4}\x1b[2J [a](http://b)"):
        screen.show(piece)
    screen.end(ANSWER)
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert all(len(line) <= 30 for line in lines)
    assert "**" not in told.out
    assert "\x1b[2J" not in told.out
    assert "\x1b]8" not in told.out
    assert lines[0] == ""
    assert told.err == f"{in_words(ANSWER)}\n"
    assert not screen._state


def test_the_speed_of_an_answer_is_told_in_words() -> None:
    assert in_words(ANSWER) == (
        "48 tokens in 3.2 s: 15.0 a second, 2.0 a trip, the first after 0.31 s; blocks 0:10 -> 10:30"
    )
