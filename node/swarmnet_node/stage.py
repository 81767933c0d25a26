"""One machine's blocks of a model, and the one operation on them: a forward of a packed batch."""

from collections.abc import Sequence
from typing import Any

import torch
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import LocalModel

from swarmnet_node.attention import IMPLEMENTATION, GeometryProbe, PackedBatch, register
from swarmnet_node.kv import KVGeometry, LaneCache


class Stage:
    """Blocks [start, end) of a model, ready to run. Not thread-safe: one thread does all forwards."""

    def __init__(self, model: torch.nn.Module, hidden_size: int) -> None:
        """``model`` is a decoder stack as ``LocalModel.load_span`` gives it; it belongs to the stage from now on."""
        register()
        self._model: Any = model
        self._model.config._attn_implementation = IMPLEMENTATION
        weight = next(model.parameters())
        self.hidden_size = hidden_size
        self.dtype = weight.dtype
        self.device = weight.device
        self.blocks = len(self._model.layers)
        self.weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self._packs = _check_rope(self._model.config)
        self.geometry = self._measure_geometry()

    @classmethod
    def load(
        cls, model: LocalModel, start: int, end: int, *, dtype: torch.dtype, device: torch.device
    ) -> "Stage":
        """Load blocks [start, end); raises ``ConfigError`` for a family whose layers keep more than keys and values."""
        return cls(model.load_span(start, end, dtype=dtype, device=device), model.manifest.hidden_size)

    def new_lane(self) -> LaneCache:
        """An empty cache for one sequence; it allocates nothing yet."""
        return LaneCache(self.geometry)

    @torch.inference_mode()
    def forward(self, rows: Sequence[tuple[LaneCache, torch.Tensor]]) -> list[torch.Tensor]:
        """Run new positions of several lanes through the blocks in one forward.

        A row is a lane and its inputs [n, hidden size], n at least 1. Returns [n, hidden size] for each row, and every
        lane is n positions longer. When it raises, no lane has changed its length.
        """
        if len({id(lane) for lane, _ in rows}) < len(rows):
            raise ValueError("a lane occurs twice in one batch")
        for _, inputs in rows:
            if inputs.dim() != 2 or inputs.shape[0] < 1 or inputs.shape[1] != self.hidden_size:
                raise ValueError(f"inputs of shape {tuple(inputs.shape)}, expected [n, {self.hidden_size}]")
        if not rows:
            return []
        outputs = (
            self._forward(rows) if self._packs else [out for row in rows for out in self._forward([row])]
        )
        for lane, inputs in rows:
            lane.length += inputs.shape[0]
        return outputs

    def _forward(self, rows: Sequence[tuple[LaneCache, torch.Tensor]]) -> list[torch.Tensor]:
        counts = [inputs.shape[0] for _, inputs in rows]
        for (lane, _), count in zip(rows, counts, strict=True):
            lane.reserve(lane.length + count)
        packed = torch.cat([inputs.to(self.device, self.dtype) for _, inputs in rows])
        positions = torch.cat(
            [torch.arange(lane.length, lane.length + n) for (lane, _), n in zip(rows, counts, strict=True)]
        )
        batch = PackedBatch([lane for lane, _ in rows], counts)
        return list(self._run(packed, positions.to(self.device), batch).split(counts))

    def _run(
        self, inputs: torch.Tensor, positions: torch.Tensor, batch: PackedBatch | GeometryProbe
    ) -> torch.Tensor:
        outputs: torch.Tensor = self._model(
            inputs_embeds=inputs[None], position_ids=positions[None], use_cache=False, packed=batch
        ).last_hidden_state
        return outputs[0]

    @torch.inference_mode()
    def _measure_geometry(self) -> KVGeometry:
        probe = GeometryProbe()
        zeros = torch.zeros(1, self.hidden_size, dtype=self.dtype, device=self.device)
        self._run(zeros, torch.zeros(1, dtype=torch.long, device=self.device), probe)
        if [layer for layer, _ in probe.layers] != list(range(self.blocks)):
            raise ConfigError(
                f"{type(self._model).__name__} has layers that keep more than keys and values",
                hint="use a model in which every layer has ordinary attention",
            )
        return KVGeometry(tuple(shape for _, shape in probe.layers), self.dtype, self.device)


def _check_rope(config: Any) -> bool:
    """Whether lanes may share a forward; with long-context factors chosen by the longest of them they may not."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    types = {each.get("rope_type", "default") for each in (by_layer_type or [parameters])}
    if "dynamic" in types:
        raise ConfigError(
            "rotary embeddings that change with the longest sequence seen so far cannot be shared",
            hint="use a model with another rope_type than dynamic",
        )
    return "longrope" not in types
