"""A job in training answers: hosts serve what its workers have learned so far."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmnet_node.training.checkpoint import params_hash
from swarmnet_node.training.model.building import trained_parameters
from tests.support.processes.commands import call, run
from tests.support.processes.faults import At, Strike, kill
from tests.support.processes.nodes import NodeProcess, Swarm
from tests.support.processes.worker_processes import bootstrap, workers
from tests.support.training.workers import write_job

TOKENS = 24
PROMPT = torch.tensor([[104, 105]])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "stages",
    [
        pytest.param("", id="whole", marks=pytest.mark.thorough),
        pytest.param("[stages]\ncount = 2\n", id="stages"),
    ],
)
def test_a_job_in_training_answers_as_its_exported_revision(
    stages: str, tmp_path: Path, cache_dir: Path
) -> None:
    """A host and a training worker are killed in the middle of the answer."""
    lab = Swarm(tmp_path, cache_dir, model="tiny")
    toml = tmp_path / "job.toml"
    toml.write_text(write_job(tmp_path, "allreduce", rounds=100_000) + stages)
    swarm = ("--swarm", str(lab.file))
    job = call("train", "create", str(toml), *swarm, "--data-dir", str(tmp_path / "anna"))["job"]
    try:
        with workers(tmp_path, job, "anna", "boris") as training:
            for worker in training.values():
                worker.wait("round")
            known = ("--bootstrap", bootstrap(training)[0])
            unserved = run("run", "tiny", "hi", *swarm, *known, "--data-dir", str(tmp_path / "guest"))
            assert "swarmnet join SWARM --job tiny" in unserved.stderr

            for name in ("clara", "dora"):  # dora takes the revision of clara
                options = (str(lab.file), "--job", "tiny", "--cache-dir", str(cache_dir))
                lab.nodes[name] = NodeProcess((*options, *known), tmp_path / name)
                _ = lab.nodes[name].ready
            [folder] = (tmp_path / "clara" / "training" / job / "revisions").iterdir()
            exported = AutoModelForCausalLM.from_pretrained(folder)
            learned = torch.cat([each.detach().flatten() for _, each in trained_parameters(exported)])
            if not stages:
                assert params_hash(learned) in training["anna"].hashes().values()
            with lab.connect() as model:
                strike = Strike(lab, model, kill, block=0)
                deaths = At((4, training["boris"].kill), (8, strike))
                answer = model.generate(PROMPT, max_new_tokens=TOKENS, do_sample=False, streamer=deaths)
                assert len(strike.hit) == 1
        expected = exported.generate(PROMPT, max_new_tokens=TOKENS, do_sample=False)
        assert answer.tolist() == expected.tolist()
    finally:
        lab.close()
