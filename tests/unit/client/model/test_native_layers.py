"""Local layers without torch give what transformers' model gives."""

from pathlib import Path

import numpy as np
import pytest

from swarmnet_client.model.head import open_layers
from swarmnet_client.model.load_options import LoadOptions
from swarmnet_client.model.local_layers import LocalLayers
from swarmnet_client.model.native_layers import NativeLocalLayers
from swarmnet_client.model.sampling import Draw, Sampling, choose
from swarmnet_protocols.arrays import as_tensor
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import DEFAULT_MODEL, LocalModel, resolve
from swarmnet_protocols.models.text.vocabulary import LightTokenizer
from tests.support.models.rounding import assert_near
from tests.support.swarm.mixed_targets import TARGETS, MixedTargets, load_mixed

PACKED = LoadOptions(packed=True)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    return resolve(DEFAULT_MODEL, cache_dir=tmp_path_factory.mktemp("cache"))


def test_native_layers_give_the_values_of_the_model(local: LocalModel) -> None:
    ours, theirs = open_layers(local, PACKED), LocalLayers(local, PACKED)
    assert isinstance(ours, NativeLocalLayers)
    ids = np.array([0, 5, 49151, 5])
    assert np.array_equal(ours.embed(ids), theirs.embed(ids))
    hidden = np.random.default_rng(0).standard_normal((3, local.manifest.hidden_size), np.float32)
    found, expected = ours.logits(hidden), theirs.logits(hidden)
    # An average of squares and a product: each output depends on twice as many terms as inputs.
    assert_near(as_tensor(found), as_tensor(expected), 2 * local.manifest.hidden_size)
    normed = as_tensor(ours.normed(hidden)), as_tensor(theirs.normed(hidden))
    assert_near(*normed, local.manifest.hidden_size)
    draws = [Draw(Sampling(), 0)] * 3
    assert choose(found, draws) == choose(expected, draws)
    with pytest.raises(ConfigError, match="no token 49152"):
        ours.embed(np.array([49152]))


@pytest.mark.parametrize("model", ["default", "float32"])
def test_a_head_has_the_same_bits_for_every_target_and_batch(
    model: str, local: LocalModel, tmp_path: Path
) -> None:
    mixed = MixedTargets(local) if model == "default" else load_mixed(tmp_path)
    width = mixed.local.manifest.hidden_size
    hidden = np.random.default_rng(0).standard_normal((17, width), np.float32)
    expected = None
    for layers in map(mixed.layers_for, TARGETS):
        batches = [np.split(hidden, ends) for ends in ([], [1, 2, 7, 16])]
        for batch in batches:
            found = np.concatenate([layers.logits(rows) for rows in batch])
            expected = found if expected is None else expected
            assert np.array_equal(found, expected)
        ids = np.arange(0, 97, 7)
        assert np.array_equal(layers.embed(ids), mixed.layers.embed(ids))


def test_a_light_tokenizer_gives_the_ids_of_transformers(local: LocalModel) -> None:
    theirs, ours = local.tokenizer(), local.vocabulary()
    again = local.vocabulary()
    assert isinstance(ours.tokenizer, LightTokenizer)
    assert ours.end_ids == again.end_ids == local.end_ids(theirs)
    assert ours.size == local.config.vocab_size
    for text in ("", "Hello, world!", "<|im_start|>user\nHi \N{GRINNING FACE}<|im_end|>", " a  b\n\n c"):
        for special in (False, True):
            ids = theirs.encode(text, add_special_tokens=special)
            assert again.tokenizer.encode(text, add_special_tokens=special) == ids
            assert again.tokenizer.decode(ids, skip_special_tokens=special) == theirs.decode(
                ids, skip_special_tokens=special
            )
    assert ours.tokenizer.get_chat_template() == theirs.get_chat_template()
    assert ours.tokenizer.special_tokens_map == theirs.special_tokens_map


def test_a_damaged_cache_of_a_vocabulary_is_made_again(local: LocalModel) -> None:
    known = local.vocabulary()
    [path] = Path(local.cache_dir, "vocabularies").iterdir()
    path.write_text("{")
    assert local.vocabulary().end_ids == known.end_ids
    assert path.stat().st_size > 1000
