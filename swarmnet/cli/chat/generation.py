"""One answer of a model, shown as it comes and measured."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from swarmnet.cli.output import note, print_json, print_text
from swarmnet.units import counted

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: greedily when ``temperature`` is 0. ``top_p`` None is what the model itself says."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    top_p: float | None = None


@dataclass(frozen=True)
class Hop:
    peer_id: str
    start: int
    end: int


@dataclass(frozen=True)
class Answer:
    """What ``run --json`` prints. ``token_ids`` are the new tokens.

    ``audited``: times that outputs of a host were computed again by another one; ``wrong_hosts``: who was found to give wrong ones.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    first_token_s: float
    total_s: float
    tokens_per_s: float
    route: list[Hop]
    failovers: int
    longest_stall_s: float
    audited: int = 0
    wrong_hosts: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Screen:
    """How answers are printed: as text, or as one JSON object each; with ``pieces`` also one for each piece as it comes."""

    as_json: bool = False
    pieces: bool = False

    def show(self, piece: str) -> None:
        if not self.as_json:
            print_text(piece, end="")
        elif self.pieces:
            print_json({"event": "token", "text": piece})

    def end(self, answer: Answer) -> None:
        """Print what is left to be said of an answer."""
        if self.as_json:
            print_json(answer.to_json())
            return
        print_text()
        for peer in answer.wrong_hosts:
            note(f"host {peer} gave wrong outputs and was replaced: this answer may be wrong, ask again")
        hops = " -> ".join(f"{hop.start}:{hop.end}" for hop in answer.route)
        speed = f"{answer.tokens_per_s:.1f}/s, first after {answer.first_token_s:.2f} s"
        note(f"{counted(len(answer.token_ids), 'token')}, {speed}, {hops}")


class Stopped(KeyboardInterrupt):
    """Ctrl-C while a model answered. ``answer`` is what had come."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


def generate(
    model: Any, input_ids: "torch.Tensor", sampling: Sampling, show: Callable[[str], None]
) -> Answer:
    """Continue one prompt, ``input_ids`` [1, tokens], with a swarm model; ``show`` gets the answer piece by piece.

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
    streamer = _Streamer(tokenizer, show)
    # Said, because transformers takes tokens of a prompt that are also the padding token for padding.
    choice: dict[str, Any] = {"attention_mask": input_ids.new_ones(input_ids.shape), "do_sample": False}
    if sampling.temperature > 0:
        choice |= {"do_sample": True, "temperature": sampling.temperature}
        if sampling.top_p is not None:
            choice["top_p"] = sampling.top_p
    # In a session it goes on counting from answer to answer.
    model.last_run.failovers, model.last_run.longest_stall_s = 0, 0.0
    model.last_run.audits, model.last_run.wrong = 0, []
    try:
        model.generate(
            input_ids, max_new_tokens=min(sampling.max_new_tokens, room), streamer=streamer, **choice
        )
    except KeyboardInterrupt:
        streamer.end()
        raise Stopped(streamer.answer(prompt_tokens, model.last_run)) from None
    return streamer.answer(prompt_tokens, model.last_run)


class _Streamer:
    """A transformers streamer: ``put`` gets the prompt first and then every new token."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None]) -> None:
        self.started = time.monotonic()
        self.first_token_s = 0.0
        self.token_ids: list[int] = []
        self._tokenizer = tokenizer
        self._show = show
        self._prompt_seen = False
        self._line_start = 0  # of the tokens on the line that is being shown
        self._shown = 0  # characters of that line

    def put(self, tokens: Any) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        if not self.token_ids:
            self.first_token_s = time.monotonic() - self.started
        self.token_ids.extend(tokens.flatten().tolist())
        line = self._line()
        # A replacement character at the end is a letter of which only the first bytes have come.
        if not line.endswith("\N{REPLACEMENT CHARACTER}"):
            self._show_rest(line)
        if line.endswith("\n"):
            self._line_start, self._shown = len(self.token_ids), 0

    def end(self) -> None:
        self._show_rest(self._line())

    def answer(self, prompt_tokens: int, run: Any) -> Answer:
        """What has come so far, from the hosts that ``run`` tells of."""
        total_s = time.monotonic() - self.started
        return Answer(
            text=self._tokenizer.decode(self.token_ids, skip_special_tokens=True),
            token_ids=self.token_ids,
            prompt_tokens=prompt_tokens,
            first_token_s=self.first_token_s,
            total_s=total_s,
            tokens_per_s=len(self.token_ids) / total_s,
            route=[Hop(*hop) for hop in run.route],
            failovers=run.failovers,
            longest_stall_s=run.longest_stall_s,
            audited=run.audits,
            wrong_hosts=list(run.wrong),
        )

    def _line(self) -> str:
        text: str = self._tokenizer.decode(self.token_ids[self._line_start :], skip_special_tokens=True)
        return text

    def _show_rest(self, line: str) -> None:
        rest, self._shown = line[self._shown :], len(line)
        if rest:
            self._show(rest)
