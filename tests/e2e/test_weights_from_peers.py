"""Real nodes in a swarm whose file names a model: they take its weights from each other while no hub answers."""

import time
from pathlib import Path

import pytest

from swarmnet_protocols.models.local_model import SETTLED_NS
from tests.support.big_model import make_tables, save_big
from tests.support.commands import call
from tests.support.processes import NodeProcess

pytestmark = pytest.mark.slow
NAME = "org/model"


def test_hosts_join_without_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    model = save_big(tmp_path / "model")
    newest_ns = max(path.stat().st_ctime_ns for path in model.iterdir())
    # The hash of a file is remembered once its times are old enough to show a later change.
    time.sleep(max(0, newest_ns + SETTLED_NS - time.time_ns()) / 1e9 + 0.1)
    _, pieces = make_tables(model, tmp_path / "first-cache")
    manifest = call("model", "show", str(model), "--cache-dir", str(tmp_path / "first-cache"))["manifest"]
    call("swarm", "create", "lab", "--no-mdns", "--out", str(tmp_path / "lab"))
    file = tmp_path / "lab" / "swarm.toml"
    listed = (
        f'[[models]]\nname = "{NAME}"\nmanifest = "sha256:{manifest}"\npieces = "sha256:{pieces.hex()}"\n'
    )
    file.write_text(file.read_text().replace("[signature]", f"{listed}\n[signature]"))
    call("swarm", "sign", str(file.parent))
    nodes: list[NodeProcess] = []

    def join(name: str, source: str, span: str) -> NodeProcess:
        known = [
            option for node in nodes for each in node.ready["addresses"] for option in ("--bootstrap", each)
        ]
        where = ("--cache-dir", str(tmp_path / f"{name}-cache"), "--blocks", span, *known)
        nodes.append(NodeProcess((str(tmp_path / "lab"), "--model", source, *where), tmp_path / name))
        assert nodes[-1].ready
        return nodes[-1]

    def here(name: str) -> int:
        [stored] = call("model", "ls", "--cache-dir", str(tmp_path / f"{name}-cache"))["models"][1:]
        assert stored["name"] == NAME
        return int(stored["present_bytes"])

    whole = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    try:
        join("first", str(model), "0:1")
        second = join("second", NAME, "30:40")
        assert second.status.manifest.hex() == manifest
        assert 0.1 * whole < here("second") < 0.25 * whole
        nodes[0].kill()
        nodes.pop(0)
        join("third", NAME, "30:40")
        assert 0.1 * whole < here("third") < 0.25 * whole
    finally:
        for node in nodes:
            node.kill()
