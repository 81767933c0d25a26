"""The backend that computes with torch: every operation, on every device, with gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from swarmnet_node.engine.kernels.backend import (
    Angles,
    AttentionRule,
    DecoderLayer,
    DecodeStep,
    Linear,
    LoraUpdate,
    Norm,
    Ranges,
    Recorder,
    Recording,
)
from swarmnet_node.engine.kernels.ranged_attention import (
    attention_with_scores,
    fused_attention,
    is_fused,
    padded_attention,
)
from swarmnet_protocols.quantization import packed_linear
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from swarmnet_protocols.quantization.products import Products


class TorchBackend:
    """``Backend`` in torch.

    With gradients, RMSNorm, rotary embedding and SwiGLU have handwritten backward passes.
    Autograd's own keep more tensors, and read the activations about twice as often.
    """

    is_exact = False

    def __init__(self, products: Products | None = None) -> None:
        """``products`` multiplies with packed weights. None computes these with torch alone."""
        self._products = products or Products(None)

    def linear(self, inputs: torch.Tensor, linear: Linear) -> torch.Tensor:
        if isinstance(linear.weight, PackedTensor):
            return packed_linear.linear(self._products, inputs, linear.weight, linear.bias)
        return functional.linear(inputs, linear.weight, linear.bias)

    def rms_norm(self, states: torch.Tensor, norm: Norm) -> torch.Tensor:
        if not states.requires_grad:
            return functional.rms_norm(states, norm.weight.shape, norm.weight, norm.eps)
        return _apply(_RmsNorm, states, norm.weight, norm.eps)

    def rope(self, states: torch.Tensor, angles: Angles) -> torch.Tensor:
        return _apply(_Rope, states, *angles) if states.requires_grad else _rotate(states, *angles)

    def attention(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rule: AttentionRule,
        visible: torch.Tensor | None = None,
    ) -> torch.Tensor:
        count, total = query.shape[2], keys.shape[2]
        needs_scores = rule.softcap is not None or rule.sinks is not None
        if visible is None and count > 1 and (needs_scores or count < total):
            positions = torch.arange(total, device=query.device)
            visible = causal_mask(positions[-count:], positions, None)
        if needs_scores:
            return attention_with_scores(query, keys, values, rule, visible)
        if count == 1 and visible is None:
            return _attention_of_one(query, keys, values, rule.scaling)
        return functional.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=visible,
            is_causal=visible is None,
            scale=rule.scaling,
            enable_gqa=True,
        )

    def is_fused(self, query: torch.Tensor, values: torch.Tensor, rule: AttentionRule) -> bool:
        return is_fused(query, values, rule)

    def ranged_attention(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        ranges: Ranges,
        rule: AttentionRule,
    ) -> torch.Tensor:
        if is_fused(query, values, rule):
            return fused_attention(query, keys, values, ranges, rule)
        return padded_attention(query, keys, values, ranges, rule)

    def recorder(self, device: torch.device) -> Recorder | None:
        return CudaRecorder(device) if device.type == "cuda" else None

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return _apply(_SwiGlu, gate_up) if gate_up.requires_grad else _swiglu(gate_up)

    def add_lora(self, inputs: torch.Tensor, outputs: torch.Tensor, update: LoraUpdate) -> None:
        low = functional.linear(inputs, update.down)
        for columns, ranks, up in update.ups:
            outputs[:, columns].addmm_(low[:, ranks], up.T)

    def decode_step(self, layers: Sequence[DecoderLayer]) -> DecodeStep | None:
        return None


def causal_mask(queries: torch.Tensor, keys: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    """Return the mask [T, S] of queries at positions [T] over keys at positions [S].

    It is true where a query sees a key.
    """
    mask = keys[None, :] <= queries[:, None]
    if sliding_window is not None:
        mask &= keys[None, :] > queries[:, None] - sliding_window
    return mask


def _attention_of_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attend with one query to all keys.

    Query heads that share a key head are treated as several queries of one head, so that no key is
    copied.
    """
    rows, heads = query.shape[:2]
    grouped = query.reshape(rows, keys.shape[1], -1, query.shape[3])
    outputs = functional.scaled_dot_product_attention(grouped, keys, values, scale=scaling)
    return outputs.reshape(rows, heads, 1, -1)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    outputs: torch.Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return outputs


def _rotate(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, -1)
    first_sines, second_sines = sines.chunk(2, -1)
    outputs = states * cosines
    first_outputs, second_outputs = outputs.chunk(2, -1)
    first_outputs.addcmul_(second, first_sines)
    second_outputs.addcmul_(first, second_sines)
    return outputs


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        precise = torch.promote_types(states.dtype, torch.float32)
        scale = states.to(precise).square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(states, scale, weight)
        return (states * scale).mul_(weight).to(states.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        states, scale, weight = ctx.saved_tensors
        precise = states.to(scale.dtype)
        weighted: torch.Tensor = gradients.to(scale.dtype) * weight
        along = torch.linalg.vecdot(weighted, precise)[..., None] * scale**3 / states.shape[-1]
        return weighted.mul_(scale).addcmul_(precise, along, value=-1).to(states.dtype), None, None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosines, sines)
        return _rotate(states, cosines, sines)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # The transpose of a rotation negates the sines. One half is negated already, so the halves
        # exchange their sines.
        cosines, sines = ctx.saved_tensors
        first, second = sines.chunk(2, -1)
        return _rotate(gradients, cosines, torch.cat((second, first), -1)), None, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return _swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        outputs = torch.empty_like(gate_up)
        to_gate, to_up = outputs.chunk(2, -1)
        torch.mul(functional.silu(gate), gradients, out=to_up)
        torch.ops.aten.silu_backward.grad_input(gradients * up, gate, grad_input=to_gate)
        return outputs


class CudaRecorder:
    """CUDA graphs on one device.

    A computation is recorded once. A replay takes one launch instead of one for each operation. All
    recordings share one pool of memory, so only one is replayed at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], torch.Tensor]) -> Recording:
        """Record ``compute``, which has run before and reads and writes memory at fixed addresses.

        Raises ``RuntimeError`` if it contains an operation that cannot be recorded, such as reading
        a value back.
        """
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            outputs = compute()
        return Recording(outputs, graph.replay)
