"""Input of a chat: with editing and a history on a terminal, otherwise line by line from stdin."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import typer

from swarmnet.cli.output import note

MAX_MESSAGE_CHARS = 4 << 20
QUOTES = '"""'
_HISTORY_LINES = 1000


@dataclass(frozen=True)
class Keyboard:
    """Reads messages: of one line, or of several between ``QUOTES`` or with a backslash at the end
    of all but the last."""

    is_terminal: bool

    def read(self) -> str | None:
        """Return the next message, or None at the end of the input.

        Raises ``KeyboardInterrupt`` for a second Ctrl-C in a row, and ``BadParameter`` for input
        that is not in the terminal's encoding.
        """
        try:
            return self._message()
        except UnicodeDecodeError as error:
            raise not_text(error) from error
        except KeyboardInterrupt:
            if not self.is_terminal:
                raise
        note("\nCtrl-C again, Ctrl-D or /quit leaves")
        return self._message()

    def _message(self) -> str | None:
        line = self._line("> ")
        if line is None:
            return None
        lines = [line.removeprefix(QUOTES)]
        while sum(map(len, lines)) < MAX_MESSAGE_CHARS:
            if line.startswith(QUOTES):
                if lines[-1].endswith(QUOTES):
                    lines[-1] = lines[-1].removesuffix(QUOTES)
                    break
            elif lines[-1].endswith("\\"):
                lines[-1] = lines[-1].removesuffix("\\")
            else:
                break
            more = self._line(". ")
            if more is None:
                break
            lines.append(more)
        return "\n".join(lines)

    def _line(self, prompt: str) -> str | None:
        if self.is_terminal and sys.stdout.isatty():
            try:
                return input(prompt)
            except EOFError:
                return None
        if self.is_terminal:
            sys.stderr.write(prompt)
            sys.stderr.flush()
        line = sys.stdin.readline(MAX_MESSAGE_CHARS)
        return line.removesuffix("\n") if line else None


def not_text(error: UnicodeDecodeError) -> typer.BadParameter:
    """Return the error for a stdin that is not in its encoding."""
    encoding, at = error.encoding.upper(), error.start + 1
    return typer.BadParameter(f"stdin is not {encoding} at byte {at}", param_hint="PROMPT")


@contextmanager
def keyboard(history: Path | None, words: Sequence[str]) -> Iterator[Keyboard]:
    """Yield the input from the terminal, or from stdin if it is not a terminal. At a terminal
    ``words`` are completed, and input is stored in ``history`` (0600).

    On Windows the terminal itself edits lines, and no history is stored.
    """
    if not sys.stdin.isatty():
        yield Keyboard(is_terminal=False)
        return
    _prepare(history, words)
    try:
        yield Keyboard(is_terminal=True)
    finally:
        if history is not None:
            _keep(history)


if sys.platform == "win32":

    def _prepare(history: Path | None, words: Sequence[str]) -> None: ...

    def _keep(history: Path) -> None: ...
else:

    def _prepare(history: Path | None, words: Sequence[str]) -> None:
        import readline

        readline.set_completer_delims(" ")
        readline.set_completer(
            lambda typed, number: dict(enumerate(word for word in words if word.startswith(typed))).get(
                number
            )
        )
        readline.parse_and_bind("tab: complete")
        readline.clear_history()
        if history is not None:
            with suppress(OSError):  # a chat works without a readable history
                readline.read_history_file(history)

    def _keep(history: Path) -> None:
        import readline

        readline.set_history_length(_HISTORY_LINES)
        try:
            history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            history.touch(mode=0o600)
            history.chmod(0o600)
            readline.write_history_file(history)
        except OSError as error:
            note(f"the history cannot be stored: {history}: {error.strerror}")
