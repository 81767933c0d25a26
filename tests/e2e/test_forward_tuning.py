"""Tuning with forward passes only: candidates on hosts of a tiny swarm, slopes and rewards."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_client.model.client_adapter import adapter_of
from swarmnet_client.tuning import forward_tuner
from swarmnet_client.tuning.batches import Dataset
from swarmnet_client.tuning.candidates import answers, losses
from swarmnet_client.tuning.checkpoint import TuneCheckpoint
from swarmnet_client.tuning.forward_tuner import ForwardTuner
from swarmnet_client.tuning.methods import TuneMethod, TuneSettings, attach
from swarmnet_client.tuning.rewards import Reward
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.session.adapters import Adapter
from tests.support.models.rounding import NEAR
from tests.support.swarm.generation import greedy
from tests.support.swarm.swarm_lab import Reference
from tests.support.swarm.tiny_swarm import TinySwarm, load_tiny, tiny_swarm
from tests.support.training.tuning_rows import counting_rows, write_rows

RATES = {TuneMethod.ZO: 2e-3, TuneMethod.ES: 0.1}
LOW = """def reward(prompt, answer, expected):
    words = answer.split()
    return sum(int(word[1:]) < 50 for word in words) / len(words) if words else 0
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def swarm(reference: Reference) -> Iterator[TinySwarm]:
    with tiny_swarm(reference) as running:
        yield running


def settings(method: TuneMethod, **changes: Any) -> TuneSettings:
    fields = {"steps": 6, "batch_size": 4, "seed": 3, "population": 16, "spread": 0.1, "max_tokens": 9}
    fields["learning_rate"] = RATES[method]
    return TuneSettings(method, **(fields | {"target_modules": ("q_proj", "v_proj")} | changes))


def rows_of(folder: Path, running: TinySwarm, chosen: TuneSettings) -> Dataset:
    halves = [row["text"].split() for row in counting_rows(12)]
    rows = [{"prompt": " ".join(words[:4]), "completion": " " + " ".join(words[4:])} for words in halves]
    data = write_rows(folder / "rows.jsonl", rows)
    return Dataset.read(running.reference.local.tokenizer(), data, None, chosen)


def tuner(
    running: TinySwarm, data: Dataset, chosen: TuneSettings, reward: Reward | None = None
) -> ForwardTuner:
    return ForwardTuner(attach(running.model, "tiny", chosen), data, chosen, reward=reward)


def perturbed(tuned: Any) -> None:
    with torch.no_grad():
        for number, value in enumerate(value for value in tuned.parameters() if value.requires_grad):
            value.normal_(std=0.2, generator=torch.Generator().manual_seed(number))


def test_candidates_have_the_losses_and_answers_of_the_local_model(swarm: TinySwarm, tmp_path: Path) -> None:
    chosen = settings(TuneMethod.ZO)
    batch = rows_of(tmp_path, swarm, chosen).batch(0)
    tuned = attach(swarm.model, "tiny", chosen)
    candidates = [adapter_of(swarm.model)]
    perturbed(tuned)
    candidates.append(adapter_of(swarm.model))
    whole = swarm.reference.local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
    prompts = [[20, 21, 22, 23], [40, 41]]
    found, answered = losses(swarm.model, batch, candidates), answers(swarm.model, prompts, candidates, 5)
    local = attach(whole, "tiny", chosen)
    for loss, texts in zip(found, answered, strict=True):
        with torch.no_grad():
            assert loss == pytest.approx(float(local(**batch).loss), rel=NEAR)
        assert texts == [
            greedy(whole, [ids], 5)[0][: len(text)] for ids, text in zip(prompts, texts, strict=True)
        ]
        perturbed(local)
    assert found[0] != found[1]


@pytest.mark.parametrize("method", RATES)
def test_a_run_learns_and_resumes_with_the_same_result(
    swarm: TinySwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: TuneMethod
) -> None:
    """Random weights answer alike with any small adapter. So for ``es`` one number of the adapter
    decides how many words of an answer are low."""

    def answered(_: Any, prompts: list[list[int]], candidates: list[Adapter], most: int) -> list[Any]:
        numbers = [float(each.tensors["0.self_attn.q_proj.up"][0, 0]) for each in candidates]
        low = [min(most, max(0, round(most / 2 + 20 * number))) for number in numbers]
        return [[[20] * count + [80] * (most - count)] * len(prompts) for count in low]

    monkeypatch.setattr(forward_tuner, "answers", answered)
    path = tmp_path / "low.py"
    path.write_text(LOW)
    reward = Reward.load(path) if method is TuneMethod.ES else None
    chosen = settings(method, steps=12)
    read = rows_of(tmp_path, swarm, chosen)
    data = replace(read, held_out=read.train)  # with random weights, other rows may get worse
    run = tuner(swarm, data, chosen, reward)
    events = []
    for event in run.run(evaluate_every=6):
        events.append(event)
        if event["event"] == "step" and event["step"] == 6:
            run.checkpoint({}).save(tmp_path / "checkpoint.safetensors")
    first, *_, last = [event["val_loss"] for event in events if event["event"] == "eval"]
    assert last < first - (0.2 if reward else 0.005)
    kept = TuneCheckpoint.load(tmp_path / "checkpoint.safetensors")
    assert kept is not None
    run.restore(kept)
    again = [event for event in run.run(evaluate_every=6) if event["event"] == "step"]
    expected = [event for event in events if event["event"] == "step"][6:]
    assert [each["loss"] for each in again] == pytest.approx([each["loss"] for each in expected], rel=NEAR)


def test_a_reward_that_fails_names_its_file(swarm: TinySwarm, tmp_path: Path) -> None:
    path, chosen = tmp_path / "mine.py", settings(TuneMethod.ES)
    for source, words in (
        ("x = 1", "no function reward"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
    ):
        path.write_text(source)
        with pytest.raises(ConfigError, match=rf"mine\.py.*{words}"):
            Reward.load(path)
    for body, words in (("1 / 0", "ZeroDivisionError"), ("float('nan')", "gave the reward nan")):
        path.write_text(f"def reward(prompt, answer, expected):\n    return {body}\n")
        with pytest.raises(ConfigError, match=rf"mine\.py.*{words}"):
            Reward.load(path)("a", "b", "c")
    data = Dataset.read(
        swarm.reference.local.tokenizer(),
        write_rows(tmp_path / "texts.jsonl", counting_rows(12)),
        None,
        chosen,
    )
    with pytest.raises(ConfigError, match="has no prompt"):
        tuner(swarm, data, chosen, Reward.load(path))
