"""The public model is a transformers model: ``generate`` and ``forward`` give the same results
locally and on a swarm."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from swarmnet_client.model import local_layers
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import resolve
from swarmnet_protocols.net.protocol_ids import LINK
from tests.defences import defence, replacing
from tests.support.models.rounding import assert_near
from tests.support.models.tiny import VOCABULARY
from tests.support.network.memory_network import Delivery
from tests.support.processes.nodes import Swarm, swarm
from tests.support.swarm.generation import padded
from tests.support.swarm.tiny_swarm import TinySwarm, load_tiny, tiny_swarm

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22], [90, 3, 90, 3, 90, 3]]
TOKENS = 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinySwarm]:
    with tiny_swarm(load_tiny(tmp_path_factory.mktemp("tiny"))) as running:
        yield running


def generate(model: Any, prompts: list[list[int]], *, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    settings = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(**padded(prompts), **settings | options)


DECODINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.3},
    "top-k and top-p": {"do_sample": True, "top_k": 20, "top_p": 0.9},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "several beams": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "repetition penalty": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "until the end token": {"eos_token_id": list(range(40)), "max_new_tokens": 40},
    "until the end token, in beams": {"num_beams": 3, "eos_token_id": list(range(20)), "max_new_tokens": 40},
}


@pytest.mark.matrix
@pytest.mark.parametrize("options", DECODINGS.values(), ids=DECODINGS.keys())
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one prompt", "left-padded batch"])
def test_generate_gives_what_transformers_gives(
    tiny: TinySwarm, prompts: list[list[int]], options: dict[str, Any]
) -> None:
    expected = generate(tiny.reference.model, prompts, **options)
    assert generate(tiny.model, prompts, **options).tolist() == expected.tolist()


def test_another_seed_gives_another_sample(tiny: TinySwarm) -> None:
    samples = [generate(tiny.model, PROMPTS, seed=seed, do_sample=True).tolist() for seed in (0, 0, 1)]
    assert samples[0] == samples[1]
    assert samples[0] != samples[2]


@pytest.mark.parametrize("speculate", [True, False])
def test_an_answer_ends_at_a_stop_string(tiny: TinySwarm, speculate: bool) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise)
    plain = generate(tiny.model, PROMPTS[:1])[0].tolist()
    stop = tokenizer.decode(plain[len(PROMPTS[0]) + 4 : len(PROMPTS[0]) + 6])
    options = {"stop_strings": [stop], "tokenizer": tokenizer}
    expected = generate(tiny.reference.model, PROMPTS[:1], **options)[0].tolist()
    assert generate(tiny.model, PROMPTS[:1], speculate=speculate, **options)[0].tolist() == expected
    assert len(expected) < len(plain)


def test_scores_are_those_of_the_local_model(tiny: TinySwarm) -> None:
    options = {"return_dict_in_generate": True, "output_scores": True}
    theirs, ours = (generate(model, PROMPTS, **options) for model in (tiny.reference.model, tiny.model))
    assert_near(torch.stack(ours.scores), torch.stack(theirs.scores))


@pytest.mark.parametrize("speculation", ["prompt lookup", "assistant"])
def test_speculation_does_not_change_the_answer(tiny: TinySwarm, speculation: str) -> None:
    prompts = [PROMPTS[2] * 4]
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 4}  # transformers' own loops
    if speculation == "assistant":
        options = {"assistant_model": tiny.reference.model}
    expected = generate(tiny.reference.model, prompts)
    before = tiny.status.host.forwards
    assert generate(tiny.model, prompts, **options).tolist() == expected.tolist()
    if speculation == "assistant":  # every draft is right here
        assert tiny.status.host.forwards - before < TOKENS


def test_a_model_that_is_its_own_assistant_is_an_error(tiny: TinySwarm) -> None:
    with pytest.raises(ValueError, match="assist itself"):
        generate(tiny.model, PROMPTS[:1], assistant_model=tiny.model)


class _Repeats(LogitsProcessor):  # type: ignore[misc]  # transformers is not typed
    """Makes the token of three positions before likelier: the tiny model's own choices never repeat
    themselves."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raised = scores.clone()
        raised[:, input_ids[0, -3]] += 6
        return raised


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_speculation_needs_fewer_trips_for_the_same_tokens(tiny: TinySwarm, do_sample: bool) -> None:
    answers, trips = [], []
    for speculate in (False, True):
        for seed in range(3):
            options = {
                "do_sample": do_sample,
                **({"temperature": 0.7} if do_sample else {}),
                "max_new_tokens": 40,
                "speculate": speculate,
            }
            answer = generate(
                tiny.model,
                [PROMPTS[2]],
                seed=seed,
                logits_processor=LogitsProcessorList([_Repeats()]),
                **options,
            )
            answers.append(answer.tolist())
            trips.append(tiny.model.last_run.trips)
    assert answers[:3] == answers[3:]
    assert sum(trips[3:]) < 0.8 * sum(trips[:3])


# ---- forward -----------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [True, False], ids=["left padding", "right padding"])
def test_forward_gives_the_logits_and_the_loss(tiny: TinySwarm, left: bool) -> None:
    inputs = padded(PROMPTS, left=left)
    mask = inputs["attention_mask"].bool()
    # The local model numbers positions by column; hosts number tokens, as generate() does.
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    labels = inputs["input_ids"].masked_fill(~mask, -100)
    with torch.inference_mode():
        theirs = tiny.reference.model(**inputs, position_ids=positions, labels=labels)
        ours = tiny.model(**inputs, labels=labels)
    assert_near(ours.logits[mask], theirs.logits[mask])
    assert_near(ours.loss, theirs.loss)


def test_forward_takes_embeddings_and_keeps_the_last_logits(tiny: TinySwarm) -> None:
    ids = torch.tensor(PROMPTS[:1])
    with torch.inference_mode():
        theirs = tiny.reference.model(ids).logits
        embedded = tiny.model.get_input_embeddings()(ids)
        ours = tiny.model(inputs_embeds=embedded, logits_to_keep=2).logits
    assert ours.shape[1] == 2
    assert_near(ours, theirs[:, -2:])


def test_a_session_that_begins_again_may_be_padded_otherwise(tiny: TinySwarm) -> None:
    with tiny.model.session():
        for prompts in (PROMPTS, PROMPTS[::-1]):
            expected = generate(tiny.reference.model, prompts)
            assert generate(tiny.model, prompts).tolist() == expected.tolist()


def test_forward_gives_tuples_when_asked(tiny: TinySwarm) -> None:
    ids = torch.tensor(PROMPTS[:1])
    with torch.inference_mode():
        loss, logits = tiny.model(ids, labels=ids, return_dict=False)
        named = tiny.model(ids, labels=ids)
    assert torch.equal(loss, named.loss)
    assert torch.equal(logits, named.logits)


def test_a_mask_with_holes_is_refused(tiny: TinySwarm) -> None:
    with pytest.raises(ValueError, match="padding"):
        tiny.model(torch.tensor([[5, 6, 7]]), attention_mask=torch.tensor([[1, 0, 1]]))


# ---- streams, stops and sessions ---------------------------------------------------------------


@defence(
    "a token that the model does not know is refused",
    off=replacing(
        local_layers._check_ids, "__code__", (lambda *_: None).__code__
    ),  # models hold the function
    stray=VOCABULARY,
)
@pytest.mark.parametrize("stray", [VOCABULARY, -1])
def test_a_token_that_the_model_does_not_know_is_refused(tiny: TinySwarm, stray: int) -> None:
    """As the tokenizer of Gemma 3 1B has one for images."""
    with pytest.raises((ConfigError, IndexError)) as caught:
        generate(tiny.model, [[5, 6, stray]])
    assert f"no token {stray}: its tokens are 0 to {VOCABULARY - 1}" in str(caught.value)
    generate(tiny.model, [[5, 6, VOCABULARY - 1]])


def test_text_comes_as_a_stream(tiny: TinySwarm) -> None:
    streamer = TextIteratorStreamer(tiny.model.tokenizer, skip_prompt=True, timeout=30)
    worker = threading.Thread(target=generate, args=(tiny.model, PROMPTS[:1]), kwargs={"streamer": streamer})
    worker.start()
    pieces = list(streamer)
    worker.join()
    expected = generate(tiny.reference.model, PROMPTS[:1])[0, len(PROMPTS[0]) :]
    assert "".join(pieces).split() == [f"w{token}" for token in expected.tolist()]
    assert len(pieces) > TOKENS / 2


class AfterTokens(StoppingCriteria):  # type: ignore[misc]  # transformers is not typed
    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self._length)


def test_generate_stops_where_it_is_told_to(tiny: TinySwarm) -> None:
    expected = generate(tiny.reference.model, PROMPTS[:1])[0].tolist()
    end = len(PROMPTS[0]) + 5
    criteria = StoppingCriteriaList([AfterTokens(end)])
    assert generate(tiny.model, PROMPTS[:1], stopping_criteria=criteria)[0].tolist() == expected[:end]


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one prompt", "left-padded batch"])
def test_a_session_computes_only_what_is_new(tiny: TinySwarm, prompts: list[list[int]]) -> None:
    with tiny.model.session(max_length=100):
        first = generate(tiny.model, prompts)
        more = torch.cat([first, torch.full((len(prompts), 2), 33)], dim=1)
        mask = torch.cat(
            [padded(prompts)["attention_mask"], torch.ones(len(prompts), TOKENS + 2, dtype=torch.long)], dim=1
        )
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        before = tiny.status.host.positions
        second = tiny.model.generate(more, attention_mask=mask, **options)
        computed = tiny.status.host.positions - before
    expected = tiny.reference.model.generate(more, attention_mask=mask, **options)
    assert second.tolist() == expected.tolist()
    # The last token of the first answer was never fed; then two new ones and all but the last of
    # this answer.
    assert computed == len(prompts) * (1 + 2 + 3)


def test_a_session_goes_back_when_the_conversation_was_edited(tiny: TinySwarm) -> None:
    edited = [*PROMPTS[0][:4], 50, 51]
    with tiny.model.session():
        generate(tiny.model, PROMPTS[:1])
        before = tiny.status.host.positions
        assert generate(tiny.model, [edited]).tolist() == generate(tiny.reference.model, [edited]).tolist()
        assert tiny.status.host.positions - before == 2 + TOKENS - 1
        with pytest.raises(ConfigError, match="nest"), tiny.model.session():
            pass


class Interrupting:
    """A streamer during which the user presses Ctrl-C."""

    def put(self, _: torch.Tensor) -> None:
        raise KeyboardInterrupt

    def end(self) -> None:
        pass


def test_ctrl_c_between_two_tokens_leaves_a_usable_model(tiny: TinySwarm) -> None:
    with pytest.raises(KeyboardInterrupt):
        generate(tiny.model, PROMPTS[:1], streamer=Interrupting())
    assert generate(tiny.model, PROMPTS).tolist() == generate(tiny.reference.model, PROMPTS).tolist()


def test_ctrl_c_while_hosts_compute_leaves_a_usable_model(tiny: TinySwarm) -> None:
    main = threading.main_thread().ident
    assert main is not None
    pressed: list[Delivery] = []

    def press(delivery: Delivery) -> None:
        if delivery.protocol == LINK and len(pressed) < 9:
            pressed.append(delivery)
            if len(pressed) == 9:
                signal.pthread_kill(main, signal.SIGINT)

    tiny.lab.network.observers.append(press)
    try:
        with pytest.raises(KeyboardInterrupt), tiny.model.session():
            generate(tiny.model, PROMPTS, max_new_tokens=200)
    finally:
        tiny.lab.network.observers.remove(press)
    assert generate(tiny.model, PROMPTS).tolist() == generate(tiny.reference.model, PROMPTS).tolist()


# ---- the real model ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[tuple[Swarm, Any, Any]]:
    directory = tmp_path_factory.mktemp("real")
    with swarm(directory / "lab", cache_dir, (0, 15), (15, 30)) as lab, lab.connect() as model:
        whole = resolve(lab.model, cache_dir=cache_dir).load_whole(
            dtype=torch.float32, device=torch.device("cpu")
        )
        yield lab, model, whole


@pytest.mark.slow
def test_the_real_model_answers_as_transformers_does(real: tuple[Swarm, Any, Any]) -> None:
    _, model, whole = real
    questions = ["The capital of France is", "def fibonacci(n):\n", "In the beginning"]
    inputs = model.tokenizer(questions, return_tensors="pt", padding=True)
    for options in (
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.8},
        {"num_beams": 3},
        {"do_sample": False, "stop_strings": [","], "tokenizer": model.tokenizer},
    ):
        answers = []
        for each in (whole, model):
            torch.manual_seed(1)
            answers.append(each.generate(**inputs, max_new_tokens=16, pad_token_id=0, **options).tolist())
        assert answers[1] == answers[0], options
    with torch.inference_mode():
        first = model.tokenizer(questions[:1], return_tensors="pt")
        logits = [each(**first, labels=first.input_ids) for each in (whole, model)]
    assert_near(logits[1].logits, logits[0].logits)
    assert_near(logits[1].loss, logits[0].loss)


@pytest.mark.slow
def test_a_real_conversation_is_not_computed_twice(real: tuple[Swarm, Any, Any]) -> None:
    lab, model, whole = real
    node = next(iter(lab.nodes.values()))
    ids = model.tokenizer("Rivers of Europe: " * 20, return_tensors="pt").input_ids
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with model.session():
        first = model.generate(ids, **options)
        before = node.status.host.positions
        more = torch.cat([first, model.tokenizer(" and then", return_tensors="pt").input_ids], dim=1)
        second = model.generate(more, **options)
        computed = node.status.host.positions - before
    assert second.tolist() == whole.generate(more, **options).tolist()
    assert computed < 20 < ids.shape[1]
