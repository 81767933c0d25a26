"""No key and no tensor of a family's gguf file is dropped, and quantised files give what their
values give.

``test_families.py`` compares the files with directories.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from huggingface_hub.errors import StrictDataclassError

from swarmnet.paths import default_cache_dir
from swarmnet_node.engine.kernels.native_backend import load_backend
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.arrays import as_tensor
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.models.checkpoints.checkpoint import CONFIG_FAULTS
from swarmnet_protocols.models.checkpoints.gguf.architectures import ARCHITECTURES
from swarmnet_protocols.models.checkpoints.gguf.config import check_keys, config_of, with_rope
from swarmnet_protocols.models.checkpoints.gguf.header import read_header
from swarmnet_protocols.models.checkpoints.gguf.rows import Header
from tests.support.gguf.families import FILES
from tests.support.gguf.writing import File, write
from tests.support.models.rounding import assert_near
from tests.support.models.tensor_layers import TensorLayers

FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
REFUSALS = (ConfigError, StrictDataclassError, *CONFIG_FAULTS)


@dataclass(frozen=True)
class Written:
    file: File
    model: Any
    path: Path


@pytest.fixture(scope="module", params=FILES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("file")
    file = FILES[request.param]
    directory = file.family.save(folder / "model")
    model = getattr(transformers, file.family.architecture).from_pretrained(directory, dtype=torch.float32)
    return Written(file, model.eval(), write(folder / "model.gguf", file, model))


def load(path: Path) -> LocalModel:
    return resolve(str(path), cache_dir=path.parent / "cache")


def answers(header: Header, factors: dict[str, list[float]]) -> dict[str, Any]:
    config = config_of(header)
    assert config is not None
    config = with_rope(config, header, factors)
    check_keys(config, header)
    return config.to_dict()


def changed(value: Any) -> Iterator[Any]:
    match value:
        case bool():
            yield not value
        case str():
            yield "linear"
        case tuple():
            yield (*value[1:], value[0])
            yield value[:-1]
        case _:
            yield value * 2
            yield value + 1


def test_no_key_changes_without_the_config_or_a_refusal(written: Written) -> None:
    fields, tensors = read_header(written.path)
    header = Header(fields, {name: tensor.shape for name, tensor in tensors.items()})
    factors = {
        name: torch.as_tensor(values).tolist()
        for name, values in written.file.hold(written.model.config).items()
    }
    before = answers(header, factors)
    of_images = {"rope.dimension_sections", "n_deepstack_layers"} if "vl" in header.architecture else set()
    for key in header.own.keys() - of_images:
        name = f"{header.architecture}.{key}"
        for value in {*changed(fields[name])} - {fields[name]}:
            try:
                after = answers(replace(header, fields={**fields, name: value}), factors)
            except REFUSALS:
                continue
            assert after != before, f"{name} = {value}"
        others = {other: value for other, value in fields.items() if other != name}
        with suppress(*REFUSALS):  # without a key, its default may be right
            answers(replace(header, fields=others), factors)


def test_a_quantised_file_gives_what_its_values_give(written: Written, tmp_path: Path) -> None:
    quantized = GGMLQuantizationType.Q8_0
    tokens = torch.randint(3, 100, (16,), generator=torch.Generator().manual_seed(0))
    logits = []
    for name in ("packed", "values"):
        is_values = name == "values"
        (tmp_path / name).mkdir()
        path = tmp_path / name / "model.gguf"
        model = load(write(path, written.file, written.model, quantized=quantized, is_expanded=is_values))
        options = (
            FLOAT32
            if is_values
            else {**FLOAT32, "backend": load_backend(default_cache_dir()), "packed": True}
        )
        stage = load_stage(model, 0, model.manifest.blocks, **options)
        local = TensorLayers(model)
        [rows] = stage.forward([(stage.new_sequence(), local.embed(tokens))])
        logits.append(local.logits(as_tensor(rows)))
    assert_near(*logits)


def test_every_architecture_has_a_file_that_is_tested() -> None:
    assert {file.architecture for file in FILES.values()} == ARCHITECTURES.keys()
