"""Workers of four stages train a tiny model that none of them holds, while some of them fail."""

from pathlib import Path
from typing import Any

import pytest

from swarmnet_protocols.training.jobs import open_job
from tests.support.network.virtual_time import run
from tests.support.training.stages import StageLab, names, whole_losses
from tests.support.training.workers import train

_JOB = """
[job]
name = "tiny"
rounds = {rounds}
[model.config]
vocab_size = 256
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 4
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 32
{family}
[data]
path = "{data}"
sequence_length = 16
validation = 0.2
[training]
batch_size = {batch}
microbatch = 2
learning_rate = 3e-3
clip_norm = 0.5
[method]
name = "allreduce"
[exchange]
deadline_s = 15
max_workers = {most}
min_workers = {least}
[stages]
count = 4
cuts = [1, 2, 3]
[eval]
every_rounds = 100
"""
LLAMA = 'model_type = "llama"\ntie_word_embeddings = true'
MOE = (
    'model_type = "qwen3_moe"\ntie_word_embeddings = false\nnum_experts = 4\nnum_experts_per_tok = 2\n'
    "moe_intermediate_size = 16\nhead_dim = 8"
)


def staged_job(folder: Path, *, family: str = LLAMA, rounds: int = 5, workers: int = 1) -> str:
    data = folder / "data"
    if not data.exists():
        data.mkdir()
        for number in range(40):
            (data / f"{number}.txt").write_text(f"{number} squared is {number**2}, " * 40)
    return _JOB.format(rounds=rounds, family=family, data=data, batch=8, most=workers, least=workers)


def staged_lab(folder: Path, **changes: Any) -> StageLab:
    return StageLab(folder, staged_job(folder, **changes))


@pytest.mark.parametrize("family", [LLAMA, MOE], ids=["llama", "moe"])
@pytest.mark.parametrize("workers", [1, 3])
def test_stages_train_like_one_process(workers: int, family: str, tmp_path: Path) -> None:
    lab = staged_lab(tmp_path, family=family, rounds=8, workers=workers)
    run(train(lab, *names(dict.fromkeys(range(4), workers))))

    job = lab.files.applied_to(open_job(lab.sealed).job)
    expected = whole_losses(job, tmp_path, workers, 8)
    assert list(lab.losses().values()) == pytest.approx(expected, rel=1e-5)
