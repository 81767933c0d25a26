"""The local layers of models of the Llama shape, in numpy and C: without torch and transformers."""

import numpy as np

from swarmnet_protocols.arrays import Array, as_float32
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from swarmnet_protocols.quantization.products import Products, load_products


def check_ids(ids: Array, count: int) -> None:
    """Raise ``ConfigError`` unless all ids are below ``count``.

    Some tokenizers have tokens, say for images, that the language model does not know.
    """
    if strays := [id for id in ids.ravel().tolist() if not 0 <= id < count]:
        raise ConfigError(
            f"the model has no token {strays[0]}: its tokens are 0 to {count - 1}",
            hint="use the model's own tokenizer, and leave out its tokens for images and sound",
        )


class NativeLocalLayers:
    """Embeddings, final norm and lm_head. The head multiplies with the C code of hosts, so logits
    have the same bits on every processor, alone and in any batch."""

    can_rewind = True

    def __init__(
        self,
        embed: PackedTensor,
        norm: Array,
        head: PackedTensor,
        epsilon: float,
        products: Products,
    ) -> None:
        self._embed, self._norm, self._head = embed, norm, head
        self._epsilon = np.float32(epsilon)
        self._products = products

    @classmethod
    def load(cls, local: LocalModel) -> "NativeLocalLayers | None":
        """Return the local layers of a model. None if it has another shape, or if this machine has
        no C code."""
        products, shape = load_products(local.cache_dir), local.llama_shape
        ends = local.load_ends() if shape is not None and products.is_native else None
        if shape is None or ends is None:
            return None
        return cls(ends["embed"], ends["norm"], ends["head"], shape.rms_norm_eps, products)

    def embed(self, ids: Array) -> Array:
        """Return embeddings [P, D] of token ids [P]. Raises ``ConfigError`` for an id that the
        model does not know."""
        check_ids(ids, self._embed.shape[0])
        return self._products.unpacked(self._embed, ids)

    def normed(self, hidden: Array) -> Array:
        """Return outputs [N, D] of the last block after the final norm."""
        states = as_float32(hidden)
        mean = np.square(states).mean(axis=1, keepdims=True)
        found: Array = self._norm * (states / np.sqrt(mean + self._epsilon))
        return found

    def logits(self, hidden: Array) -> Array:
        """Return logits [N, V], float32, of outputs [N, D] of the last block."""
        return self._products.multiply(self.normed(hidden), self._head)
