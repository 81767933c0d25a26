"""The user's choice of devices, precision and GPU memory limit, and the free memory of devices.

A node that computes on the CPU asks here before it imports torch: so the CPU and float32 have
stand-ins, which ``torch_device`` and ``torch_dtype`` replace.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError

if TYPE_CHECKING:
    import torch

MOST_SHARE = 0.95
"""Largest share of a device's memory to fill. When the memory is full, the driver ends other
programs."""

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class HostMemory:
    """The CPU, as ``torch.device("cpu")`` describes it."""

    type: str = "cpu"
    index: int | None = None

    def __str__(self) -> str:
        return self.type


CPU: Any = HostMemory()


def torch_device(device: Any) -> "torch.device":
    """Return a device as torch's type."""
    import torch

    return torch.device(str(device))


def torch_dtype(dtype: Any) -> "torch.dtype":
    """Return a dtype of numpy or torch, or an element type of the wire, as torch's type."""
    import torch

    found: torch.dtype = getattr(torch, str(dtype).removeprefix("torch."))
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch found no memory on a device."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def may_have_accelerator() -> bool:
    """Return whether this machine may have a GPU that torch computes on. Does not import torch."""
    drivers = ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
    return sys.platform != "linux" or any(map(glob, drivers)) or "torch" in sys.modules


def has_accelerator() -> bool:
    """Return whether torch can compute on a GPU of this machine. Allocates nothing there."""
    import torch

    return torch.cuda.is_available() or torch.backends.mps.is_available()


def pick_device(name: str) -> "torch.device":
    """Return the named device. ``auto`` picks CUDA, else MPS, else the CPU.

    Raises ``ConfigError`` if the device does not exist.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device  # adds the number to ``cuda``
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"this machine has no device {name}", hint="use --device auto or --device cpu"
        ) from error


@dataclass(frozen=True)
class Card:
    """The memory of one accelerator. ``name`` is for people."""

    device: "torch.device"
    name: str
    total_bytes: int
    free_bytes: int
    """Bytes that no program used when this was read."""


def cards_of(devices: "Sequence[torch.device]") -> list[Card]:
    """Return the memory of each accelerator among ``devices``. A CPU has no memory of its own."""
    return [_card(device) for device in devices if device.type in ("cuda", "mps")]


def _card(device: "torch.device") -> Card:
    import torch

    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return Card(device, "the GPU", total, max(0, total - torch.mps.driver_allocated_memory()))
    free, total = torch.cuda.mem_get_info(device)
    return Card(device, f"{device} ({torch.cuda.get_device_name(device)})", total, free)


def allowed_bytes(most: float | None, total_bytes: int) -> int:
    """Return a memory limit in bytes.

    ``most`` is the limit as the user gave it: a share if at most 1, else bytes. None means
    ``MOST_SHARE``.
    """
    return int(_share(most, total_bytes) * total_bytes)


def release_device_memory() -> None:
    """Return freed accelerator memory to the drivers.

    The driver's own memory for a computing process stays until the process ends.
    """
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def limit_memory(device: "torch.device", most: float | None) -> None:
    """Limit the memory that this process allocates on ``device``.

    ``most`` is a share if at most 1, else bytes. None means ``MOST_SHARE``. Existing allocations
    stay. Beyond the limit PyTorch raises its out-of-memory error. The limit does not count the
    driver's own memory, some hundred MB. Does nothing for a CPU.
    """
    if device.type == "cpu":
        return
    import torch

    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(_share(most, total), index)
    elif device.type == "mps":
        total = torch.mps.recommended_max_memory()
        torch.mps.set_per_process_memory_fraction(_share(most, total))


def _share(most: float | None, total_bytes: int) -> float:
    if most is None:
        return MOST_SHARE
    return most if most <= 1 else min(1.0, most / total_bytes)


def pick_devices(names: str) -> "list[torch.device]":
    """Return the devices with these names; ``CPU`` for the CPU.

    ``names`` is one name as for ``pick_device``, or several CUDA devices with commas between them.
    Raises ``ConfigError``.
    """
    if names == "cpu" or (names == "auto" and not may_have_accelerator()):
        return [CPU]
    found = [pick_device(name) for name in names.split(",")]
    if len(found) > 1 and (len(set(found)) < len(found) or any(each.type != "cuda" for each in found)):
        raise ConfigError(
            f"{names}: only different CUDA devices can be combined",
            hint="use --device cuda:0,cuda:1, for example",
        )
    return [CPU if each.type == "cpu" else each for each in found]


def pick_dtype(name: str, device: Any) -> Any:
    """Return the named precision: float32 of numpy, or a dtype of torch.

    ``auto`` picks bfloat16 on an accelerator. On a CPU it picks float32, which is exact and no
    slower.
    """
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    if name not in DTYPES:
        raise ConfigError(f"{name} is not a precision", hint=f"use one of {', '.join(DTYPES)}")
    if name != "float32":
        return torch_dtype(name)
    import numpy as np

    return np.dtype(np.float32)
