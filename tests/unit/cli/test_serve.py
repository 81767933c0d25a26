"""``swarmnet serve`` with a model that does nothing."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from safetensors.numpy import save_file

from swarmnet.cli.endpoint import endpoint_options, serve
from swarmnet.cli.endpoint.endpoint_options import EndpointOptions
from swarmnet.cli.interrupts import run_until_stopped
from swarmnet.swarm_file import keys as key_files
from swarmnet.web.middleware import AccessPolicy
from swarmnet_client.hosts.model_offers import ModelOffer
from swarmnet_protocols.errors import ConfigError, OutOfResources, SwarmnetError
from swarmnet_protocols.joining import without_hub
from tests.defences import defence, replacing


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in for a served model that does nothing, on a swarm that does not change."""

    @asynccontextmanager
    async def connected(*_: object, **__: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(died=asyncio.Event().wait), None

    @asynccontextmanager
    async def served(*_: object, **__: object) -> AsyncIterator[Any]:
        local = SimpleNamespace(name="model", manifest=SimpleNamespace(hash=bytes(32), blocks=4))
        yield SimpleNamespace(local=local, batcher=None, max_length=512, context=512, missing=[])

    monkeypatch.setattr("swarmnet_client.hosts.model_hosts.ModelHosts.over", connected)
    monkeypatch.setattr("swarmnet_client.batching.continuous_batching.BatchedModel.open", served)
    monkeypatch.setattr("swarmnet_client.model.load_options.memory_notice", lambda *_: "")
    monkeypatch.setattr("swarmnet.resident.default_state_dir", lambda: tmp_path)
    # the last one, because modules that are first imported now would keep the stand-in
    monkeypatch.setattr("swarmnet_protocols.joining.network.connect", connected)


def serving(*, stop_on_eof: bool = False) -> Coroutine[Any, Any, None]:
    """An endpoint on a free port; only stand-ins read the model and the network."""
    options = EndpointOptions(port=0, max_concurrent=1, as_json=True, stop_on_eof=stop_on_eof)
    local: Any = SimpleNamespace(name="model", manifest=SimpleNamespace(hash=bytes(32)))
    rules = SimpleNamespace(swarm=b"swarm", check_model=lambda *_: None)
    network: Any = SimpleNamespace(rules=rules)
    return serve.ModelEndpoint(
        local=local, network=network, access=AccessPolicy(), options=options, own_key="own key"
    ).serve()


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("https://example.org", "https://example.org"),
        ("HTTPS://Example.org:443", "https://example.org"),
        ("http://127.0.0.1:3000", "http://127.0.0.1:3000"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("app://obsidian.md", "app://obsidian.md"),
        ("tauri://localhost", "tauri://localhost"),
        ("chrome-extension://abcdefghijklmnop", "chrome-extension://abcdefghijklmnop"),
    ],
)
def test_origins_of_pages_apps_and_extensions_are_allowed(given: str, sent: str) -> None:
    assert endpoint_options.check_origin(given) == sent


@pytest.mark.parametrize(
    "given",
    [
        "*",
        "null",
        "example.org",
        "http://localhost:*",
        "https://example.org/",
        "https://a b",
        "https://u@b.c",
    ],
)
def test_what_is_no_origin_is_refused(given: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not an origin"):
        endpoint_options.check_origin(given)


@pytest.mark.usefixtures("idle")
def test_a_gateway_ends_with_the_process_that_started_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(serve, "notify_ready", lambda _: os.close(writing))
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        run_until_stopped(serving(stop_on_eof=True))
    events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert events == ["ready", "draining", "stopped"]


@pytest.mark.usefixtures("idle")
def test_a_gateway_whose_server_broke_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def on_tick(_server: Any, _counter: int) -> bool:
        raise MemoryError("not a page left")

    monkeypatch.setattr("swarmnet.web.server._Server.on_tick", on_tick)
    with pytest.raises(SwarmnetError, match="failed"):
        run_until_stopped(serving())


@pytest.mark.usefixtures("idle")
@defence("adapters count as memory of their model", off=replacing(serve, "_adapter_bytes", lambda _: 0))
def test_the_memory_limit_counts_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"down": np.zeros((8, 4), np.float32)}, tmp_path / "adapter_model.safetensors")
    sizes = SimpleNamespace(in_memory=lambda _: 100)
    offer = ModelOffer("model", bytes(32), 4)

    async def read(*_: object) -> list[ModelOffer]:
        return [offer]

    async def resolved(*_: object, **__: object) -> Any:
        return SimpleNamespace(name="model", manifest=SimpleNamespace(hash=bytes(32)), sizes=lambda _: sizes)

    monkeypatch.setattr("swarmnet_client.hosts.model_offers.SwarmOffers.read", read)
    monkeypatch.setattr(without_hub, "resolve_announced", resolved)
    rules = SimpleNamespace(swarm=b"swarm", check_model=lambda *_: None)
    network: Any = SimpleNamespace(rules=rules, trust=SimpleNamespace(hosts=None))
    most = 100 + 2 * 4 * 8 * 4 - 1
    options = EndpointOptions(adapter=[f"model:law={tmp_path}"], max_memory_bytes=most)
    endpoint = serve.ModelEndpoint(network=network, options=options, access=AccessPolicy(), own_key="own key")

    async def main() -> None:
        connection: Any = (None, None)
        async with endpoint._models(connection) as models:
            with pytest.raises(OutOfResources, match="all models may take"):
                async with models.using("model"):
                    pytest.fail("the model opened")

    asyncio.run(main())


def test_no_key_takes_the_place_of_another_of_its_name(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "other"]
    files[0].write_text("alice:correct-horse\n# comment\nbattery-staple\n")
    files[1].write_text("alice:correct-horse\n")
    for file in files:
        file.chmod(0o600)
    keys = endpoint_options._keys(files)
    assert [keys.name_of(key) for key in ("correct-horse", "battery-staple")] == ["alice", "one:3"]
    files[1].write_text("alice:another-horse\n")
    with pytest.raises(ConfigError, match="alice"):
        endpoint_options._keys(files)


@defence("API key files are private", off=replacing(key_files, "_MOUNTED", Path("/")))
def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("correct-horse\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="every user") as caught:
        endpoint_options._keys([file])
    assert "chmod 600" in caught.value.hint
    file.chmod(0o640)  # the mode of credentials that systemd gives to a service
    assert endpoint_options._keys([file]).name_of("correct-horse") == "keys:1"


def test_a_key_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMNET_API_KEY", "correct-horse")
    assert endpoint_options._keys([]).name_of("correct-horse") == "SWARMNET_API_KEY"
