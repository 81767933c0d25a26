"""``swarmnet run`` with a model that does nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnet.cli.chat.generation import Screen
from swarmnet.cli.client_options import ClientOptions
from swarmnet.cli.commands.run import open_answerer
from swarmnet_protocols.errors import NoRoute
from swarmnet_protocols.timing import Timing


@pytest.mark.parametrize(
    ("missing", "as_json", "said"),
    [
        ([(4, 6)], False, "no host serves blocks 4:6: waiting 12 s for one at most"),
        ([(4, 6)], True, ""),
        ([], False, ""),
    ],
)
def test_run_says_that_it_waits_for_hosts(
    missing: list[tuple[int, int]],
    as_json: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @asynccontextmanager
    async def hosts(*_: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(no_route=NoRoute, timing=Timing())

    @asynccontextmanager
    async def served(*_: object, **__: object) -> AsyncIterator[Any]:
        transport = SimpleNamespace(died=asyncio.Event().wait)
        vocabulary = SimpleNamespace(size=9)
        yield SimpleNamespace(
            missing=missing, transport=transport, tokenizer=None, vocabulary=vocabulary, context=512
        )

    monkeypatch.setattr("swarmnet_protocols.joining.without_hub.resolve_in_swarm", lambda *_, **__: None)
    monkeypatch.setattr("swarmnet_client.hosts.model_hosts.ModelHosts.connect", hosts)
    monkeypatch.setattr("swarmnet_client.batching.continuous_batching.BatchedModel.open", served)
    monkeypatch.setattr("swarmnet_client.model.load_options.memory_notice", lambda *_: "")
    network: Any = None
    client = ClientOptions(hosts=(), data_dir=tmp_path, cache_dir=tmp_path, max_disk_bytes=None)
    with open_answerer("model", network, client, Screen(as_json)) as answerer:
        assert answerer.context == 512
    assert capsys.readouterr().err.removeprefix("finding the swarm\n").strip() == said
