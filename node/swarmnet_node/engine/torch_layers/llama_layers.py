"""Decoder layers of the Llama shape, computed with a backend instead of transformers' modules.

Query, key and value projections are one product, gate and up projections another. Nothing but this
shape's operations is computed. In a forward of one token, reading the weights evicts code and small
tensors from the processor's caches. So every operation between two products is slow, and fewer
operations are faster (``tests/bench/decode.py``).
"""

from collections.abc import Callable, Sequence

import torch

from swarmnet_node.engine.kernels.backend import Angles, Backend, DecoderLayer, Norm
from swarmnet_node.engine.torch_layers.adapters import BatchLora
from swarmnet_node.engine.torch_layers.attention import Batch

Rotary = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""The rotary embedding of transformers. Takes a tensor of the wanted dtype and device, and
positions [1, T]. Returns cosines and sines [1, T, d]."""


class LlamaLayers:
    """A decoder stack of the Llama shape: llama, qwen2, qwen3, mistral and others."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        rotary: Rotary,
        backend: Backend,
        devices: Sequence[torch.device],
    ) -> None:
        """``decoder_layers.is_llama`` must hold for the layers. ``devices`` has the device of each
        layer."""
        self.layers = layers
        self._rotary = rotary
        self._backend = backend
        self._devices = devices

    def part(self, start: int, end: int) -> "LlamaLayers":
        """Return layers [start, end) of these, on the same weights."""
        return LlamaLayers(self.layers[start:end], self._rotary, self._backend, self._devices[start:end])

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the weights that are not packed."""
        weights = (weight for layer in self.layers for weight in layer.weights)
        return tuple(weight for weight in weights if isinstance(weight, torch.Tensor))

    def __call__(
        self, inputs: torch.Tensor, positions: torch.Tensor, batch: Batch, lora: BatchLora | None
    ) -> torch.Tensor:
        """Compute the outputs [T, D] of the last layer for new positions [T] with ``inputs``
        [T, D]."""
        cosines, sines = self._rotary(inputs[None], positions[None])
        first, second = sines.chunk(2, -1)
        angles = cosines[None], torch.cat((-first, second), -1)[None]
        device = inputs.device
        for layer, own_device in zip(self.layers, self._devices, strict=True):
            if own_device != device:
                device = own_device
                inputs = inputs.to(device)
                angles = angles[0].to(device), angles[1].to(device)
            # Attention and MLP are separate functions, so that each frees its temporary tensors
            # when it returns.
            inputs = inputs + self._attention(layer, inputs, angles, batch, lora)
            inputs = inputs + self._mlp(layer, inputs, lora)
        return inputs

    def _attention(
        self, layer: DecoderLayer, hidden: torch.Tensor, angles: Angles, batch: Batch, lora: BatchLora | None
    ) -> torch.Tensor:
        backend, heads, key_heads = self._backend, layer.shape.heads, layer.key_heads
        states = self._product(layer, "qkv", self._normed(hidden, layer.attention_norm), lora)
        states = states.view(1, len(hidden), heads + 2 * key_heads, layer.shape.head_size).transpose(1, 2)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key, value = torch.split(states, [heads, key_heads, key_heads], 1)
            query = backend.rope(self._normed(query, layer.query_norm), angles)
            key = backend.rope(self._normed(key, layer.key_norm), angles)
        else:
            rotating, value = torch.split(states, [heads + key_heads, key_heads], 1)
            query, key = torch.split(backend.rope(rotating, angles), [heads, key_heads], 1)
        attended = batch.attend(layer.index, query, key, value, layer.rule).reshape(len(hidden), -1)
        return self._product(layer, "output", attended, lora)

    def _mlp(self, layer: DecoderLayer, hidden: torch.Tensor, lora: BatchLora | None) -> torch.Tensor:
        gate_up = self._product(layer, "gate_up", self._normed(hidden, layer.mlp_norm), lora)
        return self._product(layer, "down", self._backend.swiglu(gate_up), lora)

    def _normed(self, states: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        return states if norm is None else self._backend.rms_norm(states, norm)

    def _product(
        self, layer: DecoderLayer, name: str, inputs: torch.Tensor, lora: BatchLora | None
    ) -> torch.Tensor:
        """Compute one of ``PRODUCTS`` with the batch's LoRA updates: [T, inputs] to [T,
        outputs]."""
        outputs = self._backend.linear(inputs, getattr(layer, name))
        if lora is not None:
            lora.add(layer.index, name, inputs, outputs)
        return outputs
