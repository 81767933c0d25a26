"""The inner optimizer of a worker: AdamW, or Muon for hidden matrices and AdamW for the rest.

Muon: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". As the inner
optimizer of DiLoCo: MuLoCo, Thérien et al., arXiv 2505.23725. Its updates are scaled to the size of
AdamW's (Liu et al., arXiv 2502.16982, section 2.2), so both use the job's learning rate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from swarmnet_node.training.model.building import check_flat
from swarmnet_protocols.errors import ConfigError, IntegrityError, how_to_add
from swarmnet_protocols.training.job_settings import JobError, TrainingSection

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENTUM = ("momentum_buffer",)
_BLOCK = 256
"""Values with a common scale in the 8-bit states of bitsandbytes."""
_CHUNK = _BLOCK << 16
"""Most values that are updated at once with 8-bit states. On a CPU, bitsandbytes needs 16 more
bytes for each of them. With fewer, an update takes longer."""


@dataclass(frozen=True)
class _Piece:
    """A part of the vector of all parameters, as a parameter of one of torch's optimizers."""

    start: int
    parameter: nn.Parameter

    def of(self, vector: Tensor) -> Tensor:
        """Return the same part of another vector, ``[n]``."""
        return vector[self.start : self.start + self.parameter.numel()].view_as(self.parameter)


@dataclass(frozen=True)
class _Group:
    """One of torch's optimizers, its pieces, and the names of its states that are vectors."""

    optimizer: Any
    pieces: tuple[_Piece, ...]
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(piece.parameter.numel() for piece in self.pieces)


class InnerOptimizer:
    """An optimizer of a float32 vector, ``[n]``, which it changes in place."""

    def __init__(
        self,
        training: TrainingSection,
        vector: Tensor,
        matrices: Mapping[int, Sequence[int]],
        *,
        eight_bit: bool = False,
    ) -> None:
        """``matrices``: position in the vector and shape of each hidden matrix.

        With ``eight_bit``, AdamW's moments take a byte each. Raises the errors of
        ``check_packages``.
        """
        self._eight_bit = eight_bit
        is_muon = training.optimizer == "muon"
        hidden: list[_Piece] = []
        others: list[_Piece] = []
        longest = _CHUNK if eight_bit else len(vector)
        done = 0
        for start, shape in [*sorted(matrices.items() if is_muon else ()), (len(vector), (0,))]:
            cuts = [*range(done, start, longest), start]
            others += [_Piece(one, nn.Parameter(vector[one:other])) for one, other in pairwise(cuts)]
            done = start + math.prod(shape)
            if done > start:
                hidden.append(_Piece(start, nn.Parameter(vector[start:done].view(*shape))))
        options: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
        self._groups: list[_Group] = []
        if others:
            adamw, more = (_adamw_8bit(), {}) if eight_bit else (torch.optim.AdamW, {"fused": True})
            made = adamw([each.parameter for each in others], **options, betas=training.betas, **more)
            self._groups.append(_Group(made, tuple(others), _MOMENTS))
        if hidden:
            made = _muon()([each.parameter for each in hidden], **options, adjust_lr_fn="match_rms_adamw")
            self._groups.append(_Group(made, tuple(hidden), _MOMENTUM))

    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Run one step with ``gradient``, ``[n]``."""
        for group in self._groups:
            for piece in group.pieces:
                piece.parameter.grad = piece.of(gradient)
            group.optimizer.param_groups[0]["lr"] = learning_rate
            group.optimizer.step()
            for piece in group.pieces:
                piece.parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return the state, float32 on the CPU: the scalar ``step`` and vectors.

        It is empty before the first step. The vectors may be the optimizer's own memory, which the
        next ``step`` changes.
        """
        found = {}
        for group in self._groups:
            states = [group.optimizer.state.get(piece.parameter) for piece in group.pieces]
            if not all(states):
                return {}
            if "step" in states[0]:
                found["step"] = torch.as_tensor(states[0]["step"]).to("cpu", torch.float32, copy=True)
            for name in group.names:
                parts = [_values(state, name) for state in states]
                found[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state by a result of ``state``.

        Raises ``IntegrityError`` for other names or shapes, and for values that are not finite.
        """
        sizes = {name: group.size for group in self._groups for name in group.names}
        if state:
            if set(state) - {"step"} != set(sizes) or ("step" in state) != (_MOMENTS[0] in sizes):
                raise IntegrityError("this is not the state of the job's optimizer")
            if "step" in state and state["step"].shape != ():
                raise IntegrityError("the number of steps is not a number")
            for name, count in sizes.items():
                check_flat(state[name], count)
            if not all(bool(values.isfinite().all()) for values in state.values()):
                raise IntegrityError("the state of the optimizer holds values that are not finite")
        for group in self._groups:
            group.optimizer.state.clear()
            done = 0
            for index, piece in enumerate(group.pieces if state else ()):
                end = done + piece.parameter.numel()
                parts = {name: state[name][done:end].view_as(piece.parameter) for name in group.names}
                if self._eight_bit and group.names == _MOMENTS:
                    _load_8bit(group.optimizer, piece.parameter, index, int(state["step"]), parts)
                else:
                    parts |= {"step": state["step"]} if group.names == _MOMENTS else {}
                    group.optimizer.state[piece.parameter] = {
                        name: values.to(piece.parameter.device, torch.float32, copy=True)
                        for name, values in parts.items()
                    }
                done = end


def check_packages(training: TrainingSection, *, eight_bit: bool) -> None:
    """Raise ``JobError`` or ``ConfigError`` if a package is missing or too old."""
    if training.optimizer == "muon":
        _muon()
    if eight_bit:
        _adamw_8bit()


def _muon() -> Any:
    """Return the class of Muon. Raises ``JobError`` if torch is too old."""
    if not hasattr(torch.optim, "Muon"):
        raise JobError(
            "training",
            "optimizer",
            f"is 'muon', which needs torch 2.9 or newer, and this machine has {torch.__version__}",
            hint="pip install --upgrade torch",
        )
    return torch.optim.Muon


def _adamw_8bit() -> Any:
    """Return the class of AdamW with 8-bit moments. Raises ``ConfigError`` without bitsandbytes."""
    try:
        from bitsandbytes.optim.adamw import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            "8-bit optimizer states need bitsandbytes", hint=how_to_add("bitsandbytes")
        ) from error
    return AdamW8bit


def _values(state: Mapping[str, Any], name: str) -> Tensor:
    """Return a vector in the state of one piece, float32 on the CPU.

    bitsandbytes calls AdamW's moments ``state1`` and ``state2``. Each has codes, a table of their
    values, and a scale for each block.
    """
    if name in state:
        return torch.Tensor(state[name].detach().reshape(-1).to("cpu"))
    number = 1 + _MOMENTS.index(name)
    values: Tensor = state[f"state{number}"]
    if f"absmax{number}" in state:
        from bitsandbytes.functional import dequantize_blockwise

        scales, table = state[f"absmax{number}"], state[f"qmap{number}"]
        values = dequantize_blockwise(values, absmax=scales, code=table, blocksize=_BLOCK)
    return values.to("cpu")


def _load_8bit(
    optimizer: Any, parameter: nn.Parameter, index: int, step: int, moments: Mapping[str, Tensor]
) -> None:
    from bitsandbytes.functional import quantize_blockwise

    optimizer.init_state(optimizer.param_groups[0], parameter, 0, index)
    state = optimizer.state[parameter]
    state["step"] = step
    for number, name in enumerate(_MOMENTS, 1):
        values = moments[name].to(parameter.device)
        if f"absmax{number}" in state:
            values, quantized = quantize_blockwise(values, code=state[f"qmap{number}"], blocksize=_BLOCK)
            state[f"absmax{number}"].copy_(quantized.absmax)
        state[f"state{number}"].copy_(values)
