"""Where to compute and in what precision, from what a person typed."""

import torch

from swarmnet_protocols.errors import ConfigError

_MPS_DEFAULT_SHARE = 1.7
"""Of what Metal recommends: PyTorch's own, which lets the system swap."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """``auto`` is the fastest device there is. Raises ``ConfigError`` for one that is not there."""
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
    """Have this process allocate at most ``most`` of the memory of ``device``: a share up to 1, bytes above; None: all there is.

    What is allocated already stays. Whoever asks for more gets PyTorch's error. What the driver takes for itself, some hundred
    MB, is not counted. A CPU has no memory of its own: nothing is done.
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
    """``auto`` is bfloat16 on an accelerator and float32, exact and no slower, on a CPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"{name} is not a precision", hint=f"use one of {', '.join(DTYPES)}")
    return DTYPES[name]
