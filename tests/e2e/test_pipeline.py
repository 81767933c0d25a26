"""Real workers train a model that fits none of them. A machine that trains nothing collects it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.processes.commands import call
from tests.support.processes.worker_processes import bootstrap, create_job, workers
from tests.support.training.workers import write_job

MAX_RAM_MIB = 1100
"""Most memory of a worker. A worker of the whole model needs more."""
RUNNING_MIB = 60
"""Memory of the threads, connections and kernels of a worker of any model, after its imports."""
_MODEL = "hidden_size = 512\nintermediate_size = 1536\nnum_hidden_layers = 11\nnum_attention_heads = 8"


@pytest.mark.slow
@pytest.mark.alone
def test_a_model_that_fits_no_worker_is_trained(tmp_path: Path) -> None:
    toml = write_job(tmp_path, "allreduce", rounds=3)
    for line in _MODEL.splitlines():
        key = line.partition(" ")[0]
        toml = "\n".join(line if each.startswith(f"{key} ") else each for each in toml.splitlines())
    options = ("--max-ram", f"{MAX_RAM_MIB}MiB")
    job = create_job(tmp_path, toml + "\n[stages]\ncount = 3\n")
    (tmp_path / "whole.toml").write_text(toml.replace('"tiny"', '"whole"'))
    swarm: tuple[str, ...] = ("--swarm", str(tmp_path / "swarm.toml"))
    anna = ("--data-dir", str(tmp_path / "anna"))
    whole = call("train", "create", str(tmp_path / "whole.toml"), *swarm, *anna)["job"]
    with (
        pytest.raises(RuntimeError, match="GiB of memory"),
        workers(tmp_path, whole, "anna", options=options),
    ):
        pass
    libraries_mib = _libraries_mib()
    with workers(tmp_path, job, "anna", "boris", "clara", options=options) as running:
        for worker in running.values():
            worker.wait("finished")
        assert {worker.wait("ready")["stage"] for worker in running.values()} == {0, 1, 2}
        for worker in running.values():
            copies = [each["bytes"] for each in list(worker.events) if each["event"] == "copy"]
            stated_mib = (1.15 * worker.wait("memory")["bytes"] + max(copies, default=0)) / 2**20
            peak_mib = _peak_mib(Path(f"/proc/{worker.process.pid}/status").read_text())
            assert peak_mib <= libraries_mib + RUNNING_MIB + stated_mib
        swarm = (*swarm, "--bootstrap", bootstrap(running)[0])
        elsewhere = ("--data-dir", str(tmp_path / "nothing"), "--cache-dir", str(tmp_path / "cache"))
        call("train", "export", job, *swarm, *elsewhere, "--out", str(tmp_path / "model"))
        for worker in running.values():
            worker.process.send_signal(signal.SIGTERM)
            assert worker.process.wait(30) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.isfinite(model(torch.tensor([[104, 105]])).logits).all()


def _libraries_mib() -> int:
    """Return the memory of Python and a worker's libraries. It differs between processors."""
    modules = "swarmnet_node.training.worker, transformers.models.llama.modeling_llama"
    program = f"import {modules}; print(open('/proc/self/status').read())"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return _peak_mib(found.stdout)


def _peak_mib(status: str) -> int:
    """Return the largest resident memory of a process so far, from its ``/proc/PID/status``."""
    [line] = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) >> 10
