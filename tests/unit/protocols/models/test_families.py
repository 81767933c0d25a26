"""The families that people use give through hops what transformers gives: greedy tokens and logits.

Each family is a directory and a gguf file. Transformers has the class that the published checkpoint
names.
"""

import itertools
import random
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from swarmnet_node.engine.kernels import native_backend
from swarmnet_node.engine.kernels.backend import Backend
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.engine.torch_layers.torch_stage import TORCH
from swarmnet_protocols.models import LocalModel, resolve
from tests.support.compiled import compiled_backend
from tests.support.gguf.families import FILES
from tests.support.gguf.writing import write
from tests.support.models.family_page import EXACT, MOST_USED, PAGE, current, reasons_in
from tests.support.models.hub_families import FAMILIES, REFUSED
from tests.support.models.rounding import assert_near
from tests.support.models.tensor_layers import TensorLayers

CPU = torch.device("cpu")
PROMPT_LENGTHS = (3, 29, 11)  # 29: longer than every sliding window
NEW_TOKENS = 6
ANSWER_TOKENS = 12
"""Tokens of answers whose logits are compared."""


class Hops:
    """The hops of a chain, one for each stage, and the sequences that they compute."""

    def __init__(self, stages: list[Stage], local_layers: TensorLayers, sequences: int) -> None:
        self.stages = stages
        self.caches = [[stage.new_sequence() for stage in stages] for _ in range(sequences)]
        self._local_layers = local_layers

    def length(self, sequence: int) -> int:
        return self.caches[sequence][0].length

    def logits(self, tokens: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The logits after each of the new tokens of some sequences, in one forward of each hop."""
        rows = [self._local_layers.embed(new) for new in tokens.values()]
        for hop, stage in enumerate(self.stages):
            rows = stage.forward([(self.caches[i][hop], row) for i, row in zip(tokens, rows, strict=True)])
        logits = self._local_layers.logits(torch.cat(rows))
        return dict(zip(tokens, torch.split(logits, [len(row) for row in rows]), strict=True))

    def step(self, tokens: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The greedy tokens after each of the new tokens."""
        return {i: logits.argmax(-1) for i, logits in self.logits(tokens).items()}

    def rewind(self, sequence: int, length: int) -> None:
        for cache in self.caches[sequence]:
            cache.truncate(length)


@dataclass
class Case:
    model: LocalModel
    local_layers: TensorLayers
    reference: Any
    """The model in transformers."""
    is_exact: bool
    """Whether C computes the blocks."""
    stages: dict[tuple[Backend, int, int], Stage] = field(default_factory=dict)
    """The stages loaded so far, by backend and span. A stage keeps nothing for a sequence, so all
    tests of a family share the stages."""
    answers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """The answers made so far, by the length of their prompts."""

    @cached_property
    def texts(self) -> list[torch.Tensor]:
        """Prompts of ``PROMPT_LENGTHS`` tokens, each with the ``NEW_TOKENS`` that transformers
        generates."""
        prompts = [random_tokens(length)[None] for length in PROMPT_LENGTHS]
        return [
            self.reference.generate(each, max_new_tokens=NEW_TOKENS, do_sample=False)[0] for each in prompts
        ]

    def answer(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A prompt with the tokens that transformers generates, and the logits of each of these."""
        if length not in self.answers:
            made = self.reference.generate(
                random_tokens(length)[None],
                max_new_tokens=ANSWER_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            self.answers[length] = made.sequences[0], torch.cat(made.logits)
        return self.answers[length]

    def hops(self, *cuts: int, backend: Backend = TORCH) -> Hops:
        """Hops that host the blocks between ``cuts``, with new sequences."""
        spans = list(itertools.pairwise((0, *cuts, self.model.manifest.blocks)))
        for span in spans:
            if (backend, *span) not in self.stages:
                self.stages[backend, *span] = load_stage(
                    self.model, *span, dtype=torch.float32, device=CPU, backend=backend
                )
        stages = [self.stages[backend, *span] for span in spans]
        return Hops(stages, self.local_layers, len(PROMPT_LENGTHS))


DIRECTORIES, GGUF_FILES = [*FAMILIES], [f"{name}.gguf" for name in FILES]
both_layouts = pytest.mark.parametrize("case", [*DIRECTORIES, *GGUF_FILES], indirect=True, scope="module")
directories_first = pytest.mark.parametrize(
    "case",
    [*DIRECTORIES, *(pytest.param(each, marks=pytest.mark.thorough) for each in GGUF_FILES)],
    indirect=True,
    scope="module",
)
"""For what a model does once it is loaded, which ``both_layouts`` show to be the same."""


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("family")
    name = request.param.removesuffix(".gguf")
    file = FILES[name] if name != request.param else None
    family = FAMILIES[name] if file is None else file.family
    path = family.save(folder / "model")
    reference: Any = getattr(transformers, family.architecture).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    reference.generation_config.eos_token_id = None
    if file is not None:
        path = write(folder / "model.gguf", file, reference)
    model = resolve(str(path), cache_dir=folder / "cache")
    is_exact = (name if name in FAMILIES else family.config["model_type"]) in EXACT
    return Case(model, TensorLayers(model), reference, is_exact)


def random_tokens(length: int) -> torch.Tensor:
    return torch.randint(3, 100, (length,), generator=torch.Generator().manual_seed(length))


@both_layouts
@pytest.mark.matrix
@pytest.mark.parametrize("cuts", [(), (1,), (1, 3)], ids=["one-hop", "two-hops", "three-hops"])
@pytest.mark.parametrize(
    "length", [150, *(pytest.param(each, marks=pytest.mark.thorough) for each in (16, 1000))]
)
def test_tokens_and_logits_are_those_of_transformers(case: Case, length: int, cuts: tuple[int, ...]) -> None:
    check_answer(case, length, case.hops(*cuts))


@directories_first
@pytest.mark.matrix
@pytest.mark.parametrize(
    "length", [150, *(pytest.param(each, marks=pytest.mark.thorough) for each in (16, 1000))]
)
def test_c_gives_the_tokens_and_logits_of_transformers(
    case: Case, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the families that the page lists so. C computes prompts of any length in tiles."""
    monkeypatch.setattr(native_backend, "MAX_POSITIONS", 100)
    hops = case.hops(1, backend=compiled_backend())
    assert (hops.stages[1].method.decode_step is not None) == case.is_exact
    if case.is_exact:
        check_answer(case, length, hops)


def check_answer(case: Case, length: int, hops: Hops) -> None:
    text, expected = case.answer(min(length, case.model.max_positions - ANSWER_TOKENS))
    tokens, found = text[:-ANSWER_TOKENS], []
    while len(tokens) < len(text):
        found.append(hops.logits({0: tokens[hops.length(0) :]})[0][-1])
        tokens = torch.cat([tokens, found[-1].argmax()[None]])
    assert tokens.tolist() == text.tolist()
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other)


@directories_first
def test_sequences_in_one_batch_get_the_tokens_of_transformers(case: Case) -> None:
    """Prompts of different lengths enter in chunks of random sizes, next to sequences that already
    decode."""
    hops = case.hops(1, 3)
    texts = [text[:prompt] for text, prompt in zip(case.texts, PROMPT_LENGTHS, strict=True)]
    chunk = random.Random(0)
    while waiting := [i for i, text in enumerate(texts) if len(text) < len(case.texts[i])]:
        new = {i: texts[i][hops.length(i) :][: chunk.choice((1, 4, 7))] for i in waiting}
        for i, chosen in hops.step(new).items():
            if hops.length(i) == len(texts[i]):
                texts[i] = torch.cat([texts[i], chosen[-1:]])
    assert [text.tolist() for text in texts] == [text.tolist() for text in case.texts]


@directories_first
@pytest.mark.matrix
@pytest.mark.parametrize("length", [0, 5, 28, 30])
def test_a_rewound_sequence_gets_the_tokens_of_transformers(case: Case, length: int) -> None:
    hops = case.hops(1)
    text, other = case.texts[1], case.texts[2]
    hops.step({1: text[:length]} if length else {2: other})
    for token in other[:9]:  # the positions to forget
        hops.step({1: token[None]})
    hops.rewind(1, length)
    chosen = hops.step({1: text[length:-1]})[1]
    wanted = text[max(PROMPT_LENGTHS[1], length + 1) :]
    assert chosen[-len(wanted) :].tolist() == wanted.tolist()


@directories_first
def test_a_manifest_has_the_tensors_of_the_language_model_only(case: Case) -> None:
    names = [name for part in case.model.manifest.tensors.values() for name in part]
    assert not [name for name in names if "vis" in name or "projector" in name or "mtp" in name]
    assert len(names) == len(set(names))


def test_families_that_do_not_work_are_refused_with_the_pages_reason(tmp_path: Path) -> None:
    reasons = reasons_in(tmp_path)
    for name, reason in reasons.items():
        assert REFUSED[name].architecture.split("For")[0] in reason
    assert PAGE.read_text() == current(reasons), "python -m tests.support.models.family_page writes it"


def test_seventeen_of_the_twenty_most_used_families_work() -> None:
    assert len(set(MOST_USED)) == 20
    assert len(set(MOST_USED) & FAMILIES.keys()) >= 17
    assert set(MOST_USED) <= FAMILIES.keys() | REFUSED.keys()
