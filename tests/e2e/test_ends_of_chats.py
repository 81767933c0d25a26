"""An answer ends where ``generate`` of the model's class ends, in ``run``, the gateway and
Python."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from swarmnet.cli.chat.answering import ModelAnswerer
from swarmnet.cli.chat.generation import SamplingOptions, Screen, generate
from swarmnet_protocols.models import resolve
from swarmnet_protocols.models.checkpoints.gguf.tokenizer import read_tokenizer
from tests.support.models.tiny import VOCABULARY, save_tiny_llama
from tests.support.swarm.gateway import Caller, completion_body, served
from tests.support.swarm.swarm_lab import Lab, Reference
from tests.support.swarm.tiny_swarm import tiny_swarm

PROMPT = [5, 6, 7, 8, 9]
TOKENS = 24
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


@dataclass(frozen=True)
class Family:
    """How a family ends the turn of an answer."""

    end: str
    eos: str = ""
    """The end of a text, which config.json and a gguf file name; empty: ``end``."""
    others: Sequence[str] = ()
    """Special tokens by which an end is known, or is none."""
    template: str = ""
    keys: dict[str, str] = field(default_factory=dict)
    """Keys that name further tokens in a gguf file, as llama.cpp's converter writes them."""
    type: int = CONTROL
    """What a gguf file says that ``end`` is."""
    ends: bool = True
    """Whether ``end`` ends an answer."""


FAMILIES = {
    "Llama 2, Mistral": Family("</s>"),
    "Llama 3": Family("<|eot_id|>", "<|end_of_text|>", ["<|eom_id|>"]),
    "Qwen": Family("<|im_end|>", others=["<|endoftext|>"]),
    "Phi-4, Qwen base": Family("<|im_end|>", "<|endoftext|>"),
    "Phi-3": Family("<|end|>", "<|endoftext|>", ["<|user|>", "<|assistant|>"]),
    "Gemma": Family("<end_of_turn>", "<eos>", ["<start_of_turn>"]),
    "Gemma of an old file": Family("<end_of_turn>", "<eos>", type=NORMAL),
    "Gemma 4": Family("<turn|>", "<eos>"),
    "DeepSeek": Family("<｜end▁of▁sentence｜>", others=["<｜User｜>", "<｜Assistant｜>"]),
    "gpt-oss": Family("<|call|>", "<|return|>", ["<|end|>"]),
    "gpt-oss within an answer": Family("<|end|>", "<|return|>", ["<|call|>"], ends=False),
    "GLM": Family("<|user|>", "<|endoftext|>", keys={"eot": "<|user|>"}),
    "Kimi": Family("[EOS]", "[EOT]"),
    "MiniMax": Family("[e~["),
    "of a template": Family("<stop>", "<eos>", template="{% for m in messages %}{{ m.content }}<stop>{% endfor %}"),
    "HTML": Family("</s>", "<|im_end|>", type=NORMAL, ends=False),
}  # fmt: skip


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A model's folder, and its answer to ``PROMPT``."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")
    return folder, answer_of(folder, None)


def answer_of(folder: Path, ends: Any) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=0)
    ids = torch.tensor([PROMPT])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": TOKENS}
    answer: list[int] = model.generate(ids, **options)[0, len(PROMPT) :].tolist()
    return answer


def write_tokenizer(writer: gguf.GGUFWriter, family: Family, end: int) -> None:
    tokens, types = [chr(33 + number) for number in range(VOCABULARY)], [NORMAL] * VOCABULARY
    free = [id for id in range(VOCABULARY - 1, 0, -1) if id not in (end, *PROMPT)]
    places = {end: family.end} | dict(
        zip(free, {family.eos or family.end, *family.others} - {family.end}, strict=False)
    )
    for id, token in places.items():
        tokens[id], types[id] = token, CONTROL
    types[end] = family.type
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([])
    writer.add_eos_token_id(tokens.index(family.eos or family.end))
    for key, token in family.keys.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", tokens.index(token))
    if family.template:
        writer.add_chat_template(family.template)


def _interleaved(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of a projection whose heads rotate neighbours, not their two halves."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_model(path: Path, folder: Path, family: Family, end: int) -> Path:
    """The weights in ``folder`` as gguf, as llama.cpp's converter writes them."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    config, values = model.config, {name: value.numpy() for name, value in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    write_tokenizer(writer, family, end)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in values.items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        found = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(str(found), _interleaved(value, heads) if heads else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_folder(folder: Path, source: Path, tokenizer: Any, ends: Any) -> Path:
    """The model in Hugging Face layout, whose generation config lists all ends as published ones
    do."""
    shutil.copytree(source, folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=ends, pad_token_id=0).save_pretrained(folder)
    return folder


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["gguf", "safetensors"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_ends_where_generate_ends(
    family: str, layout: str, weights: tuple[Path, list[int]], tmp_path: Path
) -> None:
    source, unended = weights
    chosen = FAMILIES[family]
    place = next(place for place in range(3, TOKENS) if unended.index(unended[place]) == place)
    end = unended[place]
    path = write_model(tmp_path / "model.gguf", source, chosen, end)
    tokenizer = read_tokenizer(path, VOCABULARY)
    ends = [id for id in {tokenizer.eos_token_id, end} if chosen.ends or id != end]
    expected = answer_of(source, ends)
    assert (len(expected) == place + 1) is chosen.ends
    if layout == "safetensors":
        path = save_folder(tmp_path / "model", source, tokenizer, ends)
    reference = Reference(resolve(str(path), cache_dir=tmp_path / "cache"))
    with tiny_swarm(reference, [(0, 6)]) as swarm:
        ids = torch.tensor([PROMPT])
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": TOKENS}
        assert swarm.model.generate(ids, **options)[0, len(PROMPT) :].tolist() == expected
        sampling = SamplingOptions(TOKENS, 0.0, None, None, True)
        answer = generate(ModelAnswerer(swarm.model), PROMPT, sampling, Screen(as_json=True))
        assert answer.token_ids == expected

    async def ask(_: Lab, caller: Caller) -> Any:
        body = completion_body(
            PROMPT, ignore_eos=False, max_tokens=TOKENS, model=caller.gateway.models.usual_name
        )
        return (await caller.post("/v1/completions", body)).json()

    answer = served(reference, ask, {"a": (0, 6)})
    assert answer["usage"]["completion_tokens"] == len(expected)
    assert answer["choices"][0]["finish_reason"] == ("stop" if chosen.ends else "length")
