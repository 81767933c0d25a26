"""Keeps the routed experts used last in memory, and reads the others from disk in time.

For a host whose memory does not hold all its experts. One block of a forward:

1. **Predict.** The block before applies this block's router to its own hidden states. Between two
   blocks the residual stream changes little, so most choices are the same (pre-gating; Eliseev and
   Mazur, 2023, section 3.2). Another thread reads the predicted experts while that block computes.
2. **Read.** The forward waits for experts that it needs and that are still not in memory.
3. **Drop.** The experts used longest ago (LRU) leave memory first. At most ``capacity`` experts are
   in memory or being read. A block that needs more reads and computes them one after another.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from swarmnet_protocols.quantization.packed_experts import (
    Elsewhere,
    ExpertMatrices,
    ExpertsModule,
    Outputs,
    PackedExperts,
    chosen_experts,
    compute_elsewhere,
    compute_expert,
    drop_experts,
    has_expert,
)

_log = logging.getLogger(__name__)

ReadExperts = Callable[[Collection[int]], Mapping[str, ExpertMatrices]]
"""Reads some experts of one block, like the result of ``LocalModel.expert_reader``. Never runs on
the torch thread."""
Expert = tuple[int, int]
"""The number of a layer, and the number of an expert in this layer."""
MIN_CAPACITY = 2
"""Fewest experts in memory: one computes while the next one is read."""


@dataclass
class CacheCounters:
    """Experts since the start. An expert counts once for each block of each forward."""

    needed: int = 0
    in_memory: int = 0
    """Needed experts that were in memory when the block began."""
    predicted: int = 0
    """Needed experts that the block before predicted. Nothing predicts the first block of a
    forward."""
    predictable: int = 0
    """Needed experts in blocks that could be predicted."""

    @property
    def hit_rate(self) -> float:
        """Share of needed experts that no forward waited for."""
        return self.in_memory / max(1, self.needed)

    @property
    def prediction_rate(self) -> float:
        """Share of needed experts that were predicted."""
        return self.predicted / max(1, self.predictable)


class ExpertCache:
    """A stage's experts, at most ``capacity`` of them in memory. Call all methods on the torch
    thread."""

    def __init__(
        self,
        blocks: Mapping[int, tuple[nn.Module, ExpertsModule]],
        own: Mapping[int, Collection[int]],
        readers: Mapping[int, ReadExperts],
        capacity: int,
    ) -> None:
        """``capacity`` is at least ``MIN_CAPACITY``. By number of the layer:

        - ``blocks``: the module with router and experts, and its module of experts. None of ``own``
          is in memory yet.
        - ``own``: the experts that this cache reads from disk. Others are computed elsewhere.
        - ``readers``: the functions that read the experts of a layer.
        """
        self.counters = CacheCounters()
        self._blocks = blocks
        self._own = {layer: {*experts} for layer, experts in own.items()}
        self._readers = readers
        self._capacity = capacity
        self._used: OrderedDict[Expert, None] = OrderedDict()
        """The experts in memory, the last used at the end."""
        self._reading: dict[Expert, Future[Mapping[str, ExpertMatrices]]] = {}
        self._needed: set[Expert] = set()
        """The experts that the current block needs."""
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="read experts")
        self._hooks = ExitStack()
        self._predicted: dict[int, set[int]] = {}
        self._can_predict = True
        layers = sorted(blocks)
        self._next = dict(pairwise(layers))

    def install(self, elsewhere: Callable[[int], Elsewhere] | None = None) -> None:
        """Read missing experts from now on. ``elsewhere(layer)`` computes experts outside
        ``own``."""
        for layer, (parent, module) in self._blocks.items():
            compute_elsewhere(
                module, self._elsewhere(layer, elsewhere(layer) if elsewhere is not None else None)
            )
            hooked: Any = module
            for handle in (
                parent.register_forward_pre_hook(partial(self._predict, layer)),
                hooked.register_forward_pre_hook(partial(self._before_layer, layer)),
            ):
                self._hooks.callback(handle.remove)

    def close(self) -> None:
        """Stop reading."""
        self._hooks.close()
        for layer in self._blocks:
            compute_elsewhere(self._blocks[layer][1], None)
        # Do not wait here: a read that fetches from peers needs the event loop.
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _elsewhere(self, layer: int, otherwise: Elsewhere | None) -> Elsewhere:
        def start(hidden: torch.Tensor, rows: Mapping[int, torch.Tensor]) -> Callable[[], Outputs]:
            mine = deque(expert for expert in rows if expert in self._own[layer])
            others = {expert: each for expert, each in rows.items() if expert not in self._own[layer]}
            if others and otherwise is None:
                raise LookupError(f"expert {min(others)} is not on this machine")
            # compute experts in memory before ``wait``
            self._read_ahead(layer, mine, kept=self._needed)
            wait_for_others = otherwise(hidden, others) if others and otherwise is not None else dict

            def wait() -> Outputs:
                module, found = self._blocks[layer][1], {}
                while mine:
                    self._read_ahead(layer, mine)
                    expert = mine.popleft()
                    self._put(layer, expert)
                    found[expert] = compute_expert(module, expert, hidden[rows[expert]])
                return {**found, **wait_for_others()}

            return wait

        return start

    def _read_ahead(self, layer: int, experts: Iterable[int], kept: Collection[Expert] = ()) -> None:
        """Begin to read experts, in their order, while there is room without dropping ``kept``."""
        for expert in experts:
            if not self._read((layer, expert), kept):
                return

    def _read(self, key: Expert, kept: Collection[Expert] = ()) -> bool:
        """Begin to read an expert unless it is in memory or being read. Return False if there is no
        room."""
        if key in self._reading or key in self._used:
            return True
        while len(self._used) + len(self._reading) >= self._capacity:
            oldest = next((each for each in self._used if each not in kept), None)
            if oldest is None:
                return False
            self._drop(oldest)
        layer, expert = key
        self._reading[key] = self._threads.submit(self._readers[layer], [expert])
        return True

    def _put(self, layer: int, expert: int) -> None:
        """Wait until an expert is read, then put it into memory."""
        reading = self._reading.pop((layer, expert), None)
        if reading is not None:
            module = self._blocks[layer][1]
            for name, matrices in reading.result().items():
                weight: PackedExperts = getattr(module, name)
                weight.matrices.update(matrices)
            self._used[layer, expert] = None

    def _drop(self, key: Expert) -> None:
        del self._used[key]
        layer, expert = key
        drop_experts(self._blocks[layer][1], [expert])

    def _before_layer(self, layer: int, module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        """Note what a layer needs, just before it computes: ``inputs[1]`` has the numbers of the
        chosen experts."""
        if hasattr(module, "record_choice"):
            return  # a prediction
        for key in [key for key, reading in self._reading.items() if reading.done()]:
            if self._reading[key].exception() is None:
                self._put(*key)
            else:  # the forward does not fail: it reads the expert again if it needs it
                del self._reading[key]
        needed = {*inputs[1].flatten().tolist()} & self._own[layer]
        present = {expert for expert in needed if has_expert(module, expert)}
        for expert in present:
            self._used.move_to_end((layer, expert))
        self.counters.needed += len(needed)
        self.counters.in_memory += len(present)
        if (predicted := self._predicted.pop(layer, None)) is not None:
            self.counters.predictable += len(needed)
            self.counters.predicted += len(needed & predicted)
        self._needed = {(layer, expert) for expert in needed}

    def _predict(self, layer: int, _parent: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """Begin to read the experts that the next layer probably needs. ``inputs``: what this
        layer's router gets."""
        following = self._next.get(layer)
        if following is None or not self._can_predict or hasattr(self._blocks[layer][1], "record_choice"):
            return
        try:
            chosen = chosen_experts(*self._blocks[following], inputs[0])
        except TypeError as error:  # a family whose blocks take more inputs than hidden states
            self._can_predict = False
            _log.warning("experts are not predicted: %s", error)
            return
        self._predicted[following] = chosen
        for key in sorted((following, expert) for expert in chosen & self._own[following]):
            if key in self._used:
                self._used.move_to_end(key)
            # keep the other half for experts that this block needs now
            elif len(self._reading) < self._capacity // 2:
                self._read(key)
