"""One stage of a job's model: some blocks, and in stage 0 both ends.

1. ``build_stage`` makes the modules of the stage alone, from the job's seed or from its checkpoint.
   No other tensor is drawn, read or fetched.
2. ``StageModel`` runs them. A microbatch starts with ``begin`` in stage 0, passes ``forward`` of
   each later stage, and ends in stage 0 with ``end``.

Its parameters have the names that they have in the whole model, so that checkpoints do not depend
on the cuts.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarmnet_node.training.model.config import checkpoint_of, model_config
from swarmnet_node.training.model.initial_weights import draw_weights, materialize, undrawn
from swarmnet_node.training.model.subspace import Subspace, enter_subspace
from swarmnet_protocols.models import LocalModel, Progress
from swarmnet_protocols.models.partial_model import (
    EMBEDDING_SCALE,
    build_local_layers,
    build_span,
    build_whole,
)
from swarmnet_protocols.training.job_settings import Job, JobError

_CPU = torch.device("cpu")


class StageModel(nn.Module):
    """The blocks of a stage, and its ends if it is stage 0."""

    def __init__(self, whole: Any, start: int, span: Any, ends: Any) -> None:
        """``whole``: the whole model on the meta device. ``start``: the first block of ``span``.

        ``span`` and ``ends`` are transformers models, or None: the decoder stack of the blocks, and
        the CausalLM without blocks.
        """
        super().__init__()
        self.span = span
        self.ends = ends
        self._whole = [whole]  # in a list, because its parameters are not the stage's
        self.config = whole.config
        self.subspace: Subspace | None = None
        """The subspace of its boundaries; None if they carry the residual stream."""
        path = next(name for name, each in whole.named_modules() if each is whole.base_model.layers)
        self._layers, self._start = path, start
        self._scale = 1.0
        if ends is not None:  # the stack multiplies its inputs, embeddings or not: here `begin` does
            self._scale = float(getattr(ends.base_model, EMBEDDING_SCALE, 1))
            if hasattr(ends.base_model, EMBEDDING_SCALE):
                setattr(ends.base_model, EMBEDDING_SCALE, 1)

    @property
    def block_range(self) -> tuple[int, int]:
        """The blocks [start, end) of the stage."""
        return self._start, self._start + (0 if self.span is None else len(self.span.layers))

    @property
    def whole(self) -> Any:
        """The whole model on the meta device."""
        return self._whole[0]

    @property
    def parts(self) -> list[Any]:
        """The transformers models of the stage."""
        return [each for each in (self.ends, self.span) if each is not None]

    def begin(self, ids: Tensor) -> Tensor:
        """Return the outputs ``[k, L, D]`` of stage 0 for token ids ``[k, L]``."""
        hidden: Tensor = self.ends.get_input_embeddings()(ids) * self._scale
        return self._sent(self._blocks(hidden), ids)

    def forward(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the outputs of the stage's blocks, ``[k, L, D]`` like their inputs.

        In a subspace, D is its dimension, and the boundary needs the token ids ``[k, L]``.
        """
        return self._sent(self._blocks(self._received(hidden, ids)), ids)

    def end(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the logits ``[k, L, V]`` for the outputs of the last stage."""
        logits: Tensor = self.ends(inputs_embeds=self._received(hidden, ids), use_cache=False).logits
        return logits

    def _blocks(self, hidden: Tensor) -> Tensor:
        if self.span is None:
            return hidden
        outputs: Tensor = self.span(inputs_embeds=hidden, use_cache=False).last_hidden_state
        return outputs

    def _received(self, sent: Tensor, ids: Tensor | None) -> Tensor:
        return sent if self.subspace is None else self.subspace.restore(sent, _needed(ids))

    def _sent(self, hidden: Tensor, ids: Tensor | None) -> Tensor:
        return hidden if self.subspace is None else self.subspace.project(hidden, _needed(ids))

    def modules_in_whole(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules with their names in the whole model."""
        for part in self.parts:
            for name, module in part.named_modules():
                yield self._in_whole(name, is_span=part is self.span), module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters with their names in the whole model."""
        for part in self.parts:
            for name, parameter in part.named_parameters("", recurse, remove_duplicate):
                yield prefix + self._in_whole(name, is_span=part is self.span), parameter

    def get_input_embeddings(self) -> nn.Module | None:
        return None if self.ends is None else self.ends.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        return None if self.ends is None else self.ends.get_output_embeddings()

    def _in_whole(self, name: str, *, is_span: bool) -> str:
        """Return the whole model's name for the name of a module or a parameter in a part."""
        if not is_span:
            return name
        stack, _, _ = self._layers.rpartition(".")
        first, _, rest = name.partition(".")
        if first != "layers" or not rest:
            return f"{stack}.{name}"
        number, _, rest = rest.partition(".")
        return ".".join([self._layers, str(int(number) + self._start), *([rest] if rest else [])])


def _needed(ids: Tensor | None) -> Tensor:
    if ids is None:
        raise ValueError("boundaries in a subspace need the token ids")
    return ids


def build_stage(
    job: Job,
    stage: int,
    cache_dir: Path,
    progress: Progress = lambda *_: None,
    *,
    local: LocalModel | None = None,
) -> StageModel:
    """Return a stage of the job's model, in float32 on the CPU.

    ``checks.with_cuts`` has checked that the model can be cut. ``local``: the checkpoint, if it is
    open. Raises ``JobError`` for a family that draws weights in a way of its own.
    """
    section, seed = job.model, job.job.seed
    if section.is_checkpoint:
        progress(f"loading stage {stage} of {section.checkpoint}", 0, None)
        model = _loaded(job, stage, local or checkpoint_of(section, cache_dir, progress))
    else:
        model = empty_stage(job, stage, cache_dir)
        for part in model.parts:
            materialize(part)
            part.tie_weights()
        draw_weights(model.whole, model.modules_in_whole(), seed)
        if undrawn(model):
            raise JobError(
                "model",
                "config",
                f"cannot be cut: {type(model.whole).__name__} sets some initial weights in a way of its own",
                hint='start from a "checkpoint", or remove [stages]',
            )
        if job.stages is not None and job.stages.subspace is not None:
            named = model.modules_in_whole()
            model.subspace = enter_subspace(model.whole, named, rank=job.stages.subspace, seed=seed)
    model.train().requires_grad_(True)
    return model


def empty_stage(job: Job, stage: int, cache_dir: Path) -> StageModel:
    """Return a stage of the job's model on the meta device: shapes without values."""
    config = model_config(job.model, cache_dir)
    start, end = _span(job, stage, config)
    stack = build_span(config, start, end).empty() if end > start else None
    ends = build_local_layers(config, lambda _: None).empty() if stage == 0 else None
    model = StageModel(build_whole(config).empty(), start, stack, ends)
    model.requires_grad_(True)
    return model


def _loaded(job: Job, stage: int, local: LocalModel) -> StageModel:
    start, end = _span(job, stage, local.config)
    form: dict[str, Any] = {"dtype": torch.float32, "device": _CPU}
    stack = local.load_span(start, end, **form) if end > start else None
    ends = None
    if stage == 0:
        ends = local.load_local_layers(lambda _: nn.ModuleList(), is_trained=True, **form)
    return StageModel(build_whole(local.config).empty(), start, stack, ends)


def _span(job: Job, stage: int, config: Any) -> tuple[int, int]:
    blocks = config.num_hidden_layers
    return (0, blocks) if job.stages is None else job.stages.spans(blocks)[stage]
