"""The device, precision and GPU memory limit that the user chose."""

import torch

from swarmnet_protocols.errors import ConfigError

_MPS_DEFAULT_SHARE = 1.7
"""PyTorch's default limit as a share of Metal's recommendation. It lets the system swap."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """The device of that name; ``auto``: CUDA, else MPS, else the CPU. Raises ``ConfigError`` if it does not exist."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"this machine has no device {name}", hint="use --device auto or --device cpu"
        ) from error
    return device


def limit_memory(device: torch.device, most: float | None) -> None:
    """Limit the memory that this process allocates on ``device`` to ``most``: a share if at most 1, else bytes; None: no limit.

    Existing allocations stay. Beyond the limit PyTorch raises its out-of-memory error. The driver's own memory, some hundred MB, is not
    counted. Does nothing for a CPU.
    """
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if most is None else _share(most, total), index)
    elif device.type == "mps":
        total = torch.mps.recommended_max_memory()
        torch.mps.set_per_process_memory_fraction(_MPS_DEFAULT_SHARE if most is None else _share(most, total))


def _share(most: float, total_bytes: int) -> float:
    return most if most <= 1 else min(1.0, most / total_bytes)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision of that name; ``auto``: bfloat16 on an accelerator; float32, which is exact and no slower, on a CPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"{name} is not a precision", hint=f"use one of {', '.join(DTYPES)}")
    return DTYPES[name]
