"""``swarmnet tune`` as people run it: processes, the real model, a host that dies and Ctrl-C."""

import signal
from pathlib import Path

import pytest
import torch

from swarmnet.cli.failures import EXIT_INTERRUPTED
from swarmnet_client.tuning.adapter_dir import load_adapter
from swarmnet_protocols.models import resolve
from tests.support import faults
from tests.support.commands import RunningCommand, call
from tests.support.generation import greedy
from tests.support.processes import Swarm, swarm
from tests.support.tuning_rows import write_rows

pytestmark = pytest.mark.slow


class TuneProcess(RunningCommand):
    def __init__(self, lab: Swarm, place: Path, *options: str) -> None:
        rows = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(24)]
        data = write_rows(place / "rows.jsonl", rows)
        where = ("--swarm", str(lab.file), "--cache-dir", str(lab.cache_dir), *lab.bootstrap_options)
        what = ("tune", "--model", lab.model, "--data", str(data), "--out", str(place / "adapter"))
        super().__init__((*what, *options, *where), place / "tune.log")


def test_the_real_model_is_tuned_by_the_command(tmp_path: Path, cache_dir: Path) -> None:
    """A host is killed, the command is interrupted, the same command resumes and finishes the run, and ``run`` uses its adapter."""
    options = ("--steps", "6", "--batch-size", "4", "--eval-every", "6")
    with swarm(tmp_path / "lab", cache_dir, (0, 15), (15, 30), (15, 30)) as lab:
        with TuneProcess(lab, tmp_path, *options) as run:
            run.wait("step", step=2)
            busiest = max(list(lab.nodes.values())[1:], key=lambda node: node.status.tokens)
            faults.kill(busiest)
            run.wait("step", step=4)
            run.send_signal(signal.SIGINT, children=False)
            assert run.wait_for_end() == EXIT_INTERRUPTED
            assert [event["event"] for event in run.events[-2:]] == ["saved", "stopped"]
            assert "Traceback" not in run.log.read_text()
        with TuneProcess(lab, tmp_path, *options) as again:
            begin = again.wait("begin")
            assert begin["step"] == run.events[-1]["step"] >= 4
            done = again.wait("done")
        assert done["val_loss"] < run.wait("eval", step=0)["val_loss"]
        out = str(tmp_path / "adapter")
        where = ("--swarm", str(lab.file), "--cache-dir", str(lab.cache_dir), *lab.bootstrap_options)
        answer = call("run", lab.model, "7 + 7 =", "--raw", "-n", "4", "--adapter", out, *where)
    local = resolve(lab.model, cache_dir=cache_dir)
    whole = local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
    prompt = local.tokenizer()("7 + 7 =").input_ids
    (expected,) = greedy(load_adapter(whole, tmp_path / "adapter"), [prompt], 4)
    assert answer["token_ids"] == expected[: len(answer["token_ids"])]
