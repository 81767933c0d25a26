"""Manifests and files of models from strangers: damage is refused, and only equal models have equal
hashes."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.models import Manifest, ModelFile
from swarmnet_protocols.models.checkpoints import safetensors_header
from swarmnet_protocols.models.checkpoints.gguf import header as gguf_header
from swarmnet_protocols.models.manifest import BlockKey
from tests.support.models.tiny_models import save_tiny, write_gguf

names = st.text(min_size=1, max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    blocks = draw(st.integers(1, 3))
    tensors: dict[BlockKey, tuple[str, ...]] = {"local_layers": tuple(draw(st.lists(names, max_size=2)))}
    tensors |= {block: tuple(draw(st.lists(names, max_size=2))) for block in range(blocks)}
    files = st.builds(
        ModelFile,
        st.sampled_from(["config.json", "weights", "of/weights", "m/o/r/e", "ä b"]),
        st.integers(0, 1 << 40),
        st.binary(min_size=32, max_size=32),
    )
    return Manifest(
        draw(names),
        blocks,
        draw(st.integers(1, 1 << 20)),
        tuple(draw(st.lists(files, min_size=1, max_size=3))),
        tensors,
    )


@given(manifests())
def test_a_manifest_survives_json(manifest: Manifest) -> None:
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.hash == manifest.hash


@given(manifests(), st.randoms(use_true_random=False))
def test_the_hash_does_not_depend_on_order_or_file_names(manifest: Manifest, rng: random.Random) -> None:
    files = [ModelFile(f"renamed-{i}", file.size, file.sha256) for i, file in enumerate(manifest.files)]
    rng.shuffle(files)
    tensors = list(manifest.tensors.items())
    rng.shuffle(tensors)
    shuffled = Manifest(
        manifest.architecture, manifest.blocks, manifest.hidden_size, tuple(files), dict(tensors)
    )
    assert shuffled.hash == manifest.hash


@given(manifests(), manifests())
def test_different_models_have_different_hashes(one: Manifest, other: Manifest) -> None:
    def content(manifest: Manifest) -> object:
        files = sorted((file.sha256, file.size) for file in manifest.files)
        tensors = {key: sorted(value) for key, value in manifest.tensors.items()}
        return manifest.architecture, manifest.blocks, manifest.hidden_size, files, tensors

    assert (one.hash == other.hash) == (content(one) == content(other))


@given(manifests(), st.data())
def test_a_truncated_manifest_is_refused(manifest: Manifest, data: st.DataObject) -> None:
    text = manifest.to_json()
    with pytest.raises(IntegrityError):
        Manifest.from_json(text[: data.draw(st.integers(0, len(text) - 1))])


@given(manifests(), st.data())
def test_a_manifest_with_any_part_replaced_is_read_or_refused(
    manifest: Manifest, data: st.DataObject
) -> None:
    root = json.loads(manifest.to_json())
    place: Any = root
    key: Any = data.draw(st.sampled_from(sorted(root)))
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(
            st.sampled_from(sorted(place) if isinstance(place, dict) else list(range(len(place))))
        )
    place[key] = data.draw(json_values)
    read_or_refused(json.dumps(root))


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_arbitrary_bytes_are_refused_as_a_manifest(raw: bytes) -> None:
    with pytest.raises(IntegrityError):
        Manifest.from_json(raw)


def read_or_refused(text: str) -> None:
    try:
        manifest = Manifest.from_json(text)
    except IntegrityError:
        return
    assert Manifest.from_json(manifest.to_json()).hash == manifest.hash


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../b", "a\\b", "a\0b", ""])
def test_a_manifest_cannot_name_a_file_outside_the_model(path: str) -> None:
    manifest = Manifest("A", 1, 8, (ModelFile(path, 1, bytes(32)),), {"local_layers": (), 0: ()})
    with pytest.raises(IntegrityError):
        Manifest.from_json(manifest.to_json())


def test_a_deeply_nested_manifest_is_refused() -> None:
    with pytest.raises(IntegrityError):
        Manifest.from_json("[" * 200_000)


@pytest.fixture(scope="module")
def safetensors_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return (save_tiny("llama-tied", tmp_path_factory.mktemp("tiny")) / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama").read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corrupt") / "file"


fuzz = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz
@given(data=st.data())
def test_a_truncated_safetensors_file_is_refused(
    data: st.DataObject, safetensors_bytes: bytes, scratch: Path
) -> None:
    scratch.write_bytes(safetensors_bytes[: data.draw(st.integers(0, len(safetensors_bytes) - 1))])
    with pytest.raises(IntegrityError, match=scratch.name):
        safetensors_header.read_header(scratch)


@fuzz
@given(data=st.data())
def test_a_corrupt_safetensors_header_is_refused_or_harmless(
    data: st.DataObject, safetensors_bytes: bytes, scratch: Path
) -> None:
    header_bytes = 8 + int.from_bytes(safetensors_bytes[:8], "little")
    scratch.write_bytes(corrupted(data, safetensors_bytes, header_bytes))
    try:
        read = safetensors_header.read_header(scratch)
    except IntegrityError:
        return
    assert 0 < len(read.spans) < 200


entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F4", "", 3, None]),
        "shape": st.lists(st.sampled_from([0, 1, 2, -1, 1 << 63, True, "2", 1.5]), max_size=10),
        "data_offsets": st.lists(st.sampled_from([0, 4, 8, -4, 1 << 62, None]), max_size=3),
    }
)


@fuzz
@given(header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), entries | json_values, max_size=3))
def test_an_accepted_header_matches_the_file(header: dict[str, Any], scratch: Path) -> None:
    raw = json.dumps(header).encode()
    scratch.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    try:
        safetensors_header.read_header(scratch)
    except IntegrityError:
        return
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    assert sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in tensors) == 8


@fuzz
@given(data=st.data())
def test_a_corrupt_gguf_header_is_refused_or_harmless(
    data: st.DataObject, gguf_bytes: bytes, scratch: Path
) -> None:
    scratch.write_bytes(corrupted(data, gguf_bytes, 4_000))
    try:
        _, tensors = gguf_header.read_header(scratch)
    except (ConfigError, IntegrityError):
        return
    size = scratch.stat().st_size
    assert all(0 <= tensor.offset <= tensor.offset + tensor.size_bytes <= size for tensor in tensors.values())


def corrupted(data: st.DataObject, content: bytes, within: int) -> bytes:
    place = data.draw(st.integers(0, within - 1))
    patch = data.draw(st.binary(min_size=1, max_size=8))
    return content[:place] + patch + content[place + len(patch) :]
