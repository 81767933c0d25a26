"""``swarmnet run``: answers one prompt, or chats."""

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnet.cli.chat.answering import BatchAnswerer, ModelAnswerer
from swarmnet.cli.chat.conversation import Conversation, Turn
from swarmnet.cli.chat.generation import Answerer, SamplingOptions, Screen, generate
from swarmnet.cli.chat.keyboard import MAX_MESSAGE_CHARS, not_text
from swarmnet.cli.chat.loop import Chat
from swarmnet.cli.chat.markdown import MarkdownScreen
from swarmnet.cli.chat.through_endpoint import EndpointAnswerer, ask
from swarmnet.cli.options import (
    DraftOption,
    DtypeOption,
    JsonFlag,
    ModelArgument,
    SwarmOption,
    WireOption,
    check_draft,
)
from swarmnet.cli.output import progress
from swarmnet.cli.peer_options import ClientOptions
from swarmnet.paths import default_history
from swarmnet.resident import Resident, find, model_id
from swarmnet_protocols.machine.lean_imports import import_transformers

if TYPE_CHECKING:
    from swarmnet_protocols.joining.network import Network


def run(  # noqa: PLR0913 - a command line, not an interface
    model: ModelArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROMPT]",
            help="The prompt. Without it, run starts a chat, or reads stdin.",
            show_default=False,
        ),
    ] = None,
    *,
    swarm: SwarmOption,
    sampling: SamplingOptions,
    system: Annotated[
        str,
        typer.Option(
            "--system",
            metavar="TEXT",
            help="Instructions for the model (the system message).",
            show_default=False,
        ),
    ] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Send the prompt without the model's chat template.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Chat even if stdin is not a terminal: each line is one message.")
    ] = False,
    history: Annotated[
        bool,
        typer.Option(
            "--history/--no-history",
            help="Remember what you type in a chat, for the arrow keys in the next chat.",
        ),
    ] = True,
    adapter: Annotated[
        Path | None,
        typer.Option(
            "--adapter",
            metavar="DIR",
            help="Answer with this adapter, made by `swarmnet tune` or by PEFT (LoRA, prompts).",
        ),
    ] = None,
    draft: DraftOption = "",
    standby: Annotated[
        bool | None,
        typer.Option(
            "--standby/--no-standby",
            help="Keep a standby for each host of the chain, which takes over at once if the host fails. "
            "Default: for long texts, on idle hosts.",
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            "--wait",
            metavar="SECONDS",
            min=0,
            help="Seconds to wait while all hosts are overloaded.",
        ),
    ] = 0.0,
    dtype: DtypeOption = "auto",
    wire: WireOption = "auto",
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="Join the swarm for this answer, even if an endpoint of `serve` or `join --serve` runs on this machine.",
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Write where each token's time went on every host; open the file in ui.perfetto.dev.",
            dir_okay=False,
        ),
    ] = None,
    client: ClientOptions,
    as_json: JsonFlag = False,
    stream: Annotated[bool, typer.Option("--stream", hidden=True)] = False,
) -> None:
    """Answer a prompt, or chat, with a model that runs on the swarm.

    A model may be a training job: its name, its id or its job file. The newest revision that hosts
    serve then answers (`swarmnet join SWARM --job JOB`).

    Without PROMPT, run reads stdin, or starts a chat if stdin is a terminal (type /help there).

    \b
    Examples:
      swarmnet run smollm2-135m-instruct "What is the capital of France?" --swarm lab/swarm.toml
      swarmnet run smollm2-135m-instruct --swarm lab/swarm.toml --temperature 0.7
      swarmnet run smollm2-135m-instruct --swarm lab < question.txt
    """
    sampling.check()
    check_draft(draft, speculate=sampling.speculate)
    is_chat = chat or (prompt is None and sys.stdin.isatty())
    if is_chat and prompt is not None:
        raise typer.BadParameter("a chat has no PROMPT: type it when asked", param_hint="'--chat'")
    if is_chat and trace is not None:
        raise typer.BadParameter("only a single answer can be traced: give a PROMPT", param_hint="'--trace'")
    question = "" if is_chat else _question(prompt)
    if not is_chat and sampling.temperature is None:
        sampling = replace(sampling, temperature=0.0)
    screen = Screen(as_json, stream)
    if adapter is not None:
        _check_adapter(adapter, model, client.cache_dir)
    network = client.network(swarm)
    if not raw:
        from swarmnet_protocols.models.text.chat_template import prepare_rendering

        prepare_rendering()
    is_usual = adapter is None and trace is None and not (draft or client.hosts or wait)
    resident = None
    if not alone and is_usual and (dtype, wire, standby) == ("auto", "auto", None):
        resident = find(network.rules.swarm.hex(), model_id(model))
    opening: AbstractContextManager[Answerer]
    how: dict[str, Any] = {"dtype": dtype, "wire": wire, "standby": standby, "draft": draft, "wait_s": wait}
    with ExitStack() as stack:
        stack.callback(screen.stop)  # what follows a stopped answer begins on a line of its own
        if resident is not None and not is_chat:
            if (answer := ask(resident, _prompt(question, system, raw), sampling, screen)) is not None:
                screen.end(answer)
                return
            resident = None
        if trace is not None:
            from swarmnet_client.chain.trace import tracing

            how["trace"] = stack.enter_context(tracing(trace)).keep
        if adapter is not None:
            opening = _open_model(model, network, client, screen, adapter, **how)
        elif resident is not None:
            opening = _open_endpoint(resident, model, network, client, screen)
        else:
            opening = open_answerer(model, network, client, screen, **how)
        answerer = stack.enter_context(opening)
        sampling.check_tokens(answerer.vocabulary_size)
        said = Conversation(answerer.tokenizer, answerer.context, raw, system)
        if is_chat:
            if not as_json and sys.stdin.isatty() and sys.stdout.isatty():
                screen = MarkdownScreen()
            Chat(answerer, said, sampling, screen).run(default_history() if history else None)
        else:
            said.turns.append(Turn(question))
            screen.end(generate(answerer, said.encode(), sampling, screen, continues=said.is_plain))


def _prompt(question: str, system: str, raw: bool) -> dict[str, Any]:
    """Return a question as an endpoint of this machine takes it."""
    if raw:
        return {"text": system + question}
    told = [{"role": "system", "content": system}] if system else []
    return {"messages": [*told, {"role": "user", "content": question}]}


def _check_adapter(adapter: Path, model: str, cache_dir: Path) -> None:
    """Raise ``ConfigError`` if the adapter does not fit the model, before the swarm is searched."""
    import_transformers()
    from swarmnet_client.tuning.adapter_dir import check_made_for, check_writes_text
    from swarmnet_protocols.models import resolve

    check_writes_text(adapter)
    check_made_for(adapter, resolve(model, cache_dir=cache_dir).manifest.hash)


@contextmanager
def open_answerer(
    name: str, network: "Network", client: ClientOptions, screen: Screen, **options: Any
) -> Iterator[Answerer]:
    """Open a model on the swarm, and show progress on stderr until it is open. ``options``: as for
    ``LoadOptions.picked``."""
    with progress(quiet=screen.as_json) as report:
        report("finding the swarm", 0, None)
        from swarmnet_client.batching.continuous_batching import BatchedModel, BatchLimits
        from swarmnet_client.hosts.model_hosts import ModelHosts
        from swarmnet_client.hosts.runtime import Runtime
        from swarmnet_client.model.load_options import LoadOptions, memory_notice

        load = LoadOptions.picked(only_generates=True, **options)
        local = client.resolve(name, network, report)
        if text := memory_notice(local, load):
            screen.notice(text)

        @asynccontextmanager
        async def connect() -> AsyncIterator[BatchedModel]:
            async with (
                ModelHosts.connect(local, network) as hosts,
                BatchedModel.open(local, hosts, load, BatchLimits(active=1), idle_s=None) as served,
            ):
                yield served

        runtime = Runtime(connect)
    with runtime:
        yield BatchAnswerer(runtime)


def _open_endpoint(
    resident: Resident, name: str, network: "Network", client: ClientOptions, screen: Screen
) -> AbstractContextManager[Answerer]:
    """Return a model that ``resident`` runs. Its tokenizer is loaded here."""
    with progress(quiet=screen.as_json) as report:
        report("reading the tokenizer", 0, None)
        local = client.resolve(name, network, report)
        return nullcontext(EndpointAnswerer(resident, local.vocabulary(), local.max_positions))


@contextmanager
def _open_model(
    name: str,
    network: "Network",
    client: ClientOptions,
    screen: Screen,
    adapter: Path,
    **options: Any,
) -> Iterator[Answerer]:
    with progress(quiet=screen.as_json) as report:
        report("finding the swarm", 0, None)
        import_transformers()
        from swarmnet_client.model.load_options import LoadOptions
        from swarmnet_client.model.model import load

        model = load(
            name,
            network=network,
            cache_dir=client.cache_dir,
            options=LoadOptions.picked(**options),
            max_disk_bytes=client.max_disk_bytes,
            notice=screen.notice,
        )
        from swarmnet_client.tuning.adapter_dir import load_adapter
        from swarmnet_protocols.models.peft_adapters import quiet_peft

    with model, quiet_peft():
        yield ModelAnswerer(load_adapter(model, adapter))


def _question(prompt: str | None) -> str:
    """Return the prompt, or else all of stdin without a byte order mark."""
    try:
        text = sys.stdin.read(MAX_MESSAGE_CHARS + 2).removeprefix("\ufeff") if prompt is None else prompt
        text.encode()
    except UnicodeDecodeError as error:
        raise not_text(error) from error
    except UnicodeEncodeError as error:  # bytes of the command line that are no text
        raise typer.BadParameter("the prompt is not UTF-8", param_hint="PROMPT") from error
    if not text.strip():
        raise typer.BadParameter("the prompt is empty: give some text", param_hint="PROMPT")
    if len(text) > MAX_MESSAGE_CHARS:
        raise typer.BadParameter(
            f"the prompt is longer than {MAX_MESSAGE_CHARS} characters", param_hint="PROMPT"
        )
    return text
