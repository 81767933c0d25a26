"""``swarmnet serve``: an OpenAI-compatible endpoint over a swarm.

1. ``serve`` checks the options, finds the swarm, and resolves the model if the user named one.
2. :class:`ModelEndpoint` connects, opens the models, and listens.
3. The endpoint stops when the user stops the command. When hosts offer a newer revision of a job,
   ``serve`` begins again at the same port.
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from swarmnet.cli.endpoint.endpoint_options import EndpointOptions, adapter_folders, read_router
from swarmnet.cli.interrupts import Interrupts, run_until_stopped
from swarmnet.cli.options import ServedModelOption, SwarmOption, check_draft
from swarmnet.cli.output import note, print_json, progress, say
from swarmnet.cli.peer_options import ClientOptions
from swarmnet.paths import default_state_dir
from swarmnet.resident import Resident, announced, model_id, new_key
from swarmnet.systemd import notify_ready, notify_stopping
from swarmnet_protocols.errors import NetworkStopped
from swarmnet_protocols.joining.network import Network
from swarmnet_protocols.machine.lean_imports import import_transformers
from swarmnet_protocols.machine.platform import allow_open_files

if TYPE_CHECKING:
    from swarmnet.gateway.app import Gateway
    from swarmnet.gateway.models import ModelTable, Reserve
    from swarmnet.gateway.routing.router import Router
    from swarmnet.web.middleware import AccessPolicy
    from swarmnet.web.server import HttpEndpoint
    from swarmnet_client.batching.continuous_batching import BatchedModel
    from swarmnet_client.hosts.model_offers import ModelOffer
    from swarmnet_node.supervisor import Supervisor
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.models import LocalModel
    from swarmnet_protocols.net import Transport
    from swarmnet_protocols.session.adapters import Adapter

    Connection = tuple[Transport, Directory]
    Opened = tuple[BatchedModel, dict[str, Adapter]]

DRAIN_S = 60.0
"""Seconds that running answers may take to end after the command is stopped."""
MEMORY_SHARE = 4
"""Open models take at most one part in this many of the machine's memory, unless the user says
otherwise. With fewer parts, other programs run short. With more, models close and open often."""
FLOAT32_BYTES = 4
MAX_FILES = 65536
"""Limit on open files, raised from the usual 1024 because each HTTP connection takes one."""


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
    router = read_router(options, model)
    listen(options.host, options.port).close()  # reports an address in use before the swarm is searched
    endpoint = ModelEndpoint(
        network=client.network(swarm),
        options=options,
        access=access,
        own_key=own_key,
        router=router,
        where={"cache_dir": client.cache_dir, "max_disk_bytes": client.max_disk_bytes},
    )
    prepare_rendering()
    allow_open_files(MAX_FILES)
    port: int | None = options.port
    while port is not None:  # every revision of a job has the first one's port
        with progress(quiet=options.as_json) as report:
            if model:
                endpoint = replace(endpoint, local=client.resolve(model, endpoint.network, report))
            else:
                report("asking the swarm for its models", 0, None)
        endpoint = replace(endpoint, options=replace(options, port=port))
        port = run_until_stopped(endpoint.serve())


def _read_adapters(local: "LocalModel", folders: Mapping[str, Path]) -> "dict[str, Adapter]":
    """Read adapters of a model. Raises ``ConfigError`` or ``IntegrityError``."""
    if not folders:
        return {}  # and import no torch
    import_transformers()
    from swarmnet_client.tuning.adapter_dir import read_lora

    return {name: read_lora(local, folder) for name, folder in folders.items()}


def _adapter_bytes(folders: Iterable[Path]) -> int:
    """Return the memory of adapters: their float32 values, and a copy in the files for hosts."""
    from swarmnet_client.tuning.adapter_dir import stored_shapes

    values = sum(prod(shape) for folder in folders for shape in stored_shapes(folder).values())
    return 2 * FLOAT32_BYTES * values


def _check_adapters(folders: Mapping[str, Mapping[str, Path]]) -> None:
    """Raise ``ConfigError`` or ``IntegrityError`` if a directory has no adapter. Whether it fits
    its model is known when the model opens."""
    if folders:
        from swarmnet_client.tuning.adapter_dir import check_adapter

        for folder in chain.from_iterable(each.values() for each in folders.values()):
            check_adapter(folder)


@dataclass(frozen=True, kw_only=True)
class ModelEndpoint:
    """An endpoint of one model, or of all models that hosts announce.

    - ``own_key``: the secret of this user's commands, which ``access`` admits.
    - ``local``: the only model. None for all models.
    - ``where``: the folder of models and its limit, as ``resolve`` takes them.
    """

    network: Network
    options: EndpointOptions
    access: "AccessPolicy"
    own_key: str
    router: "Router | None" = None
    local: "LocalModel | None" = None
    where: Mapping[str, Any] = field(default_factory=dict)

    async def serve(self) -> int | None:
        """Serve until the user stops the command, or hosts offer a newer revision of a job.

        Return the port at which the newer revision is to be served next, else None.
        """
        from swarmnet_protocols.directory.revisions import newer_revision
        from swarmnet_protocols.machine.aio import race, within

        as_json = self.options.as_json
        interrupts = Interrupts.catch()
        if self.options.stop_on_eof:
            interrupts.catch_end_of(sys.stdin)
        stop = asyncio.Event()
        name = "" if self.local is None else self.local.name
        async with self.running() as (gateway, http, connection):
            interrupts.first = stop.set
            self._announce(gateway, http.url)
            newer = asyncio.create_task(newer_revision(connection[1], name), name="newer revision")
            ends: list[Awaitable[object]] = [stop.wait(), connection[0].died(), http.failed(), newer]
            await race(*ends)
            is_outdated = not newer.cancelled() and not stop.is_set()
            notify_stopping()
            if not stop.is_set() and not is_outdated:
                raise NetworkStopped
            draining = "stopping: running answers are finished; Ctrl-C again stops at once"
            if is_outdated:
                draining = f"a newer revision than {name} is served: running answers are finished"
            say({"event": "draining"}, draining, as_json=as_json)
            if not await within(DRAIN_S, gateway.drain()):
                cut_off = f"answers still ran after {DRAIN_S:g} s; they are cut off"
                say({"event": "cut_off"}, cut_off, as_json=as_json)
        if is_outdated and not stop.is_set():
            return urlsplit(http.url).port
        say({"event": "stopped"}, "stopped", as_json=as_json)
        return None

    @asynccontextmanager
    async def running(self) -> "AsyncIterator[tuple[Gateway, HttpEndpoint, Connection]]":
        """Answer requests while the context is open. Meanwhile this user's commands find the
        endpoint."""
        from swarmnet.gateway.accounts import Quota
        from swarmnet.gateway.app import Gateway, refusal
        from swarmnet.gateway.batches.endpoints import FILES, MAX_UPLOAD_BYTES
        from swarmnet.gateway.page import add_kill
        from swarmnet.web.middleware import protect
        from swarmnet.web.server import serve_http
        from swarmnet_protocols.joining.network import connect

        options, swarm = self.options, self.network.rules.swarm.hex()
        quota = Quota(options.requests_per_minute, options.tokens_per_minute, options.concurrent)
        async with AsyncExitStack() as stack:
            connection = await stack.enter_async_context(connect(self.network, client_mode=True))
            models = await stack.enter_async_context(self._models(connection))
            batches = default_state_dir() / "batches"
            if self.local is None:  # swarms have other models under the same names
                batches /= swarm
            gateway = Gateway(models, quota, own_key=self.own_key, batches_dir=batches, router=self.router)
            await stack.enter_async_context(gateway.running())
            bare = gateway.app()
            if options.demo:
                add_kill(bare, lambda peer: print_json({"event": "kill", "peer_id": peer}))
            most, long_bodies = gateway.parser.max_bytes, {FILES: MAX_UPLOAD_BYTES}
            app = protect(bare, self.access, max_body_bytes=most, long_bodies=long_bodies, refusal=refusal)
            http = await stack.enter_async_context(serve_http(app, options.host, options.port))
            name = "" if self.local is None else model_id(self.local.name)
            stack.enter_context(announced(Resident(http.url, self.own_key, swarm, name)))
            yield gateway, http, connection

    @asynccontextmanager
    async def _models(self, connection: "Connection") -> "AsyncIterator[ModelTable]":
        """Yield the table of one model, or of all that hosts announce (``gateway/models.py``)."""
        import psutil

        from swarmnet.gateway.models import ModelTable
        from swarmnet_client.batching.continuous_batching import BatchedModel, BatchLimits
        from swarmnet_client.hosts.model_hosts import ModelHosts
        from swarmnet_client.hosts.model_offers import SwarmOffers
        from swarmnet_client.model.load_options import LoadOptions, memory_notice
        from swarmnet_protocols.joining.without_hub import resolve_announced

        options, network = self.options, self.network
        load = LoadOptions.picked(
            options.dtype, options.device, only_generates=True, wire=options.wire, draft=options.draft
        )
        limits = BatchLimits(active=options.max_concurrent, waiting=options.max_concurrent)
        folders = adapter_folders(options.adapter, "" if self.local is None else self.local.name)

        @asynccontextmanager
        async def opened(local: "LocalModel", offered: str) -> "AsyncIterator[Opened]":
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
        async def opened_offer(offer: "ModelOffer", reserve: "Reserve") -> "AsyncIterator[Opened]":
            local = await resolve_announced(offer.name, offer.manifest, connection, network, **self.where)
            weights = local.sizes("local_layers").in_memory(load.dtype.itemsize)
            await reserve(weights + _adapter_bytes(folders.get(offer.name, {}).values()))
            async with opened(local, offer.name) as found:
                yield found

        async with AsyncExitStack() as stack:
            if self.local is not None:
                only = await stack.enter_async_context(opened(self.local, ""))
                yield await stack.enter_async_context(ModelTable.of(*only))
                return
            await asyncio.to_thread(_check_adapters, folders)
            offers = SwarmOffers(connection[1], network.rules, random.SystemRandom(), network.trust.hosts)
            most = options.max_memory_bytes or psutil.virtual_memory().total // MEMORY_SHARE
            table = ModelTable.of_swarm(offers.read, opened_offer, most, folders)
            yield await stack.enter_async_context(table)

    def _announce(self, gateway: "Gateway", url: str) -> None:
        model = gateway.models.usual_name
        notify_ready(f"{model or 'the models of a swarm'} at {url}")
        if self.options.as_json:
            print_json({"event": "ready", "url": url, "model": model or None})
            return
        model = model or f"all models of the swarm, now {len(gateway.models.entries)},"
        asks = "" if self.access.keys else ", for this machine only; no key is asked for"
        note(f"serving {model} at {url}/v1{asks}")
        note(f"  chat at {url}")
        note(f"  OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={'YOUR KEY' if self.access.keys else 'none'}")
        note("stop with Ctrl-C")


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
        endpoint = ModelEndpoint(
            network=network, options=options, access=access, own_key=own_key, local=local
        )
        async with endpoint.running() as (_, http, _):
            yield f"{http.url}/v1"

    return serve_from
