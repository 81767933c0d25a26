"""Real workers train a model that fits none of them. A machine that trains nothing collects it."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
        with _peaks_mib(*(worker.process.pid for worker in running.values())) as peaks_mib:
            for worker in running.values():
                worker.wait("finished")
        assert {worker.wait("ready")["stage"] for worker in running.values()} == {0, 1, 2}
        for worker in running.values():
            copies = [each["bytes"] for each in list(worker.events) if each["event"] == "copy"]
            stated_mib = (1.15 * worker.wait("memory")["bytes"] + max(copies, default=0)) / 2**20
            assert peaks_mib[worker.process.pid] <= libraries_mib + RUNNING_MIB + stated_mib
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
    return _own_mib(found.stdout)


@contextmanager
def _peaks_mib(*pids: int) -> Iterator[dict[int, int]]:
    """Keep the largest memory of processes while the context is open."""
    peaks, is_over = dict.fromkeys(pids, 0), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.05):
            for pid, peak in peaks.items():
                peaks[pid] = max(peak, _own_mib(Path(f"/proc/{pid}/status").read_text()))

    thread = threading.Thread(target=watch, name="peaks")
    thread.start()
    try:
        yield peaks
    finally:
        is_over.set()
        thread.join()


def _own_mib(status: str) -> int:
    """Return the memory of a process from its ``/proc/PID/status``.

    Pages of files, as of a checkpoint that is being written, do not count: the kernel drops them
    when a program needs memory.
    """
    [line] = (line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) >> 10
