"""A model whose hosts have C code for different processors: all of them compute the same bits."""

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from swarmnet.paths import default_cache_dir
from swarmnet_client.batching.answers import Request
from swarmnet_client.model.head import Layers
from swarmnet_client.model.native_layers import NativeLocalLayers
from swarmnet_client.model.sampling import Draw, Token, choose
from swarmnet_node.engine.exact_stage import ExactStage
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import precision_of
from swarmnet_node.engine.torch_layers.torch_stage import TorchStage
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.machine import native_code
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.quantization.formats import PRECISIONS
from swarmnet_protocols.quantization.products import load_products
from tests.support.compiled import compiled_backend
from tests.support.models.tiny import save_tiny_llama
from tests.support.swarm.swarm_lab import Reference

TARGETS = [each.name for each in native_code.targets()]
PLAIN = TARGETS[-1]


class MixedTargets(Reference):
    """Hosts take the targets of this machine in turn, as ``ExactStage`` and as ``TorchStage``.

    Answers must have the bits of one host with plain C, which computes each sequence alone.
    """

    def __init__(self, local: LocalModel, precision: str = "float32") -> None:
        """``precision``: the format of the weights, ``float32`` or one of ``PRECISIONS``."""
        super().__init__(local)
        self._precision = precision
        self._loaded: dict[tuple[str, bool, int, int], Stage] = {}
        self._turns = itertools.cycle(itertools.product(TARGETS, (True, False)))

    def from_the_first_turn(self) -> "MixedTargets":
        """Return the same model for another swarm. It shares the stages that are loaded."""
        other = copy.copy(self)
        other._turns = itertools.cycle(itertools.product(TARGETS, (True, False)))
        return other

    def stage(self, start: int, end: int) -> Stage:
        return self._stage(*next(self._turns), start, end)

    @cached_property
    def layers(self) -> Layers:
        return self.layers_for(TARGETS[0])

    def layers_for(self, target: str) -> Layers:
        """Return the local layers of a client with this target."""
        shape, ends = self.local.llama_shape, self.local.load_ends()
        assert shape is not None
        assert ends is not None
        products = load_products(default_cache_dir(), target)
        return NativeLocalLayers(**ends, epsilon=shape.rms_norm_eps, products=products)

    def check(self, tokens: list[int], outputs: Array) -> None:
        [expected] = self._alone([tokens])
        assert np.array_equal(outputs, expected[-len(outputs) :])

    def answer(self, wanted: Request) -> list[Token]:
        """Return what one host and its client answer."""
        found: list[Token] = []
        chunks = itertools.chain([wanted.ids], ([found[-1].id] for _ in range(wanted.max_tokens - 1)))
        for position, outputs in enumerate(self._alone(chunks)):
            found += choose(self.layers.logits(outputs[-1:]), [Draw(wanted.sampling, position)])
        return found

    def _answer(self, ids: list[int], count: int) -> list[int]:
        return [token.id for token in self.answer(Request(tuple(ids), count))]

    def _alone(self, chunks: Iterable[Sequence[int]]) -> Iterator[Array]:
        """Yield the outputs of the last block for each chunk of one sequence."""
        whole = self._stage(PLAIN, True, 0, self.local.manifest.blocks)
        sequence = whole.new_sequence()
        for chunk in chunks:
            inputs = self.layers.embed(np.array(chunk))
            yield np.asarray(whole.forward([(sequence, inputs)])[0])

    def _stage(self, target: str, is_light: bool, start: int, end: int) -> Stage:
        key = target, is_light, start, end
        if key not in self._loaded:
            quantized = PRECISIONS.get(self._precision)
            precision = precision_of(self.local, quantized, torch.float32)
            backend, stage = compiled_backend(target), None
            if is_light:
                stage = ExactStage.loaded(self.local, start, end, backend, quantized, precision)
            self._loaded[key] = stage or TorchStage.loaded(
                self.local,
                start,
                end,
                dtype=torch.float32,
                devices=(torch.device("cpu"),) * (end - start),
                backend=backend,
                packed=quantized is not None,
                quantized=quantized,
                experts=None,
                precision=precision,
            )
            assert self._loaded[key].is_exact
        return self._loaded[key]


def load_mixed(folder: Path, precision: str = "float32") -> MixedTargets:
    """Save and load the tiny Llama."""
    return MixedTargets(
        resolve(str(save_tiny_llama(folder / "model")), cache_dir=folder / "cache"), precision
    )
