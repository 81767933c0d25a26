"""The arguments that several commands share, and how their text is read."""

import math
import re
from pathlib import Path
from typing import Annotated

import typer

SwarmPath = Annotated[
    Path, typer.Argument(metavar="SWARM", help="The swarm.toml of the swarm.", show_default=False)
]
SwarmOption = Annotated[
    Path, typer.Option("--swarm", metavar="SWARM", help="The swarm.toml of the swarm.", show_default=False)
]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="M", help="A known name, a directory, a .gguf file, or org/name[@revision]."
    ),
]
BootstrapOption = Annotated[
    list[str],
    typer.Option(
        "--bootstrap",
        metavar="ADDR",
        help="A peer to start from, added to those of the swarm file; repeatable.",
    ),
]
DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help="Key, control socket and addresses of the node.",
        show_default="per user",
    ),
]
CacheDirOption = Annotated[
    Path | None,
    typer.Option("--cache-dir", metavar="DIR", help="Where model files are kept.", show_default="per user"),
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", metavar="auto|float32|bfloat16", help="Number format of the weights.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def parse_blocks(text: str) -> tuple[int, int]:
    """``A:B`` as the span [A, B)."""
    match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise typer.BadParameter(
            f"{text!r} is not a span: give two numbers A:B with A < B, such as 0:10", param_hint="'--blocks'"
        )
    return int(match[1]), int(match[2])


def parse_size_bytes(text: str, *, option: str) -> int:
    """``512MiB``, ``1.5GB`` or a plain number of bytes."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*(|[kmg]i?)b?", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise typer.BadParameter(
            f"{text!r} is not a size: write it as 512MiB or 2GB", param_hint=f"'{option}'"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def check_job_id(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise typer.BadParameter("a job id has 64 hexadecimal digits", param_hint="'JOB'")
    return text


def check_device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]{1,3})?", text):
        raise typer.BadParameter(
            f"{text!r} is not a device: use auto, cpu, cuda, cuda:N or mps", param_hint="'--device'"
        )
    return text


def check_dtype(text: str) -> str:
    if text not in {"auto", "float32", "bfloat16"}:
        raise typer.BadParameter(
            f"{text!r} is not a number format: use auto, float32 or bfloat16", param_hint="'--dtype'"
        )
    return text


def check_at_least_zero(value: float, *, option: str) -> float:
    if not math.isfinite(value) or value < 0:
        raise typer.BadParameter(
            f"{value} is not possible: give a number that is 0 or more", param_hint=f"'{option}'"
        )
    return value
