"""The real model is trained through hosts in processes, which die: by ``swarmnet tune`` as people
run it, and by a loop."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.cli.failures import EXIT_INTERRUPTED
from swarmnet_client.tuning.adapter_dir import load_adapter
from swarmnet_protocols.models import resolve
from tests.e2e.test_tuning import assert_near, new_prompts, prompted
from tests.support.processes import faults
from tests.support.processes.commands import RunningCommand, call
from tests.support.processes.nodes import Swarm, swarm
from tests.support.swarm.generation import greedy
from tests.support.training.tuning_rows import write_rows

pytestmark = pytest.mark.slow


class TuneProcess(RunningCommand):
    def __init__(self, lab: Swarm, place: Path, *options: str) -> None:
        rows = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(24)]
        data = write_rows(place / "rows.jsonl", rows)
        where = ("--swarm", str(lab.file), "--cache-dir", str(lab.cache_dir), *lab.bootstrap_options)
        what = ("tune", "--model", lab.model, "--data", str(data), "--out", str(place / "adapter"))
        super().__init__((*what, *options, *where), place / "tune.log")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Swarm]:
    with swarm(tmp_path_factory.mktemp("tune") / "lab", cache_dir, (0, 15), (15, 30), (15, 30)) as started:
        yield started


@pytest.fixture
def lab(running: Swarm) -> Swarm:
    """Two hosts of the upper half, and one of the lower: a host that the last test killed is
    started again."""
    for name, node in list(running.nodes.items()):
        if node.process.poll() is not None:
            _ = running.relaunch(name).ready
    return running


@pytest.fixture
def whole(cache_dir: Path) -> Any:
    return resolve("smollm2-135m-instruct", cache_dir=cache_dir).load_whole(
        dtype=torch.float32, device=torch.device("cpu")
    )


def test_the_real_model_is_tuned_by_the_command(
    lab: Swarm, whole: Any, tmp_path: Path, cache_dir: Path
) -> None:
    """A host is killed, the command is interrupted, the same command resumes and finishes the run,
    and ``run`` uses its adapter."""
    options = ("--steps", "6", "--batch-size", "4", "--eval-every", "6")
    with TuneProcess(lab, tmp_path, *options) as run:
        run.wait("step", step=2)
        busiest = max(list(lab.nodes.values())[1:], key=lambda node: node.status.host.positions)
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
    prompt = local.tokenizer()("7 + 7 =").input_ids
    (expected,) = greedy(load_adapter(whole, tmp_path / "adapter"), [prompt], 4)
    assert answer["token_ids"] == expected[: len(answer["token_ids"])]


@pytest.mark.thorough
def test_gradients_are_right_when_a_host_dies_before_the_backward(lab: Swarm, whole: Any) -> None:
    """The host of the upper half is killed after the forward: another computes its gradients. In
    virtual time: ``sim/tuning/test_passes.py``."""
    texts = [list(range(100 + row, 130 + row)) for row in range(5)]
    with lab.connect() as model:
        prompts, local_prompts = new_prompts(576), new_prompts(576)
        local_loss = whole(**prompted(whole, local_prompts, texts)).loss
        local_loss.backward()

        loss = model(**prompted(model, prompts, texts)).loss
        victim = next(peer for peer, start, _ in model.last_run.route if start == 15)
        faults.kill(faults.node_of(lab, victim))
        loss.backward()

        assert_near(loss.detach(), local_loss.detach())
        assert_near(prompts.grad, local_prompts.grad)
        assert model.last_run.failovers
        assert greedy(model, [texts[0]], 4) == greedy(whole, [texts[0]], 4)
