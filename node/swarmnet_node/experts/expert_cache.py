"""The routed experts of a host whose memory does not hold all of them: those used last are in memory, the others are read from disk in time.

An expert that a forward needs and that is not in memory is read while the forward waits. So that it waits less often, the experts of the next block are
predicted from the hidden states of this one: the next block's own router is applied to them, a block too early. Between two blocks the residual stream changes
little, so that most of its choices are those that it makes a block later (pre-gating; Eliseev and Mazur, 2023, section 3.2). What is predicted is read by another
thread while this block computes.

Experts leave memory in the order of their last use (LRU) before others are read, so that those in memory and those that are being read are never more than
``capacity``. A block may need more than that: its missing experts are read and computed one after another.
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
"""Reads some experts of one block, as ``LocalModel.expert_reader`` returns it; on another thread than the torch thread."""
Expert = tuple[int, int]
"""The number of a layer, and of an expert in it."""
MIN_CAPACITY = 2
"""Fewest experts in memory: one is computed while the next one is read."""


@dataclass
class CacheCounters:
    """Experts since the start, each counted once for a block of a forward."""

    needed: int = 0
    in_memory: int = 0
    """Of those needed, the ones that were in memory when the block began."""
    predicted: int = 0
    """Of those needed, the ones that were predicted a block before. The first block of a forward is not predicted."""
    predictable: int = 0
    """Needed in blocks that are predicted."""

    @property
    def hit_rate(self) -> float:
        """Share of needed experts that no forward waited for."""
        return self.in_memory / max(1, self.needed)

    @property
    def prediction_rate(self) -> float:
        """Share of needed experts that were predicted."""
        return self.predicted / max(1, self.predictable)


class ExpertCache:
    """At most ``capacity`` experts of a stage in memory. All methods are for the torch thread."""

    def __init__(
        self,
        blocks: Mapping[int, tuple[nn.Module, ExpertsModule]],
        own: Mapping[int, Collection[int]],
        readers: Mapping[int, ReadExperts],
        capacity: int,
    ) -> None:
        """``blocks``: by the number of the layer, the module with router and experts, and the module of experts, which has none of ``own`` in memory.

        ``own``: the experts that are read from disk; others are computed elsewhere. ``capacity`` is at least ``MIN_CAPACITY``.
        """
        self.counters = CacheCounters()
        self._blocks = blocks
        self._own = {layer: {*experts} for layer, experts in own.items()}
        self._readers = readers
        self._capacity = capacity
        self._used: OrderedDict[Expert, None] = OrderedDict()
        """The experts in memory, those used last at the end."""
        self._reading: dict[Expert, Future[Mapping[str, ExpertMatrices]]] = {}
        self._needed: set[Expert] = set()
        """The experts that the present block needs."""
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="read experts")
        self._hooks = ExitStack()
        self._predicted: dict[int, set[int]] = {}
        self._can_predict = True
        layers = sorted(blocks)
        self._next = dict(pairwise(layers))

    def install(self, elsewhere: Callable[[int], Elsewhere] | None = None) -> None:
        """Read missing experts from now on. ``elsewhere``: computes those of a layer that are not its own."""
        for layer, (parent, module) in self._blocks.items():
            compute_elsewhere(
                module, self._elsewhere(layer, elsewhere(layer) if elsewhere is not None else None)
            )
            hooked: Any = module
            for handle in (
                parent.register_forward_pre_hook(partial(self._predict, layer)),
                hooked.register_forward_pre_hook(partial(self._note, layer)),
            ):
                self._hooks.callback(handle.remove)

    def close(self) -> None:
        """Read no more."""
        self._hooks.close()
        for layer in self._blocks:
            compute_elsewhere(self._blocks[layer][1], None)
        # It does not wait: a reading that fetches from peers needs the event loop.
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _elsewhere(self, layer: int, otherwise: Elsewhere | None) -> Elsewhere:
        def start(hidden: torch.Tensor, rows: Mapping[int, torch.Tensor]) -> Callable[[], Outputs]:
            mine = deque(expert for expert in rows if expert in self._own[layer])
            others = {expert: each for expert, each in rows.items() if expert not in self._own[layer]}
            if others and otherwise is None:
                raise LookupError(f"expert {min(others)} is not on this machine")
            self._read_ahead(layer, mine, kept=self._needed)  # those in memory are computed before ``wait``
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
        """Begin to read experts, in their order, for as many as there is room if those in ``kept`` stay."""
        for expert in experts:
            if not self._read((layer, expert), kept):
                return

    def _read(self, key: Expert, kept: Collection[Expert] = ()) -> bool:
        """Begin to read an expert, unless it is in memory or being read. False if there is no room."""
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
        """Wait until an expert is read, and put it into memory."""
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

    def _note(self, layer: int, module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        """The experts of a layer are about to be computed: its inputs, their numbers and weights."""
        if hasattr(module, "record_choice"):
            return  # a prediction
        for key in [key for key, reading in self._reading.items() if reading.done()]:
            if self._reading[key].exception() is None:
                self._put(*key)
            else:  # a prediction fails no forward: the expert is read again if it is needed
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
        """Begin to read the experts that the next layer will probably need. ``inputs`` are those of this layer's router."""
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
            elif len(self._reading) < self._capacity // 2:  # the others are for experts that are needed now
                self._read(key)
