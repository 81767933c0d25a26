"""The user's choice of devices, precision and GPU memory limit, and the free memory of devices."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarmnet_protocols.errors import ConfigError

MOST_SHARE = 0.95
"""Largest share of a device's memory to fill. When the memory is full, the driver ends other
programs."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def has_accelerator() -> bool:
    """Return whether torch can compute on a GPU of this machine. Allocates nothing there."""
    return torch.cuda.is_available() or torch.backends.mps.is_available()


def pick_device(name: str) -> torch.device:
    """Return the named device. ``auto`` picks CUDA, else MPS, else the CPU.

    Raises ``ConfigError`` if the device does not exist.
    """
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

    device: torch.device
    name: str
    total_bytes: int
    free_bytes: int
    """Bytes that no program used when this was read."""


def cards_of(devices: Sequence[torch.device]) -> list[Card]:
    """Return the memory of each accelerator among ``devices``. A CPU has no memory of its own."""
    return [_card(device) for device in devices if device.type in ("cuda", "mps")]


def _card(device: torch.device) -> Card:
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
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def limit_memory(device: torch.device, most: float | None) -> None:
    """Limit the memory that this process allocates on ``device``.

    ``most`` is a share if at most 1, else bytes. None means ``MOST_SHARE``. Existing allocations
    stay. Beyond the limit PyTorch raises its out-of-memory error. The limit does not count the
    driver's own memory, some hundred MB. Does nothing for a CPU.
    """
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


def pick_devices(names: str) -> list[torch.device]:
    """Return the devices with these names.

    ``names`` is one name as for ``pick_device``, or several CUDA devices with commas between them.
    Raises ``ConfigError``.
    """
    found = [pick_device(name) for name in names.split(",")]
    if len(found) > 1 and (len(set(found)) < len(found) or any(each.type != "cuda" for each in found)):
        raise ConfigError(
            f"{names}: only different CUDA devices can be combined",
            hint="use --device cuda:0,cuda:1, for example",
        )
    return found


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the named precision.

    ``auto`` picks bfloat16 on an accelerator. On a CPU it picks float32, which is exact and no
    slower.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"{name} is not a precision", hint=f"use one of {', '.join(DTYPES)}")
    return DTYPES[name]
