"""One answer of a model: streamed to the terminal and measured."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnet.cli.options import SpeculateOption
from swarmnet.cli.output import note, print_json, print_text
from swarmnet.gateway.detokenizer import IncrementalDetokenizer
from swarmnet.units import counted

if TYPE_CHECKING:
    import torch


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
        float,
        typer.Option(
            "--temperature",
            metavar="T",
            help="0 always takes the most likely token. Higher values make answers more varied.",
        ),
    ] = 0.0
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
    speculate: SpeculateOption = True


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

    def notice(self, text: str) -> None:
        """Print a notice at once, or keep it for the answers in JSON."""
        if self.as_json:
            self.notices.append(text)
        else:
            note(text)

    def show(self, piece: str) -> None:
        if not self.as_json:
            print_text(piece, end="")
        elif self.pieces:
            print_json({"event": "token", "text": piece})

    def end(self, answer: RunAnswer) -> None:
        """Print the end of an answer."""
        if self.as_json:
            print_json(answer.to_json() | {"notices": self.notices})
            return
        print_text()
        for peer in answer.wrong_hosts:
            note(f"host {peer} gave wrong outputs and was replaced: this answer may be wrong, ask again")
        if len(answer.precisions) > 1:
            named = " and ".join(each or "unknown" for each in answer.precisions)
            note(f"hosts with different number formats computed this answer: {named}")
        hops = " -> ".join(f"{hop.start}:{hop.end}" for hop in answer.route)
        trips = f", {answer.tokens_per_trip:.1f} a trip" if answer.trips < len(answer.token_ids) else ""
        speed = f"{answer.tokens_per_s:.1f}/s, first after {answer.first_token_s:.2f} s"
        note(f"{counted(len(answer.token_ids), 'token')}{trips}, {speed}, {hops}")


class Stopped(KeyboardInterrupt):
    """Ctrl-C during an answer. ``answer``: the part generated before it."""

    def __init__(self, answer: RunAnswer) -> None:
        super().__init__()
        self.answer = answer


def generate(
    model: Any,
    input_ids: "torch.Tensor",
    sampling: SamplingOptions,
    show: Callable[[str], None],
    *,
    continues: bool = False,
    exact: bool = False,
) -> RunAnswer:
    """Continue one prompt, ``input_ids`` [1, tokens], with a swarm model; ``show`` gets the answer
    piece by piece.

    ``continues``: the answer continues the text of the prompt; otherwise it is a text of its own.
    ``exact``: the answer has all ``max_new_tokens``, because the model may not end it earlier.
    Raises ``Stopped`` for Ctrl-C.
    """
    tokenizer: Any = model.tokenizer
    prompt_tokens = input_ids.shape[1]
    room = model.config.max_position_embeddings - prompt_tokens
    if room < 1:
        raise typer.BadParameter(
            f"the prompt has {counted(prompt_tokens, 'token')} and the model takes {model.config.max_position_embeddings}: shorten it",
            param_hint="PROMPT",
        )
    if sampling.seed is not None:
        import torch

        torch.manual_seed(sampling.seed)
    streamer = _Streamer(tokenizer, show, input_ids[0].tolist() if continues else [])
    # Without a mask, transformers takes prompt tokens that equal the padding token for padding.
    choice: dict[str, Any] = {"attention_mask": input_ids.new_ones(input_ids.shape), "do_sample": False}
    if sampling.temperature > 0:
        choice |= {"do_sample": True, "temperature": sampling.temperature}
        if sampling.top_p is not None:
            choice["top_p"] = sampling.top_p
    if exact:
        choice["min_new_tokens"] = sampling.max_new_tokens
    # Start from zero: a session otherwise sums them over all its answers.
    model.last_run.trips = 0
    model.last_run.failovers, model.last_run.longest_stall_s = 0, 0.0
    model.last_run.audits, model.last_run.wrong = 0, []
    try:
        model.generate(
            input_ids,
            max_new_tokens=min(sampling.max_new_tokens, room),
            streamer=streamer,
            speculate=sampling.speculate,
            **choice,
        )
    except KeyboardInterrupt:
        streamer.end()
        raise Stopped(streamer.answer(prompt_tokens, model.last_run)) from None
    return streamer.answer(prompt_tokens, model.last_run)


class _Streamer:
    """A streamer of transformers: ``put`` is called with the prompt, and then with each new
    token."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None], prompt: list[int]) -> None:
        self.started = time.monotonic()
        self.first_token_s = 0.0
        self.token_ids: list[int] = []
        self._show = show
        self._pieces: list[str] = []
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        self._prompt_seen = False

    def put(self, tokens: Any) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        if not self.token_ids:
            self.first_token_s = time.monotonic() - self.started
        for token_id in tokens.flatten().tolist():
            self.token_ids.append(token_id)
            self._take(self._detokenizer.push(token_id))

    def end(self) -> None:
        self._take(self._detokenizer.flush())

    def _take(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._show(text)

    def answer(self, prompt_tokens: int, run: Any) -> RunAnswer:
        """Return the answer so far, and the hosts that computed it."""
        total_s = time.monotonic() - self.started
        return RunAnswer(
            text="".join(self._pieces),
            token_ids=self.token_ids,
            prompt_tokens=prompt_tokens,
            first_token_s=self.first_token_s,
            total_s=total_s,
            tokens_per_s=len(self.token_ids) / total_s,
            route=[RunHop(*hop) for hop in run.route],
            trips=run.trips,
            tokens_per_trip=len(self.token_ids) / max(1, run.trips),
            failovers=run.failovers,
            longest_stall_s=run.longest_stall_s,
            audited=run.audits,
            wrong_hosts=list(run.wrong),
            precisions=list(run.precisions),
        )
