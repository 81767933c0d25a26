"""Where to compute and in what precision, from what a person typed."""

import torch

from swarmnet_protocols.errors import ConfigError

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


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on an accelerator and float32, exact and no slower, on a CPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"{name} is not a precision", hint=f"use one of {', '.join(DTYPES)}")
    return DTYPES[name]
