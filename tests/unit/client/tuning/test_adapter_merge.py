"""Merged adapters are what PEFT makes of them on the model itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, LlamaConfig

from swarmnet.cli import execute
from swarmnet_client.tuning.adapter_dir import load_adapter
from swarmnet_client.tuning.methods import MergeMethod
from tests.support.processes.commands import call

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}


def plain() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, num_attention_heads=4))


def adapter(folder: Path, seed: int, **changes: Any) -> Path:
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **changes}
    tuned = get_peft_model(plain(), LoraConfig(**options))
    torch.manual_seed(seed)
    for name, parameter in tuned.named_parameters():
        if "lora" in name:
            parameter.data.normal_()
    tuned.save_pretrained(folder / str(seed), save_embedding_layers=False)
    return folder / str(seed)


@pytest.mark.parametrize("method", [MergeMethod.TIES, MergeMethod.LINEAR, MergeMethod.CAT])
def test_merging_equals_peft_on_the_model(method: MergeMethod, tmp_path: Path) -> None:
    one, other = adapter(tmp_path, 1), adapter(tmp_path, 2)
    out = tmp_path / "out"
    weights = ("--weight", "0.7", "--weight", "0.4")
    call("adapter", "merge", str(one), str(other), "--method", str(method), *weights, "--out", str(out))
    model: Any = PeftModel.from_pretrained(plain(), one, "one")
    model.load_adapter(other, "other")
    options = {"density": 0.5} if method == MergeMethod.TIES else {}
    model.add_weighted_adapter(["one", "other"], [0.7, 0.4], "both", str(method), **options)
    expected = get_peft_model_state_dict(model, adapter_name="both")
    merged = load_adapter(plain(), out)
    found = get_peft_model_state_dict(merged)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    model.set_adapter("both")
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert torch.equal(merged(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": 2}, "PEFT: "),
        ({"target_modules": ["q_proj"]}, "different modules"),
    ],
)
def test_adapters_that_do_not_fit_each_other_are_refused(
    changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, out = adapter(tmp_path, 1), adapter(tmp_path, 2, **changes), tmp_path / "out"
    assert execute(["adapter", "merge", str(one), str(other), "--out", str(out)]) != 0
    assert words in capsys.readouterr().err
    assert not out.exists()
