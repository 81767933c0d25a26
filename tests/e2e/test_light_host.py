"""A host whose layers C computes answers without importing torch or transformers."""

import sys
from pathlib import Path

import pytest
import torch

from swarmnet.cli.consent import PROGRAM_BYTES
from swarmnet.paths import default_cache_dir
from swarmnet_protocols.models import DEFAULT_MODEL, resolve
from tests.support.processes.commands import call
from tests.support.processes.nodes import Swarm
from tests.support.swarm.generation import greedy

pytestmark = pytest.mark.slow

PROGRAM = """
import atexit, sys
path = sys.argv.pop(1)
atexit.register(lambda: open(path, "w").write(repr({"torch", "transformers"} & {*sys.modules})))
from swarmnet.cli import main
main()
"""
"""``swarmnet``, which at its end writes which of the libraries it has imported."""


def test_a_host_answers_without_torch_and_transformers(tmp_path: Path) -> None:
    cache = default_cache_dir()
    local = resolve(DEFAULT_MODEL, cache_dir=cache)  # the first time, transformers checks the files
    imported = tmp_path / "imported"
    lab = Swarm(tmp_path / "swarm", cache)
    try:
        host = lab.launch("light", program=(sys.executable, "-c", PROGRAM, str(imported)))
        assert host.ready
        estimated = host.wait("sharing")["uses"]["estimate"]
        assert estimated.startswith("about 578 MB of memory, 98.4 MB of disk, 0.3% of a core when idle")
        assert sum(process.memory_info().rss for process in host.family) < PROGRAM_BYTES + 98_362_432
        prompts = [list(range(100, 132))]
        with lab.connect() as model:
            answers = greedy(model, prompts, 8)
        call("finish", "--data-dir", str(host.data_dir))
        assert host.wait_for_end() == 0
        assert imported.read_text() == "set()"
        whole = local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
        assert answers == greedy(whole, prompts, 8)
    finally:
        lab.close()
