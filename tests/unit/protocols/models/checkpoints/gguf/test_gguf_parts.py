"""A gguf file that was split into parts is read as the model that it was."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.models.checkpoints.gguf import header as gguf_header
from swarmnet_protocols.models.checkpoints.gguf.header import part_names, read_parts
from tests.defences import defence, nothing, replacing
from tests.support.models.tiny_models import write_gguf


def split(source: Path, folder: Path, *, count: int = 2, total: int | None = None) -> list[Path]:
    """Write the tensors of a file into parts in turn, as llama.cpp's gguf-split names and marks
    them."""
    reader = gguf.GGUFReader(source)
    paths = [folder / f"model-{part + 1:05}-of-{count:05}.gguf" for part in range(count)]
    for part, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        for name, field in reader.fields.items():
            if part == 0 and not name.startswith("GGUF.") and name != "general.architecture":
                kind = field.types[0]
                sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), kind, sub_type=sub)
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors) if total is None else total)
        for tensor in reader.tensors[part::count]:
            kind = tensor.tensor_type
            writer.add_tensor(tensor.name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def opened(path: Path, tmp_path: Path) -> LocalModel:
    return resolve(str(path), cache_dir=tmp_path / "cache")


def values(model: LocalModel) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = model.load_whole(
        dtype=torch.float32, device=torch.device("cpu")
    ).state_dict()
    return found


@pytest.mark.parametrize("given", [0, 2])
def test_any_part_stands_for_the_whole(given: int, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", "llama")
    model = opened(split(whole, tmp_path, count=3)[given], tmp_path)
    assert [file.name for file in model.manifest.files] == part_names("model-00001-of-00003.gguf")
    expected, found = values(opened(whole, tmp_path)), values(model)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert model.tokenizer()("A!").input_ids == opened(whole, tmp_path).tokenizer()("A!").input_ids


def test_blocks_are_read_from_the_parts_that_have_them(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", "llama")
    first, second = split(whole, tmp_path)
    model = opened(first, tmp_path)
    own: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    expected = opened(whole, tmp_path).load_span(1, 2, **own).state_dict()
    found = model.load_span(1, 2, **own).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    second.write_bytes(second.read_bytes()[:-1] + b"\x55")
    with pytest.raises(IntegrityError, match=r"model-00002-of-00002\.gguf"):
        model.verify()


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first, second = split(write_gguf(tmp_path / "whole.gguf", "llama"), tmp_path)
    second.unlink()
    with pytest.raises(ConfigError, match=r"part 1 of 2 .* model-00002-of-00002\.gguf is not") as caught:
        opened(first, tmp_path)
    assert "llama-gguf-split --merge" in caught.value.hint


def test_a_part_whose_name_does_not_tell_the_others_is_named(tmp_path: Path) -> None:
    first, _ = split(write_gguf(tmp_path / "whole.gguf", "llama"), tmp_path)
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ConfigError, match="one of 2 parts"):
        opened(tmp_path / "renamed.gguf", tmp_path)


def test_a_part_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    first, second = split(write_gguf(tmp_path / "whole.gguf", "llama"), tmp_path)
    shutil.copy(first, second)
    with pytest.raises(IntegrityError, match="says that it is part 2 of 2"):
        opened(first, tmp_path)


@defence("parts of a split gguf file belong together", off=replacing(gguf_header, "_check_parts", nothing))
def test_parts_of_two_models_are_refused(tmp_path: Path) -> None:
    paths = split(write_gguf(tmp_path / "whole.gguf", "llama"), tmp_path, total=5)
    with pytest.raises(IntegrityError, match="do not belong together"):
        read_parts(paths)


def test_a_link_to_a_part_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first, second = split(write_gguf(tmp_path / "whole.gguf", "llama"), tmp_path)
    second.rename(tmp_path / "other" / second.name)
    (tmp_path / "model").mkdir()
    shutil.copy(first, tmp_path / "model" / first.name)
    (tmp_path / "model" / second.name).symlink_to(tmp_path / "other" / second.name)
    with pytest.raises(ConfigError, match="outside the model's folder"):
        opened(tmp_path / "model" / first.name, tmp_path)


@pytest.mark.parametrize("name", ["model.gguf", "model-00001-of-00001.gguf", "a-00003-of-00002.gguf", "a-1-of-2.gguf", "a-00001-of-99999.gguf"])  # fmt: skip
def test_other_names_are_those_of_whole_models(name: str) -> None:
    assert part_names(name) == [name]
