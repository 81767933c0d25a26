"""Answers of a chat on a terminal: Markdown, rendered as it comes."""

import re
from dataclasses import dataclass, field
from typing import Any

from swarmnet.cli.chat.generation import RunAnswer, Screen
from swarmnet.terminal import shown

_FENCE = re.compile(r"^\s{0,3}(```|~~~)", re.MULTILINE)
REFRESHES_PER_S = 8


@dataclass(frozen=True)
class MarkdownScreen(Screen):
    """Renders the paragraphs, lists and code of an answer as they are completed. The last one,
    which still grows, is rendered again and again.

    Blank lines keep the answer apart from what the user types.
    """

    _state: dict[str, Any] = field(default_factory=dict)
    """While an answer is shown: its last block, and what displays it."""

    def show(self, piece: str) -> None:
        from rich.console import Console
        from rich.live import Live

        state = self._state
        if not state:
            console = Console()
            console.print()
            live = Live(console=console, refresh_per_second=REFRESHES_PER_S, vertical_overflow="visible")
            live.start()
            state |= {"text": "", "live": live}
        state["text"] += shown(piece)
        done, state["text"] = completed(state["text"])
        if done:
            state["live"].console.print(_rendered(done))
            state["live"].console.print()
        state["live"].update(_rendered(state["text"]))

    def stop(self) -> None:
        if self._state:
            self._state["live"].stop()
            self._state.clear()

    def end(self, answer: RunAnswer) -> None:
        self.stop()
        super().end(answer)


def completed(text: str) -> tuple[str, str]:
    """Return the part of a Markdown text whose blocks are complete, and the rest.

    Blank lines within a fence of code end no block.
    """
    end = 0
    for blank in re.finditer(r"\n[ \t]*\n", text):
        if len(_FENCE.findall(text, 0, blank.start())) % 2 == 0:
            end = blank.end()
    return text[:end].rstrip(), text[end:]


def _rendered(text: str) -> Any:
    from rich.markdown import Markdown

    return Markdown(text, hyperlinks=False)
