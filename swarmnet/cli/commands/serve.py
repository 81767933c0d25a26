"""``swarmnet serve``: an OpenAI-compatible endpoint over a swarm."""

import asyncio
import os
import random
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from swarmnet import units
from swarmnet.cli.interrupts import Interrupts, run_until_stopped
from swarmnet.cli.option_groups import From
from swarmnet.cli.options import (
    AllowHostOption,
    DraftOption,
    DtypeOption,
    HostOption,
    JsonFlag,
    PortOption,
    ServedModelOption,
    SpeculateOption,
    StopOnEofFlag,
    SwarmOption,
    WireOption,
    check_at_least_zero,
    check_draft,
    device_option,
)
from swarmnet.cli.output import note, print_json, progress, say
from swarmnet.cli.peer_options import ClientOptions
from swarmnet.paths import default_state_dir
from swarmnet.resident import KEY_NAME, Resident, announced, model_id, new_key
from swarmnet.swarm_file.keys import API_KEY, read_secret
from swarmnet.systemd import notify_ready, notify_stopping
from swarmnet_protocols.errors import ConfigError, NetworkStopped
from swarmnet_protocols.joining.network import Network
from swarmnet_protocols.machine.lean_imports import import_transformers
from swarmnet_protocols.machine.platform import allow_open_files

if TYPE_CHECKING:
    from swarmnet.gateway.app import Gateway
    from swarmnet.gateway.models import ModelTable
    from swarmnet.gateway.routing.router import Router
    from swarmnet.web.middleware import AccessPolicy, ApiKeys
    from swarmnet.web.server import HttpEndpoint
    from swarmnet_node.supervisor import Supervisor
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.models import LocalModel
    from swarmnet_protocols.net import Transport
    from swarmnet_protocols.session.adapters import Adapter

DRAIN_S = 60.0
"""Seconds that running answers may take to end after the command is stopped."""
MEMORY_SHARE = 4
"""Open models take at most one part in this many of the machine's memory, unless the user says
otherwise. With fewer parts, other programs run short. With more, models close and open often."""
FLOAT32_BYTES = 4
MAX_KEY_FILE_BYTES = 1 << 20
MAX_FILES = 65536
"""Limit on open files, raised from the usual 1024 because each HTTP connection takes one."""


_ORIGIN = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?"
)
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_ADAPTERS = 16
"""Most adapters of one endpoint. A host keeps as many for one client."""
_DEFAULT_PORTS = {"http": "80", "https": "443"}


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """The options of the endpoint: its address, its users and their quotas, and how it computes."""

    host: HostOption = "127.0.0.1"
    port: PortOption = 8000
    api_key_file: Annotated[
        list[Path],
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            help=f"Serve only requests with an API key from this file. A line is KEY or NAME:KEY. Or put one key into ${API_KEY}.",
        ),
    ] = field(default_factory=list)
    cors: Annotated[
        list[str],
        typer.Option(
            "--cors",
            metavar="ORIGIN",
            help="Let this page, app or extension use the endpoint: https://example.org, app://obsidian.md.",
        ),
    ] = field(default_factory=list)
    allow_host: AllowHostOption = field(default_factory=list)
    max_concurrent: Annotated[
        int,
        typer.Option(
            "--max-concurrent",
            metavar="N",
            min=1,
            max=1024,
            help="Compute this many answers of a model at a time.",
        ),
    ] = 32
    requests_per_minute: Annotated[
        int | None,
        typer.Option(
            "--requests-per-minute",
            metavar="N",
            min=1,
            help="Requests per minute for each API key; n choices count as n requests.",
        ),
    ] = None
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(
            "--tokens-per-minute",
            metavar="N",
            min=1,
            help="Tokens per minute for each API key: prompts (once for each choice) and answers.",
        ),
    ] = None
    concurrent: Annotated[
        int | None,
        typer.Option("--concurrent", metavar="N", min=1, help="Answers at a time for each API key."),
    ] = None
    max_memory_bytes: Annotated[
        int | None,
        typer.Option(
            "--max-memory",
            metavar="SIZE",
            help="Memory for the embeddings, heads and adapters of open models, without --model. The least recently used close for others.",
            show_default="a quarter of this machine's",
        ),
        From(str, units.parse_size_bytes),
    ] = None
    device: Annotated[str, device_option("Device of embeddings and head.")] = "auto"
    dtype: DtypeOption = "auto"
    wire: WireOption = "auto"
    speculate: SpeculateOption = True
    draft: DraftOption = ""
    adapter: Annotated[
        list[str],
        typer.Option(
            "--adapter",
            metavar="[MODEL:]NAME=DIR",
            help="Also offer a model with this LoRA adapter, as MODEL:NAME. With --model M: law=tuned/law. "
            "Without: M:law=tuned/law. Repeat it for more adapters.",
        ),
    ] = field(default_factory=list)
    router: Annotated[
        Path | None,
        typer.Option(
            "--router",
            metavar="FILE",
            help="Also offer the model auto: this router, which `swarmnet router fit` made, chooses a model for each question.",
            dir_okay=False,
        ),
    ] = None
    router_cost: Annotated[
        float,
        typer.Option(
            "--router-cost",
            metavar="X",
            help="With more, auto chooses faster models more often. 0: the best model. `router fit` prints what each X buys.",
        ),
    ] = 0.0
    as_json: JsonFlag = False
    stop_on_eof: StopOnEofFlag = False
    demo: Annotated[bool, typer.Option("--demo", hidden=True)] = False
    """True if the page has a button that kills a host: `swarmnet demo` waits for the event."""

    def access(self, own_key: str) -> "AccessPolicy":
        """Return the access rules of the endpoint. ``own_key``: the secret of this user's commands.

        Raises ``ConfigError`` if other machines reach it without a key, or if a key or an origin is
        invalid.
        """
        from swarmnet.gateway.page import PUBLIC_PATHS
        from swarmnet.web.middleware import AccessPolicy, check_exposed

        keys = _keys(self.api_key_file)
        check_exposed(self.host, keys)
        if keys:
            keys = _keys(self.api_key_file, {KEY_NAME: own_key})
        origins = [check_origin(each) for each in self.cors]
        return AccessPolicy(keys, [self.host, *self.allow_host], origins, PUBLIC_PATHS)


def serve(
    *, swarm: SwarmOption, model: ServedModelOption = "", options: EndpointOptions, client: ClientOptions
) -> None:
    """Serve the models that run on the swarm as an OpenAI-compatible endpoint, until Ctrl-C.

    A model is opened at its first request, and closed when idle. `swarmnet models` lists them. All
    callers share one client of the swarm. An endpoint that only this machine reaches needs no key.
    """
    from swarmnet.web.server import listen
    from swarmnet_protocols.models.text.chat_template import prepare_rendering

    check_draft(options.draft, speculate=options.speculate)
    adapter_folders(options.adapter, model)
    own_key = new_key()
    access = options.access(own_key)
    router = _read_router(options, model)
    listen(options.host, options.port).close()  # reports an address in use before the swarm is searched
    network = client.network(swarm)
    prepare_rendering()
    allow_open_files(MAX_FILES)
    port: int | None = options.port
    while port is not None:  # every revision of a job has the first one's port
        with progress(quiet=options.as_json) as report:
            if model:
                source: LocalModel | Folders = client.resolve(model, network, report)
            else:
                report("asking the swarm for its models", 0, None)
                source = Folders(client.cache_dir, client.max_disk_bytes)
        options = replace(options, port=port)
        port = run_until_stopped(_serve(source, network, access, options, own_key, router))


def adapter_folders(given: Sequence[str], model: str = "") -> dict[str, dict[str, Path]]:
    """Return the directories of adapters by model and name. ``model``: the only model, if the
    endpoint has one; adapters are then under ""."""
    folders: dict[str, dict[str, Path]] = {}
    for text in given:
        label, _, folder = text.partition("=")
        changed, _, name = label.rpartition(":")
        if not _ADAPTER_NAME.fullmatch(name) or not folder:
            message = f"{text!r} is not NAME=DIR, as in law=tuned/law; a name has letters, digits, . _ -"
            raise typer.BadParameter(message, param_hint="'--adapter'")
        if bool(changed) == bool(model):
            message = "name the model of an adapter once: with --model M, or as in M:law=tuned/law"
            raise typer.BadParameter(message, param_hint="'--adapter'")
        if name in folders.setdefault(changed, {}):
            raise typer.BadParameter(f"two adapters are called {name}", param_hint="'--adapter'")
        folders[changed][name] = Path(folder)
    if len(given) > MAX_ADAPTERS:
        raise typer.BadParameter(f"{MAX_ADAPTERS} are the most", param_hint="'--adapter'")
    return folders


def _read_adapters(local: "LocalModel", folders: Mapping[str, Path]) -> "dict[str, Adapter]":
    """Read adapters of a model. Raises ``ConfigError`` or ``IntegrityError``."""
    if not folders:
        return {}  # and import no torch
    import_transformers()
    from swarmnet_client.tuning.adapter_dir import read_lora

    return {name: read_lora(local, folder) for name, folder in folders.items()}


def _adapter_bytes(folders: Iterable[Path]) -> int:
    """Return the memory of adapters: float32 values, and the files for hosts, which copy them."""
    from swarmnet_client.tuning.adapter_dir import stored_shapes

    values = sum(prod(shape) for folder in folders for shape in stored_shapes(folder).values())
    return 2 * FLOAT32_BYTES * values


def _read_router(options: EndpointOptions, model: str) -> "Router | None":
    """Read the router of an endpoint, if it has one. Raises ``ConfigError`` for a bad file."""
    from swarmnet.gateway.routing.router import Router

    price = check_at_least_zero(options.router_cost, option="--router-cost")
    if options.router is None:
        if price:
            raise typer.BadParameter("name the router, too: --router FILE", param_hint="'--router-cost'")
        return None
    if model and not options.adapter:
        message = "it chooses between models: leave out --model, or add an --adapter"
        raise typer.BadParameter(message, param_hint="'--router'")
    return Router.read(options.router, price)


def _check_adapters(folders: Mapping[str, Mapping[str, Path]]) -> None:
    """Raise ``ConfigError`` or ``IntegrityError`` if a directory has no adapter. Whether it fits
    its model is known when the model opens."""
    if folders:
        from swarmnet_client.tuning.adapter_dir import check_adapter

        for folder in chain.from_iterable(each.values() for each in folders.values()):
            check_adapter(folder)


def check_origin(text: str) -> str:
    """Return an origin as clients send it. Apps and extensions have schemes of their own."""
    found = _ORIGIN.fullmatch(text)
    if found is None or int(found["port"] or 0) > 65535:
        raise typer.BadParameter(
            f"{text!r} is not an origin: it looks like https://example.org or app://obsidian.md, "
            "with a port if it has one, and no *",
            param_hint="'--cors'",
        )
    scheme, host, port = found["scheme"].lower(), found["host"], found["port"]
    # browsers write only these in lower case and without the usual port
    if scheme in _DEFAULT_PORTS:
        host = host.lower()
        port = None if port == _DEFAULT_PORTS[scheme] else port
    return f"{scheme}://{host}" + (f":{port}" if port else "")


def _keys(files: Sequence[Path], others: Mapping[str, str] = MappingProxyType({})) -> "ApiKeys":
    """Return the API keys of the environment and of ``files``, and ``others``. A key without a name
    is named after its file and line."""
    from swarmnet.web.middleware import ApiKeys

    keys = dict(others) | ({API_KEY: key} if (key := os.environ.get(API_KEY)) else {})
    for path in files:
        lines = read_secret(path, MAX_KEY_FILE_BYTES).splitlines()
        named = [
            _named(line, f"{path.name}:{number}") for number, line in enumerate(lines, 1) if _is_key(line)
        ]
        if not named:
            raise ConfigError(f"there is no key in {path}", hint="write one on each line: KEY or NAME:KEY")
        for name, key in named:
            if keys.setdefault(name, key) != key:
                raise ConfigError(
                    f"{path} has another key called {name}", hint="give every key a name of its own"
                )
    return ApiKeys(keys)


def _is_key(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _named(line: str, place: str) -> tuple[str, str]:
    """Return the name and key of a line ``NAME:KEY``; for a line ``KEY`` the name is ``place``."""
    name, colon, key = line.strip().partition(":")
    return (name, key) if colon else (place, name)


@dataclass(frozen=True)
class Folders:
    """The folder of a swarm's models, and its limit: arguments of ``resolve``."""

    cache_dir: Path
    max_disk_bytes: int | None = None


@asynccontextmanager
async def _models(
    source: "LocalModel | Folders",
    connection: "tuple[Transport, Directory]",
    network: Network,
    options: EndpointOptions,
) -> "AsyncIterator[ModelTable]":
    """Yield the table of one model, or of all that hosts announce; see ``gateway/models.py``."""
    import psutil

    from swarmnet.gateway.models import ModelTable
    from swarmnet_client.batching.continuous_batching import BatchedModel, BatchLimits
    from swarmnet_client.hosts.model_hosts import ModelHosts
    from swarmnet_client.hosts.model_offers import ModelOffer, SwarmOffers
    from swarmnet_client.model.load_options import LoadOptions, memory_notice
    from swarmnet_protocols.joining.without_hub import resolve_announced

    load = LoadOptions.picked(
        options.dtype, options.device, only_generates=True, wire=options.wire, draft=options.draft
    )
    limits = BatchLimits(active=options.max_concurrent, waiting=options.max_concurrent)

    only = "" if isinstance(source, Folders) else source.name
    folders = adapter_folders(options.adapter, only)

    @asynccontextmanager
    async def opened(
        local: "LocalModel", offered: str
    ) -> "AsyncIterator[tuple[BatchedModel, dict[str, Adapter]]]":
        network.rules.check_model(local.name, local.manifest.hash)
        adapters = await asyncio.to_thread(_read_adapters, local, folders.get(offered, {}))
        if text := memory_notice(local, load):
            say({"event": "notice", "text": text}, text, as_json=options.as_json)
        async with (
            ModelHosts.over(connection, local, network) as hosts,
            BatchedModel.open(local, hosts, load, limits, speculate=options.speculate) as batched,
        ):
            yield batched, adapters

    @asynccontextmanager
    async def announced_model(
        offer: ModelOffer, reserve: Callable[[int], Awaitable[None]]
    ) -> "AsyncIterator[tuple[BatchedModel, dict[str, Adapter]]]":
        local = await resolve_announced(offer.name, offer.manifest, connection, network, **vars(source))
        weights = local.sizes("local_layers").in_memory(load.dtype.itemsize)
        await reserve(weights + _adapter_bytes(folders.get(offer.name, {}).values()))
        async with opened(local, offer.name) as found:
            yield found

    if isinstance(source, Folders):
        await asyncio.to_thread(_check_adapters, folders)
        offers = SwarmOffers(connection[1], network.rules, random.SystemRandom(), network.trust.hosts)
        most = options.max_memory_bytes or psutil.virtual_memory().total // MEMORY_SHARE
        async with ModelTable.of_swarm(offers.read, announced_model, most, folders) as models:
            yield models
        return
    async with opened(source, "") as (batched, adapters), ModelTable.of(batched, adapters) as models:
        yield models


@asynccontextmanager
async def _endpoint(
    source: "LocalModel | Folders",
    network: Network,
    access: "AccessPolicy",
    options: EndpointOptions,
    own_key: str,
    router: "Router | None" = None,
) -> "AsyncIterator[tuple[Gateway, HttpEndpoint, tuple[Transport, Directory]]]":
    """Serve the endpoint while the context is open, so that this user's `swarmnet run` finds it."""
    from swarmnet.gateway.accounts import Quota
    from swarmnet.gateway.app import Gateway, refusal
    from swarmnet.gateway.batches.endpoints import FILES, MAX_UPLOAD_BYTES
    from swarmnet.gateway.page import add_kill
    from swarmnet.web.middleware import protect
    from swarmnet.web.server import serve_http
    from swarmnet_protocols.joining.network import connect

    quota = Quota(options.requests_per_minute, options.tokens_per_minute, options.concurrent)
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(connect(network, client_mode=True))
        models = await stack.enter_async_context(_models(source, connection, network, options))
        batches = default_state_dir() / "batches"
        if isinstance(source, Folders):  # swarms have other models under the same names
            batches /= network.rules.swarm.hex()
        gateway = Gateway(models, quota, own_key=own_key, batches_dir=batches, router=router)
        await stack.enter_async_context(gateway.running())
        bare = gateway.app()
        if options.demo:
            add_kill(bare, lambda peer: print_json({"event": "kill", "peer_id": peer}))
        most, long_bodies = gateway.parser.max_bytes, {FILES: MAX_UPLOAD_BYTES}
        app = protect(bare, access, max_body_bytes=most, long_bodies=long_bodies, refusal=refusal)
        endpoint = await stack.enter_async_context(serve_http(app, options.host, options.port))
        name = "" if isinstance(source, Folders) else model_id(source.name)
        resident = Resident(endpoint.url, own_key, network.rules.swarm.hex(), name)
        stack.enter_context(announced(resident))
        yield gateway, endpoint, connection


async def _serve(
    source: "LocalModel | Folders",
    network: Network,
    access: "AccessPolicy",
    options: EndpointOptions,
    own_key: str,
    router: "Router | None" = None,
) -> int | None:
    """Serve until the user stops the command, or peers host a newer revision of a job.

    Return the port at which the newer revision is to be served next, else None.
    """
    from swarmnet_protocols.directory.revisions import newer_revision
    from swarmnet_protocols.machine.aio import race

    interrupts = Interrupts.catch()
    if options.stop_on_eof:
        interrupts.catch_end_of(sys.stdin)
    stop = asyncio.Event()
    name = "" if isinstance(source, Folders) else source.name
    async with _endpoint(source, network, access, options, own_key, router) as (
        gateway,
        endpoint,
        connection,
    ):
        interrupts.first = stop.set
        _announce(
            endpoint.url,
            gateway.models.usual_name,
            len(gateway.models.entries),
            access,
            as_json=options.as_json,
        )
        newer = asyncio.create_task(newer_revision(connection[1], name), name="newer revision")
        ends: list[Awaitable[object]] = [stop.wait(), connection[0].died(), endpoint.failed(), newer]
        await race(*ends)
        is_outdated = not newer.cancelled() and not stop.is_set()
        notify_stopping()
        if not stop.is_set() and not is_outdated:
            raise NetworkStopped
        draining = "stopping: running answers are finished; Ctrl-C again stops at once"
        if is_outdated:
            draining = f"a newer revision than {name} is served: running answers are finished"
        say({"event": "draining"}, draining, as_json=options.as_json)
        try:
            async with asyncio.timeout(DRAIN_S):
                await gateway.drain()
        except TimeoutError:
            cut_off = f"answers still ran after {DRAIN_S:g} s; they are cut off"
            say({"event": "cut_off"}, cut_off, as_json=options.as_json)
    if stop.is_set() or not is_outdated:
        say({"event": "stopped"}, "stopped", as_json=options.as_json)
        return None
    return urlsplit(endpoint.url).port


def node_endpoint(
    address: tuple[str, int], model: str, client: Callable[[Sequence[str]], Network], **where: Any
) -> "Callable[[Supervisor], AbstractAsyncContextManager[str]]":
    """Return a function that serves an endpoint in a node's process, and yields its URL.

    ``client`` makes the connection of a client on this machine, given the node's addresses.
    ``where``: the folders and limits of ``resolve``. Raises ``ConfigError`` if ``address`` cannot
    serve it.
    """
    from swarmnet.web.server import listen
    from swarmnet_protocols.joining.without_hub import resolve_in_swarm
    from swarmnet_protocols.models.text.chat_template import prepare_rendering

    own_key = new_key()
    options = EndpointOptions(host=address[0], port=address[1])
    access = options.access(own_key)
    listen(*address, option="--serve").close()

    @asynccontextmanager
    async def serve_from(node: "Supervisor") -> AsyncIterator[str]:
        network = client(list(node.status().addresses))
        local = await asyncio.to_thread(resolve_in_swarm, model, lambda: network, **where)
        prepare_rendering()
        async with _endpoint(local, network, access, options, own_key) as (_, endpoint, _):
            yield f"{endpoint.url}/v1"

    return serve_from


def _announce(url: str, model: str, count: int, access: "AccessPolicy", *, as_json: bool) -> None:
    notify_ready(f"{model or 'the models of a swarm'} at {url}")
    if as_json:
        print_json({"event": "ready", "url": url, "model": model or None})
        return
    model = model or f"all models of the swarm, now {count},"
    asks = "" if access.keys else ", for this machine only; no key is asked for"
    note(f"serving {model} at {url}/v1{asks}")
    note(f"  chat at {url}")
    note(f"  OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={'YOUR KEY' if access.keys else 'none'}")
    note("stop with Ctrl-C")
