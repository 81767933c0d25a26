"""``swarmnet tune`` and ``run --adapter`` over swarms in this process, with the tiny model."""

import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from swarmnet import cli
from swarmnet.cli.failures import EXIT_INTERRUPTED
from swarmnet_client.chain.passes import RemoteBatch
from swarmnet_client.model import model as client_model
from swarmnet_client.model import remote_blocks
from swarmnet_client.model.load_options import LoadOptions
from swarmnet_client.tuning.adapter_dir import load_adapter
from swarmnet_client.tuning.checkpoint import CHECKPOINT_FILE
from swarmnet_client.tuning.trainer import Tuner
from swarmnet_protocols.errors import NoRoute
from swarmnet_protocols.models.peft_adapters import quiet_peft
from swarmnet_protocols.net.protocol_ids import PASS
from tests.support.models.rounding import NEAR, assert_near
from tests.support.network.memory_network import Delivery
from tests.support.swarm.generation import greedy, padded
from tests.support.swarm.swarm_lab import Lab, Reference
from tests.support.swarm.tiny_swarm import SPANS, TinySwarm, load_tiny, tiny_swarm
from tests.support.training.tuning_rows import counting_rows, labelled_rows, write_rows

UNREACHABLE = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWGKvMQQibbG6XNKirjbobDGphqWnVUMEtkgWNqWV72a7u"
"""An address that no test dials: the model is that of a tiny swarm."""
Events = list[dict[str, Any]]
Command = Callable[..., tuple[int, Events]]
Spans = Sequence[tuple[int, int]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def swarm_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.execute(["swarm", "create", "lab", "--open", "--out", str(tmp_path / "lab")]) == 0
    capsys.readouterr()
    return str(tmp_path / "lab" / "swarm.toml")


@pytest.fixture
def command(
    reference: Reference, tmp_path: Path, swarm_file: str, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs a command on the tiny model: its exit code and events."""

    def run(*arguments: str) -> tuple[int, Events]:
        where = (
            "--swarm",
            swarm_file,
            "--bootstrap",
            UNREACHABLE,
            "--cache-dir",
            str(tmp_path / "cache"),
            "--json",
        )
        code = cli.execute([*arguments, *where])
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


@contextmanager
def served(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, spans: Spans = SPANS
) -> Iterator[TinySwarm]:
    """Commands that open a model meanwhile get that of a tiny swarm."""
    with tiny_swarm(reference, spans) as running:
        monkeypatch.setattr(client_model, "load", lambda *_, **__: running.model)
        yield running


@contextmanager
def classifying(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> Iterator[TinySwarm]:
    """Commands that open a classifier meanwhile get one of two classes over a tiny swarm."""
    with tiny_swarm(reference, labels=2) as running:

        def load(*_: object, options: LoadOptions, **__: object) -> Any:
            assert options.labels == 2
            return running.model

        monkeypatch.setattr(client_model, "load", load)
        yield running


def scores(events: Events) -> Events:
    """Events without what differs from one run to the next."""
    kept = {"event", "step", "loss", "val_loss", "learning_rate", "tokens"}
    chosen = [event for event in events if event["event"] in {"step", "eval"}]
    return [{name: value for name, value in event.items() if name in kept} for event in chosen]


def begun_at(events: Events) -> int:
    """The step from which a run resumes."""
    (step,) = (event["step"] for event in events if event["event"] == "begin")
    return int(step)


def tuning(reference: Reference, place: Path, *options: str, rows: int = 18) -> tuple[str, ...]:
    """A run of 5 steps into ``place / "adapter"``."""
    data = write_rows(place / "rows.jsonl", counting_rows(rows))
    what = ("--model", str(reference.local.path), "--data", str(data), "--out", str(place / "adapter"))
    how = ("--steps", "5", "--batch-size", "4", "--virtual-tokens", "4", "--learning-rate", "0.1")
    return ("tune", *what, *how, *options)


@pytest.mark.parametrize("method", ["prompt", "lora", "deep-prompt"])
def test_tune_leaves_an_adapter_that_answers_alike_everywhere(
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    swarm_file: str,
    method: str,
) -> None:
    model, out = str(reference.local.path), tmp_path / "adapter"
    with served(reference, monkeypatch):
        code, events = command(*tuning(reference, tmp_path, "--method", method))
    assert code == 0, events
    assert [event["event"] for event in events] == [
        "begin",
        "eval",
        *["step"] * 4,
        "eval",
        "step",
        "eval",
        "done",
    ]
    assert (events[0]["rows"], events[0]["held_out"], events[0]["cut"]) == (16, 2, 0)
    assert all(event["bytes_sent"] > 4 * 9 * 32 for event in events[1:-1])
    assert events[-1]["val_loss"] == events[-2]["val_loss"]
    assert {"adapter_config.json", "adapter_model.safetensors", "tune.json", "loss.png"} <= {
        file.name for file in out.iterdir()
    }
    assert not (out / CHECKPOINT_FILE).exists()
    assert events[-1]["run"].endswith(f"--raw --swarm {swarm_file} --adapter {out}")
    assert "| training rows | 16 |" in (out / "README.md").read_text()
    summary = json.loads((out / "tune.json").read_text())
    assert (summary["method"], summary["model"], len(summary["losses"])) == (method, model, 5)

    with served(reference, monkeypatch):
        code, (answer,) = command("run", model, "w20 w21 w22", "--raw", "-n", "6", "--adapter", str(out))
    assert code == 0, answer
    whole = reference.local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
    expected = load_adapter(whole, out)
    ids = torch.tensor([[20, 21, 22]])
    with quiet_peft():
        local = expected.generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert answer["token_ids"] == local[0, 3:].tolist()
    assert answer["token_ids"] != greedy(reference.model, [[20, 21, 22]], 6)[0][: len(answer["token_ids"])]


def test_a_classifier_learns(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    arguments = tuning(reference, tmp_path, "--method", "classifier", "--held-out", "0.25")
    write_rows(tmp_path / "rows.jsonl", labelled_rows(24))
    options = ("--steps", "12", "--eval-every", "6", "--learning-rate", "0.02")
    with classifying(reference, monkeypatch):
        code, events = command(*arguments, *options)
    assert code == 0, events
    first, *_, last = [event for event in events if event["event"] == "eval"]
    assert last["val_loss"] < first["val_loss"]
    assert 0.5 < last["accuracy"] <= 1
    out = tmp_path / "adapter"
    assert json.loads((out / "tune.json").read_text())["labels"] == ["high", "low"]

    batch = padded([[20, 21, 22], [60, 61, 62, 63]])
    whole = AutoModelForSequenceClassification.from_pretrained(
        reference.local.path, num_labels=2, pad_token_id=0
    )
    expected = load_adapter(whole, out)(**batch).logits
    with classifying(reference, monkeypatch) as running, torch.no_grad():
        found = load_adapter(running.model, out)(**batch).logits
    assert_near(found, expected.detach())


def passes(count: int, action: Callable[[], object]) -> Callable[[Delivery], None]:
    """Does ``action`` when the ``count``-th message of a pass arrives."""
    seen = iter(range(count))

    def watch(delivery: Delivery) -> None:
        if delivery.protocol.id == PASS.id and next(seen, None) == count - 1:
            action()

    return watch


def test_an_interrupted_run_goes_on_with_the_same_result(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir()
    halves.mkdir()
    with served(reference, monkeypatch):
        code, expected = command(*tuning(reference, whole, "--method", "prompt"))
    assert code == 0

    with served(reference, monkeypatch) as running:
        interrupt = partial(os.kill, os.getpid(), signal.SIGINT)
        running.lab.network.observers.append(passes(60, interrupt))
        code, first = command(*tuning(reference, halves, "--method", "prompt"))
    assert code == EXIT_INTERRUPTED
    assert first[-1]["event"] == "stopped"
    assert 0 < first[-1]["step"] < 5
    assert [file.name for file in (halves / "adapter").iterdir()] == [CHECKPOINT_FILE]

    with served(reference, monkeypatch):
        code, refused = command(*tuning(reference, halves, "--method", "prompt", "--seed", "1"))
        assert (code, refused[0]["error"]) == (3, "config")
        assert "seed was 0 and is 1" in refused[0]["message"]
    with served(reference, monkeypatch):
        code, second = command(*tuning(reference, halves, "--method", "prompt"))
    assert code == 0
    assert second[0]["step"] == first[-1]["step"]
    assert scores(first + second) == scores(expected)
    weights = [(place / "adapter" / "adapter_model.safetensors").read_bytes() for place in (whole, halves)]
    assert weights[0] == weights[1]

    code, refused = command(*tuning(reference, halves, "--method", "prompt"))
    assert (code, "finished run" in refused[0]["message"]) == (3, True)


def test_a_replaced_run_does_not_go_on_if_its_replacement_crashes(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """The other run stopped after three steps; the one in its place crashes in its first."""
    arguments = tuning(reference, tmp_path, "--method", "prompt", "--save-every", "1")
    learn = Tuner._learn

    def crash(tuner: Tuner, after: int) -> dict[str, Any]:
        if tuner.step == after:
            raise NoRoute([(0, 1)])
        return learn(tuner)

    for options, after in (((), 3), (("--force",), 0)):
        with served(reference, monkeypatch), monkeypatch.context() as patch:
            patch.setattr(Tuner, "_learn", lambda tuner, after=after: crash(tuner, after))
            code, events = command(*arguments, *options)
        assert code != 0
        assert begun_at(events) == 0
    with served(reference, monkeypatch):
        code, events = command(*arguments)
    assert code == 0
    assert begun_at(events) == 0
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4, 5]


def test_a_host_that_dies_is_not_noticed(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    results = []
    for name, kill in (("quiet", False), ("deadly", True)):
        (tmp_path / name).mkdir()
        with served(reference, monkeypatch, spans=((0, 6), (0, 6))) as running:
            lab = running.lab

            def crash(lab: Lab = lab) -> None:
                busiest = max(lab.nodes, key=lambda node: lab.nodes[node].status().host.positions)
                lab.network.crash(lab.peer_id(busiest))

            if kill:
                lab.network.observers.append(passes(30, crash))
            code, events = command(*tuning(reference, tmp_path / name, "--method", "prompt"))
        assert code == 0, events
        results.append(events)
    quiet, deadly = results
    assert [event["step"] for event in quiet if event.get("failovers")] == []
    assert [event["step"] for event in deadly if event.get("failovers")] != []
    losses = [[event.get("loss", event.get("val_loss")) for event in scores(events)] for events in results]
    assert losses[0] == pytest.approx(losses[1], rel=NEAR)


def test_an_interrupt_after_a_checkpoint_saves_nothing_twice(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    with served(reference, monkeypatch) as running:
        interrupt = partial(os.kill, os.getpid(), signal.SIGINT)
        running.lab.network.observers.append(passes(60, interrupt))
        code, events = command(*tuning(reference, tmp_path, "--held-out", "0", "--save-every", "1"))
    assert code == EXIT_INTERRUPTED
    saved = [event["step"] for event in events if event["event"] == "saved"]
    assert saved == list(range(1, len(saved) + 1))
    assert saved
    assert (events[-1]["event"], events[-1]["step"]) == ("stopped", saved[-1])


def test_finished_work_is_kept_when_the_swarm_is_unreachable(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    with served(reference, monkeypatch):
        batches = iter([RemoteBatch] * 3)

        def remote_batch(*arguments: Any) -> RemoteBatch:
            for batch in batches:
                return batch(*arguments)
            raise NoRoute([(2, 4)])

        monkeypatch.setattr(remote_blocks, "RemoteBatch", remote_batch)
        code, events = command(*tuning(reference, tmp_path, "--method", "prompt"))
    assert code == 5
    assert [(event["event"], event.get("step")) for event in events[-3:]] == [
        ("saved", 3),
        ("stopped", 3),
        ("error", None),
    ]
    assert events[-1]["error"] == "unreachable"
    assert (tmp_path / "adapter" / CHECKPOINT_FILE).exists()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"text": "w5 w6"}, {"txt": "w5"}], "rows.jsonl:2: "),
        ([{"text": "w5 w6"}], "held out"),
        ([{"text": "w5", "label": "a"}, {"text": "w5", "label": "a"}] * 9, "two labels"),
    ],
    ids=["bad", "few", "one label"],
)
def test_bad_rows_are_refused_before_anything_is_sent(
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    rows: Events,
    words: str,
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("opened a model")

    monkeypatch.setattr(client_model, "load", never)
    arguments = tuning(reference, tmp_path, "--method", "classifier" if "label" in rows[0] else "lora")
    write_rows(tmp_path / "rows.jsonl", rows)
    code, (error,) = command(*arguments)
    assert (code, error["error"]) == (3, "config")
    assert words in error["message"]
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    "options",
    [("--rank", "257"), ("--method", "deep-prompt", "--virtual-tokens", "513"), ("--max-length", "1025")],
    ids=" ".join,
)
def test_requests_that_no_host_accepts_are_refused_before_sending(
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    options: tuple[str, ...],
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("opened a model")

    monkeypatch.setattr(client_model, "load", never)
    code, (error,) = command(*tuning(reference, tmp_path, *options))
    assert (code, error["error"]) == (2, "usage")
    assert options[-2] in error["message"]


def test_an_adapter_that_will_not_do_is_refused_before_it_is_sent(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    model = str(reference.local.path)
    code, (error,) = command("run", model, "w20", "--adapter", model)
    assert (code, "it has no adapter_config.json" in error["message"]) == (3, True)

    with served(reference, monkeypatch):
        assert command(*tuning(reference, tmp_path, "--method", "prompt", "--steps", "1"))[0] == 0
    out = tmp_path / "adapter"
    summary = json.loads((out / "tune.json").read_text())
    (out / "tune.json").write_text(json.dumps(summary | {"manifest": "00" * 32, "model": "another"}))
    code, (error,) = command("run", model, "w20", "--adapter", str(out))
    assert (code, error["message"].endswith("is for another model: another")) == (3, True)

    (out / "tune.json").unlink()
    config = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps(config | {"task_type": "SEQ_CLS"}))
    code, (error,) = command("run", model, "w20", "--adapter", str(out))
    assert (code, "writes no text" in error["message"]) == (3, True)

    (out / "adapter_config.json").write_text(json.dumps(config | {"token_dim": 64}))
    with served(reference, monkeypatch):
        code, (error,) = command("run", model, "w20", "--adapter", str(out))
        assert (code, "does not fit this model" in error["message"]) == (3, True)


def test_an_adapter_evolves_by_a_reward_of_this_machine(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    path = tmp_path / "reward.py"
    path.write_text("def reward(prompt, answer, expected):\n    return len(answer.split()) / 4\n")
    tuned = tuning(reference, tmp_path, "--method", "es", "--population", "4", "--max-tokens", "4")
    rows = [{"prompt": f"w{n} w{n + 1}", "completion": " w30"} for n in range(20, 28)]
    write_rows(tmp_path / "rows.jsonl", rows)
    with served(reference, monkeypatch):
        code, events = command(*tuned, "--reward", str(path), "--steps", "2")
    assert code == 0, events
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2]
    summary = json.loads((tmp_path / "adapter" / "tune.json").read_text())
    assert summary["reward"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (summary["population"], summary["spread"]) == (4, 0.06)
    assert load_adapter(
        reference.local.load_whole(dtype=torch.float32, device=torch.device("cpu")), tmp_path / "adapter"
    )
