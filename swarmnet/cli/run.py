"""``swarmnet run``: one prompt, or a chat."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnet.addresses import check_peer_address
from swarmnet.cli.generation import Answer, Sampling, generate
from swarmnet.cli.options import (
    BootstrapOption,
    CacheDirOption,
    DataDirOption,
    DtypeOption,
    JsonFlag,
    SwarmOption,
    check_at_least_zero,
    check_dtype,
)
from swarmnet.cli.output import note, print_json, progress
from swarmnet.entering import client_network
from swarmnet.paths import default_cache_dir
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.network import Network

if TYPE_CHECKING:
    import torch

    from swarmnet_client.model import SwarmModel

MAX_PROMPT_CHARS = 4 << 20


@dataclass(frozen=True)
class _Format:
    """How answers are printed."""

    as_json: bool
    pieces: bool  # with as_json: also every piece of text as it comes


def run(  # noqa: PLR0913 - a command line, not an interface
    model: Annotated[str, typer.Argument(metavar="M", help="The model, as for join.", show_default=False)],
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="Without it: a chat, or all of stdin.", show_default=False),
    ] = None,
    *,
    swarm: SwarmOption,
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", "-n", metavar="N", min=1, help="The most tokens to answer with."),
    ] = 256,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", help="0: the most likely token; above: sample.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="S", min=0, help="Makes sampling repeatable.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")
    ] = False,
    adapter: Annotated[
        Path | None,
        typer.Option("--adapter", metavar="DIR", help="What `tune`, or PEFT's LoRA or prompts, made."),
    ] = None,
    dtype: DtypeOption = "auto",
    data_dir: DataDirOption = None,
    cache_dir: CacheDirOption = None,
    as_json: JsonFlag = False,
    stream: Annotated[bool, typer.Option("--stream", hidden=True)] = False,
) -> None:
    """Answer a prompt, or chat, with a model that runs on the swarm."""
    check_at_least_zero(temperature, option="--temperature")
    check_dtype(dtype)
    for address in bootstrap:
        check_peer_address(address)
    questions = _questions(prompt)
    sampling = Sampling(max_new_tokens, temperature, seed)
    style = _Format(as_json, stream)
    if adapter is not None:
        _check_adapter(adapter, model, cache_dir)
    network = client_network(swarm, bootstrap, data_dir)
    with (
        _open(model, network, dtype, cache_dir, quiet=as_json) as opened,
        opened.session(),
        _adapted(opened, adapter) as answering,
    ):
        messages: list[dict[str, str]] = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            input_ids = _encode(opened.tokenizer, messages, raw=raw)
            answer = _answer(answering, input_ids, sampling, style)
            messages.append({"role": "assistant", "content": answer.text})


def _check_adapter(adapter: Path, model: str, cache_dir: Path | None) -> None:
    """What can be said of an adapter before anybody is asked anything."""
    from swarmnet_client.tuning.adapter_dir import check_adapter, check_made_for
    from swarmnet_protocols.models import resolve

    config = check_adapter(adapter)
    if config.get("task_type") not in {None, "CAUSAL_LM"}:
        raise ConfigError(
            f"the adapter in {adapter} is for {config['task_type']}, and does not write text",
            hint="use it from Python: AutoSwarmModelForSequenceClassification",
        )
    local = resolve(model, cache_dir=cache_dir or default_cache_dir())
    check_made_for(adapter, local.manifest.hash)


@contextmanager
def _adapted(model: "SwarmModel", adapter: Path | None) -> Iterator["SwarmModel"]:
    """``model``, with the adapter in ``adapter`` if there is one."""
    if adapter is None:
        yield model
        return
    from swarmnet_client.tuning.adapter_dir import load_adapter
    from swarmnet_client.tuning.methods import quiet_peft

    with quiet_peft():
        yield load_adapter(model, adapter)


@contextmanager
def _open(
    name: str, network: Network, dtype: str, cache_dir: Path | None, *, quiet: bool
) -> Iterator["SwarmModel"]:
    with progress(quiet=quiet) as report:
        report("finding the swarm", 0, None)
        from swarmnet_client.model import Form, load

        model = load(name, network=network, cache_dir=cache_dir or default_cache_dir(), form=Form(dtype))
    with model:
        yield model


def _questions(prompt: str | None) -> Iterator[str]:
    """The prompt; without one all of stdin, or, when that is a terminal, what the person types."""
    if prompt is None and sys.stdin.isatty():
        return _typed()
    text = sys.stdin.read(MAX_PROMPT_CHARS + 1) if prompt is None else prompt
    if not text.strip():
        raise typer.BadParameter("the prompt is empty: give some text", param_hint="PROMPT")
    if len(text) > MAX_PROMPT_CHARS:
        raise typer.BadParameter(
            f"the prompt is longer than {MAX_PROMPT_CHARS} characters", param_hint="PROMPT"
        )
    return iter([text])


def _typed() -> Iterator[str]:
    note("a chat: an empty line or Ctrl-D ends it")
    while True:
        sys.stderr.write("> ")
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line.strip():
            return
        yield line.strip()


def _encode(tokenizer: Any, messages: list[dict[str, str]], *, raw: bool) -> "torch.Tensor":
    if raw or not tokenizer.chat_template:
        encoded = tokenizer(messages[-1]["content"], return_tensors="pt")
    else:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        encoded = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    input_ids: torch.Tensor = encoded["input_ids"]
    return input_ids


def _answer(model: "SwarmModel", input_ids: "torch.Tensor", sampling: Sampling, style: _Format) -> Answer:
    show: Callable[[str], None]
    if not style.as_json:
        show = _show_text
    elif style.pieces:
        show = _show_event
    else:
        show = _show_nothing
    answer = generate(model, input_ids, sampling, show)
    if style.as_json:
        print_json(answer.to_json())
    else:
        typer.echo()
        hops = " -> ".join(f"{hop.start}:{hop.end}" for hop in answer.route)
        note(
            f"{len(answer.token_ids)} tokens, {answer.tokens_per_s:.1f}/s, first after {answer.first_token_s:.2f} s, {hops}"
        )
    return answer


def _show_text(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _show_event(piece: str) -> None:
    print_json({"event": "token", "text": piece})


def _show_nothing(_piece: str) -> None:
    pass
