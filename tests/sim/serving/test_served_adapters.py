"""Models and adapters behind one gateway: each answer is that of its own model alone, and hosts
compute all of them together."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_client.batching.answers import Answer, Request
from swarmnet_client.tuning.adapter_dir import read_lora
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.session.adapters import Adapter
from tests.sim.serving.test_models import in_swarm, name_of, swarm_gateway
from tests.sim.tuning.test_adapters import LAYOUTS, TARGETS
from tests.support.models.peft_oracle import with_lora, with_prefix
from tests.support.network.virtual_time import TimedExecutor
from tests.support.swarm.batching import all_answered, answered, batcher, request
from tests.support.swarm.gateway import continued, refused
from tests.support.swarm.generation import greedy
from tests.support.swarm.swarm_lab import Lab, Reference, simulate
from tests.support.swarm.tiny_swarm import load_tiny

# PEFT 0.21 uses a name that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
TOKENS = 8
PROMPTS = [[*range(20, 40), 5 + number, 6, 7 + number % 3] for number in range(16)]
"""They begin alike, so that caches of one adapter are reused, and those of another must not be."""
Tuned = tuple[Adapter | None, list[list[int]]]
"""An adapter as hosts receive it, and the answers of PEFT to all prompts; None: no adapter."""


def whole(tiny: Reference) -> Any:
    return tiny.local.load_whole(dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def tuned(tiny: Reference, tmp_path_factory: pytest.TempPathFactory) -> list[Tuned]:
    """Four adapters of different ranks, each written by PEFT and read again, and the plain
    model."""
    made: list[Tuned] = [(None, greedy(whole(tiny), PROMPTS, TOKENS))]
    for seed in range(1, 5):
        model = with_lora(whole(tiny), TARGETS, rank=2 * seed, seed=seed)
        folder = tmp_path_factory.mktemp("adapter")
        model.save_pretrained(folder)
        made.append((read_lora(tiny.local, folder), greedy(model, PROMPTS, TOKENS)))
    return made


def asked(tuned: list[Tuned], number: int) -> Request:
    return replace(request(PROMPTS[number], TOKENS), adapter=tuned[number % len(tuned)][0])


def expected(tuned: list[Tuned], number: int) -> list[int]:
    return tuned[number % len(tuned)][1][number]


async def start(lab: Lab) -> None:
    """Start hosts of a chain, whose first one takes time, and a spare one."""
    await lab.start("a", lab.hosting((0, 3)), TimedExecutor(0.05))
    await lab.start_all({"b": (3, 6), "b2": (3, 6)})


def test_16_clients_of_two_models_and_four_adapters(
    tiny: Reference, tuned: list[Tuned], tmp_path: Path
) -> None:
    beta = load_tiny(tmp_path, blocks=4)
    adapters = {str(number): adapter for number, (adapter, _) in enumerate(tuned) if adapter is not None}

    async def scenario(lab: Lab, other: Lab) -> None:
        base, plain = name_of(lab), name_of(other)
        names = [base, *(f"{base}:{adapter}" for adapter in adapters), plain]
        answers = [*(alone for _, alone in tuned), [beta.greedy(prompt, TOKENS) for prompt in PROMPTS]]
        engine = lab.nodes["a"].engine
        assert engine is not None
        engine._executor = TimedExecutor(0.05)
        async with swarm_gateway(lab, other, adapters={base: adapters}) as caller:
            asked = [
                caller.complete(prompt, max_tokens=TOKENS, model=names[number % len(names)])
                for number, prompt in enumerate(PROMPTS)
            ]
            for number, answer in enumerate(await asyncio.gather(*asked)):
                turn = number % len(names)
                assert answer.json()["model"] == names[turn]
                assert answer.json()["choices"][0]["text"] == continued(answers[turn][number])
            assert engine.counters.forwards < 3 * TOKENS, "adapters hardly ever shared a forward"
            listed = (await caller.http.get("/v1/models")).json()["data"]
            parents = {each["id"]: each["parent"] for each in listed if each["loaded"]}
            assert parents == {name: base if name.startswith(f"{base}:") else None for name in names}
            for unknown in ("tiny", f"{plain}:1"):
                answer = await caller.complete(PROMPTS[0], model=unknown)
                assert refused(answer) == (404, "model", "model_not_found")

    in_swarm(tiny, beta, scenario)
    assert len({str(answers) for _, answers in tuned}) == len(tuned)


def test_a_host_that_dies_changes_no_answer_of_an_adapter(tiny: Reference, tuned: list[Tuned]) -> None:
    async def scenario(lab: Lab) -> list[list[int]]:
        await start(lab)
        async with batcher(lab) as (running, _):

            def strike(answer: Answer) -> None:
                if len(answer.ids) == 3:
                    lab.network.crash(next(iter(running._groups)).report.route[1][0])

            first, *others = (asked(tuned, number) for number in range(len(PROMPTS)))
            one, rest = await asyncio.gather(answered(running, first, strike), all_answered(running, others))
            assert running.failovers >= len(tuned) - 1, "other chains went through the same host"
            return [one, *rest]

    assert simulate(tiny, scenario) == [expected(tuned, number) for number in range(len(PROMPTS))]


def test_chains_of_adapters_share_the_room_for_old_caches(
    tiny: Reference, tuned: list[Tuned], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnet_client.batching.continuous_batching.KEPT_POSITIONS", 100)

    async def scenario(lab: Lab) -> None:
        await lab.start_all(LAYOUTS["1 hop"])
        async with batcher(lab) as (running, _):
            for number, turn in enumerate([0, 1, 0, 1, 2, 3, 4]):
                wanted = replace(request([5 + number] * 20, TOKENS), adapter=tuned[turn][0])
                assert len(await answered(running, wanted)) == TOKENS
                held = [len(each.held) for group in running._groups for each in group._sequences]
                assert 20 <= sum(count for count in held if count > 1) <= 100

    simulate(tiny, scenario)


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers:UserWarning")
def test_an_endpoint_takes_lora_on_the_blocks_only(tiny: Reference, tmp_path: Path) -> None:
    with_prefix(whole(tiny), 4).save_pretrained(tmp_path / "prefix")
    with_lora(whole(tiny), ["q_proj", "lm_head"]).save_pretrained(tmp_path / "head")
    for folder in ("prefix", "head"):
        with pytest.raises(ConfigError, match="more than LoRA on the blocks"):
            read_lora(tiny.local, tmp_path / folder)
