"""A chat with a model on the swarm: reads messages and commands and prints answers, until the user
leaves."""

import dataclasses
import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer

from swarmnet.cli.chat.conversation import Conversation, Turn
from swarmnet.cli.chat.generation import (
    Answerer,
    RunAnswer,
    RunHop,
    SamplingOptions,
    Screen,
    Stopped,
    generate,
)
from swarmnet.cli.chat.keyboard import QUOTES, keyboard
from swarmnet.cli.failures import EXIT_INTERRUPTED, explain
from swarmnet.cli.options import check_at_least_zero, check_share
from swarmnet.cli.output import note
from swarmnet.units import counted, show_size
from swarmnet_protocols.errors import SwarmnetError

COMMANDS = {
    "/help": "this list",
    "/route": "the hosts that computed the last answer",
    "/set": "all settings; /set temperature 0.7 changes one: temperature, top_p, top_k, min_p, "
    "repetition_penalty, max_new_tokens, seed, system",
    "/undo": "forget the last message and its answer",
    "/retry": "answer the last message once more",
    "/clear": "forget everything that was said",
    "/save": "/save FILE writes the conversation, as text or, if FILE ends in .json, as messages of the OpenAI API",
    "/stats": "tokens, speed, failures and traffic of this chat",
    "/quit": "leave, as Ctrl-D does",
}
_FRACTIONS = {"temperature", "top_p", "min_p", "repetition_penalty"}
_UNSET = {
    "temperature": "the model's own",
    "top_p": "the model's own",
    "seed": "another one for each answer",
}


class Chat:
    """A chat with a model, whose KV caches stay on the hosts between turns."""

    def __init__(
        self,
        answerer: Answerer,
        conversation: Conversation,
        sampling: SamplingOptions,
        screen: Screen,
    ) -> None:
        self.conversation = conversation
        self.sampling = sampling
        self._answerer = answerer
        self._session = ExitStack()
        self._screen = screen
        self._route: list[RunHop] = []
        self._answers: list[RunAnswer] = []
        self._unanswered = ""

    def run(self, history: Path | None) -> None:
        """Chat until the user leaves; input is stored in the file ``history``.

        Without a terminal, the first error ends the chat. Raises ``KeyboardInterrupt`` for a second
        Ctrl-C in a row at the prompt.
        """
        with (
            _ended_by_sigterm(),
            self._session,
            keyboard(history, list(COMMANDS)) as keys,
        ):
            self._session.enter_context(self._answerer.session())
            if keys.is_terminal:
                self._greet()
            while (text := keys.read()) is not None and text.strip() != "/quit":
                try:
                    self.take(text)
                except (SwarmnetError, typer.BadParameter, KeyboardInterrupt) as error:
                    if not keys.is_terminal:
                        raise
                    note(_what_happened(error))

    def take(self, text: str) -> None:
        """Run a command, or answer a message. A message without an answer is not kept as a turn.

        Raises ``typer.BadParameter`` for an invalid command, ``SwarmnetError`` for a failed answer,
        ``Stopped`` for Ctrl-C.
        """
        if text.startswith("//"):
            self._ask(text[1:])
        elif text.startswith("/"):
            self._obey(text)
        elif text.strip():
            self._ask(text if self.conversation.is_plain else text.strip())

    # ---- answers --------------------------------------------------------------------------------

    def _ask(self, question: str) -> None:
        self.conversation.turns.append(Turn(question))
        self._answer()

    def _answer(self) -> None:
        turn = self._last()
        turn.answer, self._unanswered = "", turn.question
        try:
            answer = self._generate()
            turn.answer = answer.text
            self._tell(answer)
        except Stopped as stopped:
            turn.answer = stopped.answer.text
            self._tell(stopped.answer)
            raise
        except SwarmnetError:
            # The session's chain could not be repaired, so the next answer needs a new session.
            self._session.close()
            self._session.enter_context(self._answerer.session())
            raise
        finally:
            self._screen.stop()
            if turn.answer:
                self._unanswered = ""
            else:
                self.conversation.turns.pop()

    def _generate(self) -> RunAnswer:
        prompt, dropped = self.conversation.prompt(self.sampling.max_new_tokens)
        if dropped:
            note(
                f"the model reads {self.conversation.context} tokens at most, so it forgot the oldest {counted(dropped, 'turn')}"
            )
        return generate(
            self._answerer,
            prompt,
            self.sampling,
            self._screen,
            continues=self.conversation.is_plain,
        )

    def _tell(self, answer: RunAnswer) -> None:
        self._answers.append(answer)
        self._screen.end(answer)
        if len(answer.token_ids) + answer.prompt_tokens >= self.conversation.context:
            note("the answer ends here because the context is full")
        if answer.failovers:
            note(_mended(self._route, answer))
        self._route = answer.route

    # ---- commands -------------------------------------------------------------------------------

    def _greet(self) -> None:
        note(f'/help lists the commands; {QUOTES} begins and ends a message of several lines; "/quit" leaves')
        if self.conversation.is_plain:
            note("no chat template: the model continues the text that you type")

    def _obey(self, text: str) -> None:
        name, _, argument = text.strip().partition(" ")
        argument = argument.strip()
        match name:
            case "/help":
                self._help()
            case "/route":
                self._show_route()
            case "/set":
                self._set(argument)
            case "/undo":
                note(f"forgotten: {self._last().question[:60]}")
                self.conversation.turns.pop()
            case "/retry" if self._unanswered:
                self._ask(self._unanswered)
            case "/retry":
                self._answer()
            case "/clear":
                self.conversation.turns.clear()
                self._unanswered = ""
                note("all turns are forgotten")
            case "/save":
                self._save(argument)
            case "/stats":
                self._stats()
            case _:
                raise typer.BadParameter(
                    f"there is no {name}: /help lists the commands, and // begins a message with a slash"
                )

    def _help(self) -> None:
        for name, what in COMMANDS.items():
            note(f"{name:8} {what}")
        note(
            f"{QUOTES}      begins and ends a message of several lines; after a \\ at the end of a line, the next line belongs to the message, too"
        )
        note("Ctrl-C   stops an answer")

    def _set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        if name == "system":
            self.conversation.system = value.strip()
        elif name:
            self.sampling = changed(self.sampling, name, value.strip())
        for each, now in (dataclasses.asdict(self.sampling) | {"system": self.conversation.system}).items():
            if not name or each == name:
                note(f"{each} = {_UNSET.get(each, 'not set') if now in (None, '') else now}")

    def _show_route(self) -> None:
        if not self._route:
            raise typer.BadParameter("there is no answer yet")
        for hop in self._route:
            note(f"{hop.start:3}:{hop.end:<3} {hop.peer_id}")

    def _save(self, argument: str) -> None:
        if not argument:
            raise typer.BadParameter("say where: /save FILE")
        path = Path(argument).expanduser()
        text = self._as_json() if path.suffix == ".json" else self._as_text()
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
        except OSError as error:
            raise typer.BadParameter(f"{path}: {error.strerror}; choose another name") from None
        note(f"saved to {path}")

    def _stats(self) -> None:
        answers = self._answers
        tokens, seconds = sum(len(each.token_ids) for each in answers), sum(each.total_s for each in answers)
        failovers = sum(each.failovers for each in answers)
        stall_s = max((each.longest_stall_s for each in answers), default=0.0)
        speed = tokens / seconds if seconds else 0.0
        note(f"{counted(len(answers), 'answer')}, {counted(tokens, 'token')}, {speed:.1f}/s")
        note(f"{counted(failovers, 'host')} replaced, the longest pause {stall_s:.1f} s")
        if (traffic := self._answerer.traffic) is not None:
            note(f"{show_size(traffic.sent)} sent, {show_size(traffic.received)} received")
        held = len(self.conversation.encode()) if self.conversation.turns else 0
        note(f"{held} of {self.conversation.context} tokens of context in use")

    def _last(self) -> Turn:
        if not self.conversation.turns:
            raise typer.BadParameter("there is no message yet")
        return self.conversation.turns[-1]

    def _as_json(self) -> str:
        return json.dumps({"messages": self.conversation.messages()}, indent=2, ensure_ascii=False) + "\n"

    def _as_text(self) -> str:
        return "\n\n".join(
            f"**{message['role']}**\n\n{message['content']}" for message in self.conversation.messages()
        )


def _what_happened(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "stopped: what was said so far is kept"
    if isinstance(error, typer.BadParameter):
        return f"error: {error.message}"
    failure = explain(error)
    return f"error: {failure.message}\nhint: {failure.hint}; then /retry"


def changed(sampling: SamplingOptions, name: str, value: str) -> SamplingOptions:
    """Return ``sampling`` with one setting changed to the text ``value``; `default` resets the
    setting. Raises ``typer.BadParameter``."""
    fields = [name for name, usual in vars(SamplingOptions()).items() if not isinstance(usual, list)]
    if name not in fields:
        known = ", ".join([*fields, "system"])
        raise typer.BadParameter(f"there is no setting {name}: use one of {known}")
    if value == "default":
        usual: dict[str, Any] = {name: getattr(SamplingOptions(), name)}
        return dataclasses.replace(sampling, **usual)
    try:
        number: Any = float(value) if name in _FRACTIONS else int(value)
    except ValueError:
        raise typer.BadParameter(f"{name} takes a number, not {value!r}") from None
    if name == "top_p":
        check_share(number, option=name)
    else:
        check_at_least_zero(number, option=name)
    if name == "max_new_tokens" and not number:
        raise typer.BadParameter("max_new_tokens must be at least 1", param_hint=f"'{name}'")
    found = dataclasses.replace(sampling, **{name: number})
    found.check()
    return found


def _mended(before: Sequence[RunHop], answer: RunAnswer) -> str:
    """Return a sentence that names the hosts that joined the chain during an answer."""
    newcomers = [hop for hop in answer.route if hop not in before]
    names = ", ".join(f"…{hop.peer_id[-8:]} ({hop.start}:{hop.end})" for hop in newcomers)
    return f"a host left; continued on {names or 'the others'} after {answer.longest_stall_s:.1f} s"


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM end the process; by default it acts like Ctrl-C, which ends only the current
    answer in a chat."""

    def leave(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(EXIT_INTERRUPTED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
