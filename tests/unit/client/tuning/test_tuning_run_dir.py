"""The directory of a run, which is begun, resumed and finished, and never taken for that of another
run."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from swarmnet_client.tuning.adapter_dir import SUMMARY_FILE, check_adapter
from swarmnet_client.tuning.checkpoint import CHECKPOINT_FILE, HISTORY, UNFINISHED, TuneCheckpoint
from swarmnet_client.tuning.model_card import model_card
from swarmnet_client.tuning.run_dir import RunDir, locked
from swarmnet_protocols.errors import ConfigError, IntegrityError

ABOUT = {"method": "lora", "seed": 0, "data": ["ab"]}
SUMMARY = {
    "model": "org/name@" + "0" * 40,
    "manifest": "cd" * 32,
    "rows": 9,
    "held_out_rows": 1,
    "has_chats": True,
    "losses": [2.5, 2.0, 1.25],
    "evaluations": [{"step": 0, "val_loss": 3.0}, {"step": 3, "val_loss": 1.5}],
    "labels": [],
    "rank": 8,
}


class Standing:
    """A run that has made three steps."""

    def checkpoint(self, about: Mapping[str, object]) -> TuneCheckpoint:
        return TuneCheckpoint(3, about, {"history": torch.zeros(0, 4)})


class Tuned:
    def save_pretrained(self, folder: str, **_: object) -> None:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            Path(folder, name).write_text("{}")


def begun(path: Path) -> RunDir:
    folder = RunDir(path, ABOUT, force=False)
    folder.save(Standing())  # type: ignore[arg-type]
    return folder


def test_a_run_resumes_from_its_checkpoint_until_it_is_done(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with locked(out):
        assert RunDir(out, ABOUT, force=False).unfinished is None
    begun(out)
    again = RunDir(out, ABOUT, force=False)
    assert again.unfinished is not None
    assert again.unfinished.step == 3
    again.finish(Tuned(), SUMMARY)
    left = ["README.md", "adapter_config.json", "adapter_model.safetensors", SUMMARY_FILE]
    assert sorted(file.name for file in out.iterdir()) == left
    with pytest.raises(ConfigError, match="finished run"):
        RunDir(out, ABOUT, force=False)
    assert RunDir(out, ABOUT, force=True).unfinished is None


@pytest.mark.parametrize("change", [{"seed": 1}, {"data": ["cd"]}, {"rank": 4}], ids=str)
def test_a_run_with_other_settings_or_data_is_not_resumed(tmp_path: Path, change: dict[str, object]) -> None:
    begun(tmp_path)
    (name,) = change
    with pytest.raises(ConfigError, match=f"{name} was .* and is "):
        RunDir(tmp_path, ABOUT | change, force=False)
    assert RunDir(tmp_path, ABOUT | change, force=True).unfinished is None
    assert (tmp_path / CHECKPOINT_FILE).exists()


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(ConfigError, match="another run is running"), locked(tmp_path):
        pass
    with locked(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_files_of_a_crashed_process_are_ignored(tmp_path: Path) -> None:
    (tmp_path / f"{UNFINISHED}abc").write_bytes(b"torn")
    (tmp_path / f"{UNFINISHED}def").mkdir()
    assert RunDir(tmp_path, ABOUT, force=False).unfinished is None
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds other files"):
        RunDir(tmp_path, ABOUT, force=False)
    with pytest.raises(ConfigError, match="cannot use"):
        RunDir(tmp_path / "thesis.txt", ABOUT, force=False)
    with pytest.raises(ConfigError, match="cannot use"), locked(tmp_path / "thesis.txt"):
        pass
    (tmp_path / CHECKPOINT_FILE).write_bytes(b"\x80\x04}q\x00.")
    with pytest.raises(IntegrityError, match="not a checkpoint"):
        RunDir(tmp_path, ABOUT, force=False)
    (tmp_path / CHECKPOINT_FILE).unlink()
    (tmp_path / CHECKPOINT_FILE).mkdir()
    with pytest.raises(IntegrityError, match="not a checkpoint"):
        RunDir(tmp_path, ABOUT, force=False)


@pytest.mark.parametrize("history", [None, torch.zeros(4), torch.zeros(2, 3)], ids=["none", "flat", "narrow"])
def test_a_checkpoint_without_its_curves_is_damaged(tmp_path: Path, history: torch.Tensor | None) -> None:
    path = tmp_path / CHECKPOINT_FILE
    TuneCheckpoint(3, ABOUT, {"a": torch.zeros(1)} | ({} if history is None else {HISTORY: history})).save(
        path
    )
    with pytest.raises(IntegrityError, match="not a checkpoint"):
        TuneCheckpoint.load(path)


def test_a_run_that_is_not_done_is_no_adapter_yet(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT_FILE).touch()
    with pytest.raises(ConfigError, match="is not done") as caught:
        check_adapter(tmp_path)
    assert "swarmnet tune" in caught.value.hint


def test_the_model_card_is_one_that_the_hub_reads() -> None:
    text = model_card(ABOUT | SUMMARY)
    card = ModelCard(text)
    about = card.data.to_dict()
    assert (about["base_model"], about["library_name"]) == ("org/name", "peft")
    assert (about["pipeline_tag"], about["tags"]) == ("text-generation", ["swarmnet", "lora"])
    for said in ("| method | lora |", "| training rows | 9 |", "2.5000, 1.2500", "3.0000, 1.5000"):
        assert said in text
    assert "swarmnet run org/name@" in text
    assert "--raw" not in text
    assert "--raw" in model_card(ABOUT | SUMMARY | {"has_chats": False})


def test_a_model_card_has_no_path_and_no_table_of_the_rows(tmp_path: Path) -> None:
    labels = ["yes | no", "a\n# heading"]
    text = model_card(ABOUT | SUMMARY | {"model": str(tmp_path), "labels": labels, "evaluations": []})
    assert str(tmp_path.parent) not in text
    assert "base_model" not in ModelCard(text).data.to_dict()
    assert "| classes | yes \\| no, a # heading |" in text
    assert "num_labels=2" in text
    assert "held-out loss" not in text
