"""One answer of a model: streamed to the terminal and measured."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from swarmnet.cli.options import SpeculateOption, check_at_least_zero, check_share
from swarmnet.cli.output import note, print_json, print_text, progress
from swarmnet.gateway.generation.detokenizer import IncrementalDetokenizer
from swarmnet.units import counted

if TYPE_CHECKING:
    from swarmnet_client.chain.hops import ChainReport
    from swarmnet_client.hosts.traffic import Traffic

LONG_PROMPT = 512
"""Tokens of a prompt above which its progress is shown. Shorter ones come in one or two parts."""


@dataclass(frozen=True)
class SamplingOptions:
    """The options of `run` that say how tokens are chosen, and how many."""

    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens", "-n", metavar="N", min=1, help="Stop the answer after this many tokens."
        ),
    ] = 256
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="T",
            help="0 always takes the most likely token. Higher values make answers more varied.",
            show_default="0; in a chat, the model's own",
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="S", min=0, help="Repeat this number to get the same answer again."),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            metavar="P",
            help="Sample only from the most likely tokens that together have this probability.",
            show_default="the model's own",
        ),
    ] = None
    top_k: Annotated[
        int,
        typer.Option(
            "--top-k", metavar="K", min=0, help="Sample only from the K most likely tokens. 0: all."
        ),
    ] = 0
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p",
            metavar="P",
            help="Sample only from tokens with at least this share of the likeliest one's probability.",
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        typer.Option(
            "--repetition-penalty",
            metavar="X",
            help="Above 1, makes tokens of the prompt and answer less likely to come again. Example: 1.1.",
        ),
    ] = 1.0
    bad_words: Annotated[
        list[str],
        typer.Option(
            "--bad-word",
            metavar="TEXT",
            help="A text that the answer never contains; repeatable.",
            show_default=False,
        ),
    ] = field(default_factory=list)
    logit_bias: Annotated[
        list[str],
        typer.Option(
            "--logit-bias",
            metavar="TOKEN=BIAS",
            help="Make the token with this id likelier, or with a negative bias less likely; repeatable.",
            show_default=False,
        ),
    ] = field(default_factory=list)
    speculate: SpeculateOption = True

    @property
    def biases(self) -> list[tuple[int, float]]:
        """Biases of token ids. Raises ``typer.BadParameter``."""
        return [_bias(text) for text in self.logit_bias]

    def check(self) -> None:
        """Raise ``typer.BadParameter`` for a value that is not possible."""
        if self.temperature is not None:
            check_at_least_zero(self.temperature, option="--temperature")
        if self.top_p is not None:
            check_share(self.top_p, option="--top-p")
        if not 0 <= self.min_p <= 1:
            raise typer.BadParameter(f"{self.min_p} is not between 0 and 1", param_hint="'--min-p'")
        if not 0 < self.repetition_penalty <= 10:
            message = f"{self.repetition_penalty} is not possible: give a number above 0, up to 10"
            raise typer.BadParameter(message, param_hint="'--repetition-penalty'")
        if not all(self.bad_words):
            raise typer.BadParameter("the text is empty", param_hint="'--bad-word'")
        _ = self.biases

    def check_tokens(self, vocabulary_size: int) -> None:
        """Raise ``typer.BadParameter`` for a token that the model does not know."""
        if any(token >= vocabulary_size for token, _ in self.biases):
            message = f"token ids of this model go up to {vocabulary_size - 1}"
            raise typer.BadParameter(message, param_hint="'--logit-bias'")


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        found = float(bias)
        if not token.isdecimal() or not -100 <= found <= 100:
            raise ValueError
        return int(token), found
    except ValueError:
        message = f"{text!r} is not TOKEN=BIAS, such as 40=-100; biases go from -100 to 100"
        raise typer.BadParameter(message, param_hint="'--logit-bias'") from None


class Answerer(Protocol):
    """A model on the swarm."""

    tokenizer: Any
    context: int
    """Most positions of a prompt and its answer."""
    vocabulary_size: int

    @property
    def report(self) -> "ChainReport":
        """The report of the chain that was used last."""

    @property
    def traffic(self) -> "Traffic | None":
        """Bytes sent to and received from hosts; None if another process exchanges them."""

    def session(self) -> AbstractContextManager[object]:
        """Return a context in which the hosts keep what they computed for the next prompt."""

    def answer(
        self,
        ids: Sequence[int],
        sampling: SamplingOptions,
        put: Callable[[int], None],
        *,
        exact: bool = False,
        prefilled: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Answer a prompt; ``put`` gets each token.

        ``sampling``: None stands for the model's own. ``exact``: the answer has all
        ``max_new_tokens``. ``prefilled`` is called while the prompt is computed: with its positions
        so far, and with all of them. Raises ``SwarmnetError``, or ``KeyboardInterrupt`` for Ctrl-C.
        """


@dataclass(frozen=True)
class RunHop:
    peer_id: str
    start: int
    end: int


@dataclass(frozen=True)
class RunAnswer:
    """An answer as ``run --json`` prints it.

    ``token_ids``: the new tokens. ``trips``: steps sent through the chain; with speculation fewer
    than new tokens. ``precisions``: the different precisions of the hosts' weights. ``audited``:
    how often a host's output was recomputed by another. ``wrong_hosts``: hosts whose output
    differed.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    first_token_s: float
    total_s: float
    tokens_per_s: float
    route: list[RunHop]
    trips: int
    tokens_per_trip: float
    failovers: int
    longest_stall_s: float
    audited: int = 0
    wrong_hosts: list[str] = field(default_factory=list)
    precisions: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Screen:
    """Prints answers, as text or as JSON objects: one for each answer.

    With ``pieces`` each piece of text is an object, too.
    """

    as_json: bool = False
    pieces: bool = False
    notices: list[str] = field(default_factory=list)
    """Notices about the model. Every answer in JSON repeats them."""
    _begun: list[str] = field(default_factory=list)
    """The last piece of text of an answer that has not ended."""

    def notice(self, text: str) -> None:
        """Print a notice at once, or keep it for the answers in JSON."""
        if self.as_json:
            self.notices.append(text)
        else:
            note(text)

    @contextmanager
    def prefill(self) -> Iterator[Callable[[int, int], None]]:
        """Yield a function that shows how many of the prompt's tokens the hosts have read, and how
        long the rest takes."""
        with progress(quiet=self.as_json, first="waiting for the answer") as report:

            def prefilled(done: int, total: int) -> None:
                if total <= LONG_PROMPT:
                    return
                if self.pieces:
                    print_json({"event": "prefill", "done": done, "total": total})
                report(f"reading a prompt of {total} tokens", done, total)

            yield prefilled

    def show(self, piece: str) -> None:
        if not self.as_json:
            print_text(piece, end="")
            self._begun[:] = [piece]
        elif self.pieces:
            print_json({"event": "token", "text": piece})

    def stop(self) -> None:
        """End the line of an answer that was stopped or failed, if one has begun."""
        if self._begun and not self._begun.pop().endswith("\n"):
            print_text()

    def end(self, answer: RunAnswer) -> None:
        """Print the end of an answer."""
        if self.as_json:
            print_json(answer.to_json() | {"notices": self.notices})
            return
        self._begun.clear()
        print_text()
        if len(answer.token_ids) <= 1 and not answer.text.strip():
            note("the model ended its answer at once: ask in other words")
        for peer in answer.wrong_hosts:
            note(f"host {peer} gave wrong outputs and was replaced: this answer may be wrong, ask again")
        if len(answer.precisions) > 1:
            named = " and ".join(each or "unknown" for each in answer.precisions)
            note(f"hosts with different number formats computed this answer: {named}")
        note(in_words(answer))


def in_words(answer: RunAnswer) -> str:
    """Return how fast an answer was, and which blocks each of its hosts computed."""
    tokens = counted(len(answer.token_ids), "token")
    guessed = f", {answer.tokens_per_trip:.1f} a trip" if answer.trips < len(answer.token_ids) else ""
    speed = f"{answer.tokens_per_s:.1f} a second{guessed}, the first after {answer.first_token_s:.2f} s"
    hops = " -> ".join(f"{hop.start}:{hop.end}" for hop in answer.route)
    return f"{tokens} in {answer.total_s:.1f} s: {speed}; blocks {hops}"


class Stopped(KeyboardInterrupt):
    """Ctrl-C during an answer. ``answer``: the part generated before it."""

    def __init__(self, answer: RunAnswer) -> None:
        super().__init__()
        self.answer = answer


def generate(
    answerer: Answerer,
    ids: Sequence[int],
    sampling: SamplingOptions,
    screen: Screen,
    *,
    continues: bool = False,
    exact: bool = False,
) -> RunAnswer:
    """Continue one prompt; ``screen`` shows the answer piece by piece, and how far a long prompt
    is.

    ``continues``: the answer continues the text of the prompt; otherwise it is a text of its own.
    ``exact``: the answer has all ``max_new_tokens``, because the model may not end it earlier.
    Raises ``Stopped`` for Ctrl-C.
    """
    room = answerer.context - len(ids)
    if room < 1:
        raise typer.BadParameter(
            f"the prompt has {counted(len(ids), 'token')} and the model takes {answerer.context}: shorten it",
            param_hint="PROMPT",
        )
    # Start from zero: the hosts of a chain otherwise sum them over all its answers.
    report = answerer.report
    report.trips, report.failovers, report.longest_stall_s = 0, 0, 0.0
    report.audits, report.wrong = 0, []
    detokenizer = IncrementalDetokenizer(answerer.tokenizer, ids if continues else ())
    with ExitStack() as waiting:
        prefilled = waiting.enter_context(screen.prefill())
        pieces = Pieces(screen.show, waiting.close)

        def put(token_id: int) -> None:
            pieces.token(token_id)
            pieces.text(detokenizer.push(token_id))

        def answer() -> RunAnswer:
            pieces.text(detokenizer.flush())
            return pieces.answer(len(ids), vars(answerer.report))

        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        try:
            answerer.answer(ids, sampling, put, exact=exact, prefilled=prefilled)
        except KeyboardInterrupt:
            raise Stopped(answer()) from None
    return answer()


class Pieces:
    """An answer as it comes: its tokens, its text, and their times."""

    def __init__(self, show: Callable[[str], None], begin: Callable[[], None]) -> None:
        """``show`` gets each piece of text. ``begin`` is called before the first token."""
        self.started = time.monotonic()
        self.first_token_s = 0.0
        self.token_ids: list[int] = []
        self._show = show
        self._begin = begin
        self._pieces: list[str] = []

    def token(self, token_id: int) -> None:
        if not self.token_ids:
            self.first_token_s = time.monotonic() - self.started
            self._begin()
        self.token_ids.append(token_id)

    def text(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._show(piece)

    def answer(self, prompt_tokens: int, report: Mapping[str, Any]) -> RunAnswer:
        """Return the answer so far. ``report``: the fields of a ``ChainReport``, as far as they are
        known."""
        trips = report.get("trips", 0)
        total_s = time.monotonic() - self.started
        return RunAnswer(
            text="".join(self._pieces),
            token_ids=self.token_ids,
            prompt_tokens=prompt_tokens,
            first_token_s=self.first_token_s,
            total_s=total_s,
            tokens_per_s=len(self.token_ids) / total_s,
            route=[RunHop(*hop) for hop in report.get("route", ())],
            trips=trips,
            tokens_per_trip=len(self.token_ids) / max(1, trips),
            failovers=report.get("failovers", 0),
            longest_stall_s=report.get("longest_stall_s", 0.0),
            audited=report.get("audits", 0),
            wrong_hosts=list(report.get("wrong", ())),
            precisions=list(report.get("precisions", ())),
        )
