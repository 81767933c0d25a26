"""A stage computes its blocks as transformers does, for any mix of sequences, and refuses what it
cannot compute."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmnet_node.engine.caches.kv_cache import GROWTH_POSITIONS, SequenceCache
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.arrays import as_array
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.session.adapters import block_of
from swarmnet_protocols.session.wire_tensors import encode_tensor
from tests.support.models.pass_oracle import assert_same, lora_pass, prefix_pass
from tests.support.models.rounding import assert_near
from tests.support.models.tiny_models import FAMILIES, save_tiny

CPU = torch.device("cpu")
SPANS = ((0, 1), (1, 4), (4, 5))
PROMPT_LENGTHS = (3, 29, 11)  # 29: longer than every sliding window
NEW_TOKENS = 8


def load(family: str, tmp_path: Path, **changes: Any) -> LocalModel:
    return resolve(str(save_tiny(family, tmp_path / "model", **changes)), cache_dir=tmp_path / "cache")


def a_stage(tmp_path: Path, family: str = "llama-tied", dtype: torch.dtype = torch.float32) -> Stage:
    return load_stage(load(family, tmp_path), 1, 4, dtype=dtype, device=CPU)


def inputs(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))


def forward(stage: Stage, sequence: SequenceCache, rows: torch.Tensor) -> torch.Tensor:
    (output,) = stage.forward([(sequence, rows)])
    return output


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_outputs_of_a_stage_on_a_gpu_can_be_sent(tmp_path: Path) -> None:
    model = load("llama-tied", tmp_path)
    expected, got = (
        load_stage(model, 1, 4, dtype=torch.float32, device=torch.device(device))
        for device in ("cpu", "cuda")
    )
    rows = inputs(7)
    outputs = forward(got, got.new_sequence(), rows)
    encode_tensor(as_array(outputs.cpu()))
    assert_near(outputs.cpu(), forward(expected, expected.new_sequence(), rows).cpu())


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_match_transformers(family: str, tmp_path: Path) -> None:
    """Prompts of different lengths enter in chunks of random sizes, next to sequences that already
    decode."""
    model = load(family, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(
        model.path, dtype=torch.float32, attn_implementation="eager"
    )
    reference.generation_config.eos_token_id = None
    prompts = [
        torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(n)) for n in PROMPT_LENGTHS
    ]
    texts = [reference.generate(p[None], max_new_tokens=NEW_TOKENS, do_sample=False)[0] for p in prompts]
    stages = [load_stage(model, start, end, dtype=torch.float32, device=CPU) for start, end in SPANS]
    sequences = [[stage.new_sequence() for stage in stages] for _ in texts]
    outputs: list[list[torch.Tensor]] = [[] for _ in texts]
    chunk = random.Random(family)

    with torch.inference_mode():
        while active := [i for i, text in enumerate(texts) if sequences[i][0].length < len(text)]:
            rows = []
            for i in active:
                done = sequences[i][0].length
                count = chunk.choice((1, 4, 7)) if done < PROMPT_LENGTHS[i] else 1
                rows.append(reference.model.embed_tokens(texts[i][done : done + count]))
            for stage_index, stage in enumerate(stages):
                rows = stage.forward(
                    [(sequences[i][stage_index], row) for i, row in zip(active, rows, strict=True)]
                )
            for i, row in zip(active, rows, strict=True):
                outputs[i].append(reference.model.norm(row))
        for text, parts in zip(texts, outputs, strict=True):
            hidden = torch.cat(parts)
            expected = reference.model(text[None]).last_hidden_state[0]
            assert_near(hidden, expected)
            greedy = reference.lm_head(hidden).argmax(-1)[-NEW_TOKENS - 1 : -1]
            assert greedy.tolist() == text[-NEW_TOKENS:].tolist()


def test_a_truncated_sequence_continues_as_if_the_rest_had_never_been(tmp_path: Path) -> None:
    stage = a_stage(tmp_path, "gemma3")
    sequence, other = stage.new_sequence(), stage.new_sequence()
    forward(stage, sequence, inputs(20))
    sequence.truncate(9)
    forward(stage, other, inputs(20)[:9])

    assert sequence.length == 9
    assert_near(forward(stage, sequence, inputs(3, 1)), forward(stage, other, inputs(3, 1)))


@pytest.mark.parametrize("length", [-1, 6])
def test_a_sequence_cannot_be_truncated_to_positions_it_lacks(length: int, tmp_path: Path) -> None:
    stage = a_stage(tmp_path)
    sequence = stage.new_sequence()
    forward(stage, sequence, inputs(5))

    with pytest.raises(ValueError, match="cannot truncate"):
        sequence.truncate(length)


def test_a_fork_and_its_original_do_not_touch_each_other(tmp_path: Path) -> None:
    stage = a_stage(tmp_path)
    sequence, untouched = stage.new_sequence(), stage.new_sequence()
    for each in (sequence, untouched):
        forward(stage, each, inputs(10))
    twin = sequence.fork(10)
    assert twin.length == 10

    forward(stage, sequence, inputs(4, 1))
    assert_near(forward(stage, twin, inputs(4, 2)), forward(stage, untouched, inputs(4, 2)))
    assert (sequence.length, twin.length) == (14, 14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_sequence_are_those_of_its_buffers(dtype: torch.dtype, tmp_path: Path) -> None:
    stage = a_stage(tmp_path, dtype=dtype)
    sequence = stage.new_sequence()
    assert sequence.nbytes == stage.geometry.bytes_for(0) == 0

    for count in (1, GROWTH_POSITIONS - 1, 1, 2 * GROWTH_POSITIONS):
        forward(stage, sequence, inputs(count))
        buffers = [buffer for layer in range(stage.blocks) for buffer in sequence.layers[layer]]
        assert sequence.nbytes == sum(b.untyped_storage().nbytes() for b in buffers)
        assert sequence.nbytes == stage.geometry.bytes_for(sequence.length)
        assert all(b.dtype == dtype for b in buffers)
    longest = sequence.nbytes
    sequence.truncate(1)
    assert sequence.nbytes == longest
    assert sequence.fork(1).nbytes == stage.geometry.bytes_for(1)


def test_growing_keeps_the_positions_of_a_sequence(tmp_path: Path) -> None:
    stage = a_stage(tmp_path)
    rows = inputs(GROWTH_POSITIONS + 5)
    at_once, one_by_one = stage.new_sequence(), stage.new_sequence()
    expected = forward(stage, at_once, rows)

    got = torch.cat([forward(stage, one_by_one, row[None]) for row in rows])
    assert_near(got, expected)


def test_a_sequence_may_be_in_a_batch_only_once(tmp_path: Path) -> None:
    stage = a_stage(tmp_path)
    sequence = stage.new_sequence()

    with pytest.raises(ValueError, match="twice"):
        stage.forward([(sequence, inputs(1)), (sequence, inputs(1))])
    assert sequence.length == 0


@pytest.mark.parametrize("shape", [(0, 32), (2, 31), (32,), (1, 1, 32)])
def test_inputs_of_another_shape_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    stage = a_stage(tmp_path)
    sequence = stage.new_sequence()

    with pytest.raises(ValueError, match="shape"):
        stage.forward([(sequence, torch.zeros(shape))])
    assert sequence.length == 0


def test_an_empty_batch_has_no_outputs(tmp_path: Path) -> None:
    assert a_stage(tmp_path).forward([]) == []


def test_a_failed_forward_leaves_the_length_of_every_sequence(tmp_path: Path) -> None:
    stage = a_stage(tmp_path, "gemma3")
    first, second = stage.new_sequence(), stage.new_sequence()
    forward(stage, first, inputs(5))
    handle = stage._model.layers[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError()))

    with pytest.raises(MemoryError):
        stage.forward([(first, inputs(2, 1)), (second, inputs(2, 2))])
    handle.remove()
    assert (first.length, second.length) == (5, 0)

    fresh = stage.new_sequence()
    expected = forward(stage, fresh, torch.cat([inputs(5), inputs(2, 1)]))[5:]
    assert_near(forward(stage, first, inputs(2, 1)), expected)


@pytest.mark.parametrize(
    ("family", "fused"), [("llama-tied", True), ("qwen2", True), ("qwen3", True), ("mixtral", False)]
)
def test_families_of_the_llama_shape_use_llama_layers(family: str, fused: bool, tmp_path: Path) -> None:
    """Every other test of this file shows that they compute the same."""
    assert (a_stage(tmp_path, family).method.llama_layers is not None) == fused


def test_layers_that_only_look_like_llamas_are_left_to_transformers(tmp_path: Path) -> None:
    """Granite has the modules of Llama, but scales what its layers add."""
    stage = a_stage(tmp_path, "granite")

    assert stage.method.layers
    assert stage.method.llama_layers is None


def test_llama_layers_have_no_second_copy_of_the_weights(tmp_path: Path) -> None:
    stage = a_stage(tmp_path)
    attention = stage._model.layers[0].self_attn

    memories = {getattr(attention, f"{name}_proj").weight.untyped_storage().data_ptr() for name in "qkv"}
    assert memories == {stage.method.llama_layers.layers[0].qkv.weight.untyped_storage().data_ptr()}


def test_a_stage_describes_itself(tmp_path: Path) -> None:
    stage = a_stage(tmp_path, dtype=torch.bfloat16)

    assert (stage.blocks, stage.hidden_size, stage.dtype, stage.device) == (3, 32, torch.bfloat16, CPU)
    attention, mlp, norms = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 48, 2 * 32
    assert stage.weight_bytes == 3 * (attention + mlp + norms) * 2
    assert stage.geometry.bytes_per_position == 3 * 2 * 2 * 8 * 2


def test_parts_of_a_stage_share_its_weights_and_make_up_the_whole(tmp_path: Path) -> None:
    stage = load_stage(load("gemma3", tmp_path), 0, 5, dtype=torch.float32, device=CPU)
    parts = [stage.part(0, 1), stage.part(1, 4).part(0, 2), stage.part(1, 4).part(2, 3), stage.part(4, 5)]
    assert [part.blocks for part in parts] == [1, 2, 1, 1]
    assert stage.part(0, 5) is stage

    expected = forward(stage, stage.new_sequence(), inputs(20))
    sequences = [part.new_sequence() for part in parts]
    for chunk in inputs(20).split([12, 1, 7]):
        rows = chunk
        for part, sequence in zip(parts, sequences, strict=True):
            rows = forward(part, sequence, rows)
        assert_near(rows, expected[sequences[0].length - len(chunk) : sequences[0].length])
    assert sum(sequence.nbytes for sequence in sequences) == stage.geometry.bytes_for(20)
    assert parts[1]._model.layers[0] is stage._model.layers[1]


SEQUENCES = {"of one length": (9, 9, 9), "of several lengths": (3, 29, 11, 1)}


def local_gradients(
    model: LocalModel, rows: torch.Tensor, counts: tuple[int, ...], wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of transformers' own layers, and the gradients at their inputs, computed for one
    sequence after another."""
    reference = AutoModelForCausalLM.from_pretrained(
        model.path, dtype=torch.float32, attn_implementation="eager"
    ).requires_grad_(False)
    reference.model.norm = torch.nn.Identity()
    leaf = rows.clone().requires_grad_()
    outputs = [
        reference.model(inputs_embeds=row[None]).last_hidden_state[0] for row in leaf.split(list(counts))
    ]
    torch.cat(outputs).backward(wanted)
    assert leaf.grad is not None
    return torch.cat(outputs).detach(), leaf.grad


@pytest.mark.matrix
@pytest.mark.parametrize("counts", SEQUENCES.values(), ids=SEQUENCES.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_transformers(family: str, counts: tuple[int, ...], tmp_path: Path) -> None:
    model = load(family, tmp_path)
    stage = load_stage(model, 0, 5, dtype=torch.float32, device=CPU)
    rows, wanted = inputs(sum(counts)), inputs(sum(counts), 1)
    outputs, gradients = local_gradients(model, rows, counts, wanted)

    assert_near(stage.run_sequences(rows, counts), outputs)
    recorded, graph = stage.record_sequences(rows, counts)
    assert_near(recorded, outputs)
    assert_near(stage.gradients(graph, wanted)[0], gradients)


def test_weights_get_no_gradients_and_stay_unchanged(tmp_path: Path) -> None:
    stage = a_stage(tmp_path)
    before = [parameter.clone() for parameter in stage._model.parameters()]
    for _ in range(2):
        _, graph = stage.part(1, 3).record_sequences(inputs(10), (4, 6))
        stage.gradients(graph, inputs(10, 1))
    assert all(parameter.grad is None for parameter in stage._model.parameters())
    assert all(map(torch.equal, before, stage._model.parameters()))


def saved_storages(node: Any) -> dict[int, int]:
    """The memory that autograd has saved behind ``node``: bytes by address, read from its nodes."""
    found: dict[int, int] = {}
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [parent for parent, _ in node.next_functions]
        for name in (name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"):
            saved = getattr(node, name)
            for tensor in saved if isinstance(saved, tuple | list) else [saved]:
                if isinstance(tensor, torch.Tensor):
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_counts_the_memory_it_keeps_alive(family: str, tmp_path: Path) -> None:
    stage = load_stage(load(family, tmp_path), 0, 5, dtype=torch.float32, device=CPU)
    _, graph = stage.record_sequences(inputs(40), (29, 11))
    held = saved_storages(graph.outputs.node)
    held[graph.inputs.untyped_storage().data_ptr()] = graph.inputs.untyped_storage().nbytes()
    for weight in (*stage._model.parameters(), *stage._model.buffers()):
        held.pop(weight.untyped_storage().data_ptr(), None)
    # Scalars of an expression are saved as tensors too, 8 bytes each, which the hooks do not see.
    assert graph.nbytes == pytest.approx(sum(held.values()), rel=1e-3)


@pytest.mark.matrix
@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning"
)  # PEFT 0.21 and transformers 5.23
@pytest.mark.parametrize("counts", SEQUENCES.values(), ids=SEQUENCES.keys())
@pytest.mark.parametrize("kind", ["lora", "prefix"])
@pytest.mark.parametrize("family", ["llama-tied", "qwen3", "gemma3", "mixtral"])
def test_gradients_with_an_adapter_are_those_of_peft(
    family: str, kind: str, counts: tuple[int, ...], tmp_path: Path
) -> None:
    model = load(family, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(
        model.path, dtype=torch.float32, attn_implementation="eager"
    ).requires_grad_(False)
    rows, wanted = inputs(sum(counts)), inputs(sum(counts), 1)
    if kind == "lora":
        targets = ("q_proj", "k_proj", "v_proj", "o_proj")
        expected = lora_pass(plain, targets, rows, counts, wanted)
    else:
        expected = prefix_pass(plain, 7, rows, counts, wanted)
    stage = load_stage(model, 0, 5, dtype=torch.float32, device=CPU)
    own: dict[str, torch.Tensor] = {}
    outputs, graphs = rows, []
    for start, end in ((0, 2), (2, 5)):
        span = {name: tensor for name, tensor in expected.tensors.items() if start <= block_of(name) < end}
        part, adapter = stage.part(start, end), stage.load_adapter(span, 0)
        plainly = part.run_sequences(outputs, counts, adapter)
        outputs, graph = part.record_sequences(outputs, counts, adapter)
        assert_near(plainly, outputs)
        graphs.append((part, graph))
    gradients = wanted
    for part, graph in reversed(graphs):
        gradients, found = part.gradients(graph, gradients)
        own |= found
    assert_same((outputs, gradients), own, expected)
