"""The options with which a client loads a model's embeddings and head, and opens its chains."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet_client.chain.hops import ChainSpec
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.session.arrays import ElementType

if TYPE_CHECKING:
    import torch

    from swarmnet_client.chain.trace import KeepStep

_DTYPES = {each.name.lower(): each for each in ElementType if each is not ElementType.INT8}
_WIRES = {"auto": None, **{name: ElementType[name.upper()] for name in ("float32", "bfloat16", "int8")}}
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
"""Files of the drivers of accelerators. Without any, torch is not asked for a device."""


@dataclass(frozen=True)
class LoadOptions:
    """Options for loading a checkpoint.

    - ``dtype``, ``device``: of the embeddings and the head.
    - ``labels``: number of classes of a classifier; None for the CausalLM.
    - ``standby``, ``wire``, ``wait_s``, ``trace``: as in ``ChainSpec``.
    - ``draft``: name of a small model that drafts tokens; empty for none.
    - ``packed``: whether quantised embeddings and lm_head stay as the checkpoint stores them.
      Packed weights cannot be trained or adapted.
    """

    dtype: ElementType = ElementType.FLOAT32
    device: str = "cpu"
    labels: int | None = None
    packed: bool = False
    standby: bool | None = None
    wire: ElementType | None = None
    draft: str = ""
    wait_s: float = 0.0
    trace: "KeepStep | None" = None

    @classmethod
    def picked(
        cls,
        dtype: str = "auto",
        device: str = "auto",
        labels: int | None = None,
        *,
        only_generates: bool = False,
        wire: str = "auto",
        **others: Any,
    ) -> "LoadOptions":
        """Return the options that these command-line options mean. ``only_generates``: nothing is
        trained. ``others`` become fields unchanged. Raises ``ConfigError`` for an unknown device or
        precision."""
        if wire not in _WIRES:
            raise ConfigError(f"{wire!r} is not a wire format", hint=f"use one of {', '.join(_WIRES)}")
        place = _picked_device(device)
        packed = only_generates and dtype == "auto" and place == "cpu"
        return cls(_picked_dtype(dtype, place), place, labels, packed, wire=_WIRES[wire], **others)

    def chain_spec(self, local: LocalModel) -> ChainSpec:
        """Return what chains of ``local`` have in common."""
        return ChainSpec(
            local.manifest.blocks,
            local.manifest.hidden_size,
            local.max_positions,
            self.dtype,
            self.wire,
            standby=self.standby,
            wait_s=self.wait_s,
            trace=self.trace,
        )

    @property
    def torch_dtype(self) -> "torch.dtype":
        from swarmnet_protocols.machine.devices import torch_dtype

        return torch_dtype(self.dtype)

    @property
    def torch_device(self) -> "torch.device":
        import torch

        return torch.device(self.device)


def _picked_device(name: str) -> str:
    """Return the name of the device that ``name`` means. Imports torch only if there may be an
    accelerator."""
    if name == "auto" and sys.platform != "darwin" and not any(Path(each).exists() for each in _DRIVERS):
        return "cpu"
    if name == "cpu":
        return name
    from swarmnet_protocols.machine.devices import pick_device

    return str(pick_device(name))


def _picked_dtype(name: str, device: str) -> ElementType:
    """Return the named precision. ``auto`` picks float32 on a CPU, which is exact and no slower,
    and bfloat16 elsewhere."""
    if name == "auto":
        return ElementType.FLOAT32 if device == "cpu" else ElementType.BFLOAT16
    if name not in _DTYPES:
        raise ConfigError(f"{name} is not a precision", hint=f"use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def memory_notice(local: LocalModel, options: LoadOptions) -> str:
    """Return a sentence on local layers that should stay packed but cannot, and their memory. Empty
    if all stay packed."""
    sizes = local.sizes("local_layers")
    return sizes.notice("the embeddings and the head", options.dtype) if options.packed else ""
