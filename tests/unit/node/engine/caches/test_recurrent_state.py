"""Recurrent states of sequences on a stage: rewinding, forks, failed forwards, memory."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention

from swarmnet_node.engine import engine as engine_module
from swarmnet_node.engine.caches.kv_cache import SequenceCache
from swarmnet_node.engine.caches.recurrent_state import (
    SNAPSHOT_POSITIONS,
    SNAPSHOTS,
    MixerCache,
    SequenceStates,
    StateGeometry,
    StateShape,
    dispensable,
)
from swarmnet_node.engine.engine import Engine
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.errors import ConfigError, ProtocolViolation
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.net.limits.resources import ResourceManager
from tests.defences import Patch, defence
from tests.support.models.hub_families import FAMILIES
from tests.support.models.rounding import assert_near

CPU = torch.device("cpu")
SMALL = StateGeometry((StateShape((0, "recurrent", 0), (1, 1), torch.float32, CPU),), 32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    return saved(tmp_path_factory.mktemp("model"))


def saved(folder: Path) -> LocalModel:
    path = FAMILIES["qwen3_5"].save(folder / "model")
    return resolve(str(path), cache_dir=folder / "cache")


@pytest.fixture(scope="module")
def stage(model: LocalModel) -> Stage:
    """Layers with recurrent states, and one with attention."""
    return load(model)


def load(model: LocalModel, start: int = 0) -> Stage:
    return load_stage(model, start, 4, dtype=torch.float32, device=CPU)


def inputs(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))


def forward(stage: Stage, sequence: SequenceCache, rows: torch.Tensor) -> torch.Tensor:
    [output] = stage.forward([(sequence, rows)])
    return output


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 130, 255, 298])
def test_a_rewound_sequence_continues_as_if_the_rest_had_never_been(length: int, stage: Stage) -> None:
    sequence, other = stage.new_sequence(), stage.new_sequence()
    rows = inputs(300)
    for part in torch.split(rows, 50):
        forward(stage, sequence, part)
    sequence.truncate(length)
    expected = forward(stage, other, torch.cat([rows[:length], inputs(3, 1)]))[-3:]

    assert_near(forward(stage, sequence, inputs(3, 1)), expected)
    assert sequence.length == length + 3


def test_a_sequence_rewound_twice_continues_from_the_second_rewind(stage: Stage) -> None:
    sequence, other = stage.new_sequence(), stage.new_sequence()
    rows = inputs(200)
    forward(stage, sequence, rows)
    sequence.truncate(150)
    sequence.truncate(7)
    expected = forward(stage, other, torch.cat([rows[:7], inputs(1, 1)]))[-1:]
    assert_near(forward(stage, sequence, inputs(1, 1)), expected)


def test_a_rewind_computes_few_positions_again_if_it_goes_back_by_few() -> None:
    states = SequenceStates(SMALL)
    for length in range(1, 5000):
        states.advance(1)
        kept = (0, *states.snapshots)
        assert len(kept) <= 1 + SNAPSHOTS
        for back in (1, 10, 100, 1000):
            target = max(0, length - back)
            again = target - max(at for at in kept if at <= target)
            assert again <= 3 * SNAPSHOT_POSITIONS + 10 * back


def test_the_newest_snapshot_is_never_dispensable() -> None:
    assert dispensable((64, 128, 192, 256)) != 256


def test_states_of_the_snapshot_are_restored() -> None:
    states = SequenceStates(SMALL)
    state = states.state((0, "recurrent", 0))
    for number in range(1, 201):
        state.fill_(number)
        states.advance(1)
    states.restore(199)
    assert states.length == state.item() == 192


def test_a_fork_and_its_original_do_not_touch_each_other(stage: Stage) -> None:
    sequence, untouched = stage.new_sequence(), stage.new_sequence()
    for each in (sequence, untouched):
        forward(stage, each, inputs(100))
    twin = sequence.fork(100)
    forward(stage, twin, inputs(5, 1))
    twin.truncate(3)
    expected = forward(stage, untouched, inputs(4, 2))

    assert_near(forward(stage, sequence, inputs(4, 2)), expected)


@pytest.mark.parametrize("length", [10, 100])
def test_after_a_forward_that_failed_a_sequence_continues_as_before(
    length: int, model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = load(model)
    sequence, other = stage.new_sequence(), stage.new_sequence()
    for each in (sequence, other):
        forward(stage, each, inputs(length))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(stage._model.layers[3].mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="broken"):
            forward(stage, sequence, inputs(4, 1))
    assert sequence.length == length
    assert_near(forward(stage, sequence, inputs(4, 2)), forward(stage, other, inputs(4, 2)))


def test_a_sequence_takes_the_memory_that_its_geometry_says(stage: Stage) -> None:
    sequence = stage.new_sequence()
    assert sequence.nbytes == stage.geometry.bytes_for(0) == 0
    for count in (1, 100, 30):
        forward(stage, sequence, inputs(count))
        assert sequence.states is not None
        tensors = [
            *(each for pair in sequence.layers for each in pair),
            sequence.inputs,
            *sequence.states._slots.values(),
        ]
        assert sequence.nbytes == stage.geometry.bytes_for(sequence.length) == sum(t.nbytes for t in tensors)


def test_parts_of_a_stage_make_up_the_whole(stage: Stage) -> None:
    parts = [stage.part(0, 1), stage.part(1, 4).part(0, 1), stage.part(2, 3), stage.part(3, 4)]
    assert [part.geometry.states is None for part in parts] == [False, False, True, False]
    rows, sequences = inputs(9), [part.new_sequence() for part in parts]
    expected = forward(stage, stage.new_sequence(), rows)
    got = []
    for chunk in torch.split(rows, 4):
        states = chunk
        for part, sequence in zip(parts, sequences, strict=True):
            states = forward(part, sequence, states)
        got.append(states)
    assert_near(torch.cat(got), expected)


def test_sequences_of_one_pass_do_not_see_each_other(stage: Stage) -> None:
    rows = inputs(10)
    together, graph = stage.record_sequences(rows, [4, 6])
    apart = [stage.record_sequences(part, [len(part)]) for part in torch.split(rows, [4, 6])]
    assert_near(together, torch.cat([outputs for outputs, _ in apart]))
    gradients, _ = stage.gradients(graph, torch.ones(10, 32))
    expected = [stage.gradients(own, torch.ones(len(outputs), 32))[0] for outputs, own in apart]
    assert_near(gradients, torch.cat(expected))


def test_a_prefix_for_layers_with_recurrent_states_is_refused(model: LocalModel) -> None:
    stage = load(model, 2)
    shape = stage.geometry.layers[0]
    prefix = {f"2.prefix.{kind}": torch.zeros(shape.heads, 3, shape.key_size) for kind in ("key", "value")}
    with pytest.raises(ProtocolViolation, match="recurrent"):
        stage.load_adapter(prefix, 2)


def test_lora_within_a_mixer_is_refused(stage: Stage) -> None:
    path = "0.linear_attn.out_proj"
    pair = {f"{path}.down": torch.zeros(2, 32), f"{path}.up": torch.zeros(32, 2)}
    with pytest.raises(ProtocolViolation, match=r"linear_attn\.out_proj"):
        stage.load_adapter(pair, 0)


def test_layers_that_lose_what_they_keep_are_refused(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MixerCache, "get_recurrent_state", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="other state than keys, values and recurrent states"):
        load(model)


def test_layers_that_ask_their_cache_for_something_else_are_refused(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = Qwen3_5Attention.forward

    def indexed(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["past_key_values"].update_indexer(None, 0)
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(Qwen3_5Attention, "forward", indexed)
    with pytest.raises(ConfigError, match="update_indexer"):
        load(model)


def without_positions_again(patch: Patch) -> None:
    """Work counts its new positions only."""
    work = engine_module._StepWork

    def counting_new(*arguments: Any, **fields: Any) -> Any:
        made = work(*arguments, **fields)
        made.behind = 0
        return made

    patch.setattr(engine_module, "_StepWork", counting_new)


@defence("positions that are computed again after a rewind count in the batches", off=without_positions_again)
def test_positions_that_are_computed_again_share_forwards_with_others(stage: Stage) -> None:
    """A client that goes back must not make other clients wait until its layers with recurrent
    states have computed all positions again."""
    rows = inputs(300)

    async def go_back(engine: Engine) -> list[int]:
        """The number of positions to compute again; and the positions computed until the other
        client's step was done, and until this client's was."""
        going_back, other = (
            engine.register(stage.new_sequence(), ResourceManager().system) for _ in range(2)
        )
        await engine.compute(stage, [(going_back, rows)])
        before, reached = engine.counters.positions, []
        going_back.truncate(255)
        again = going_back.behind

        async def step(sequence: SequenceCache) -> torch.Tensor:
            [outputs] = await engine.compute(stage, [(sequence, inputs(1, 1))])
            reached.append(engine.counters.positions - before)
            return outputs

        outputs, _ = await asyncio.gather(step(going_back), step(other))
        expected = forward(stage, stage.new_sequence(), torch.cat([rows[:255], inputs(1, 1)]))[-1:]
        assert_near(outputs, expected)
        return [again, *reached]

    async def use() -> list[int]:
        with ThreadPoolExecutor(1) as executor:
            resources = ResourceManager()
            async with Engine(stage, executor, resources, max_cache_bytes=1 << 30).running() as engine:
                return await go_back(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "MAX_BATCH_TOKENS", 16)
        again, first, last = asyncio.run(use())
    assert again > 2 * 16
    assert first <= 16
    assert last == again + 2
