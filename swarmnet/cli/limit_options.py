"""The options that limit a node, shared by `join`, `limits` and `train join`: how their text is
read, stored and shown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnet import units
from swarmnet_node.owner.limits import OwnerLimits

PANEL = "Limits on this machine"


def _limit(*names: str, about: str, metavar: str | None = None, default: str | bool = "none") -> Any:
    """An option of `join` and `limits`; without it the stored limit stays in force."""
    return typer.Option(*names, metavar=metavar, help=about, show_default=default, rich_help_panel=PANEL)


MaxRam = Annotated[
    str | None, _limit("--max-ram", metavar="SIZE", about="Use at most this much memory, such as 8GiB.")
]
MaxGpuMem = Annotated[
    str | None, _limit("--max-gpu-mem", metavar="SIZE|N%", about="Use at most this much GPU memory.")
]
Up = Annotated[str | None, _limit("--up", metavar="RATE", about="Send at most this fast, such as 20mbit.")]
Down = Annotated[str | None, _limit("--down", metavar="RATE", about="Receive at most this fast.")]
Relay = Annotated[
    str | None,
    _limit(
        "--relay",
        metavar="off|RATE",
        about="Forward traffic of peers behind routers at most this fast. It applies if others can dial this node.",
        default="10mbit",
    ),
]
Monthly = Annotated[
    str | None,
    _limit(
        "--monthly",
        metavar="SIZE",
        about="Pause when this much was sent and received in a month, such as 200GB.",
    ),
]
ScheduleText = Annotated[
    str | None,
    _limit(
        "--schedule",
        metavar="WHEN",
        about="Run only at these times, such as 'mon-fri 19:00-07:00; sat,sun 00:00-24:00'.",
        default="always",
    ),
]
IdleOnly = Annotated[
    bool | None, _limit("--idle-only", about="Run only while nobody uses the machine.", default=False)
]
IdleAfter = Annotated[
    str | None,
    _limit(
        "--idle-after",
        metavar="TIME",
        about="With --idle-only: run after this time without keyboard or mouse.",
        default="3m",
    ),
]
NoBattery = Annotated[
    bool | None, _limit("--no-battery", about="Pause while the machine runs on battery.", default=False)
]
Cores = Annotated[
    int | None,
    typer.Option(
        "--cores",
        "--threads",
        metavar="N",
        min=1,
        help="Compute with this many cores.",
        show_default="all",
        rich_help_panel=PANEL,
    ),
]


def read_relay_rate(text: str) -> float:
    """The value of ``--relay``, in bytes per second; 0 for ``off``. Raises
    ``typer.BadParameter``."""
    try:
        return _parse_relay_rate(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not possible: {error}", param_hint="'--relay'") from error


def _parse_relay_rate(text: str) -> float:
    """Bytes per second; 0 for ``off``. Raises ``ValueError``."""
    return 0.0 if text == "off" else units.parse_rate_bytes_per_s(text)


_READERS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "max-ram": ("max_ram_bytes", units.parse_size_bytes),
    "max-gpu-mem": ("max_gpu_mem", units.parse_share),
    "up": ("up_bytes_per_s", units.parse_rate_bytes_per_s),
    "down": ("down_bytes_per_s", units.parse_rate_bytes_per_s),
    "relay": ("relay_bytes_per_s", _parse_relay_rate),
    "monthly": ("monthly_bytes", units.parse_size_bytes),
    "schedule": ("schedule", str),
    "idle-only": ("idle_only", bool),
    "idle-after": ("idle_after_s", units.parse_duration_s),
    "no-battery": ("no_battery", bool),
    "cores": ("cores", int),
}
"""For each option, without its dashes: its field of ``OwnerLimits``, and the function that parses
its text."""


def read_options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``OwnerLimits`` that the user gave. ``parameters`` are the command's, by Python
    name.

    Raises ``typer.BadParameter`` for text that cannot be read, ``ConfigError`` for a limit that no
    node can keep.
    """
    given: dict[str, Any] = {}
    for name, (field, read) in _READERS.items():
        text = parameters.get(name.replace("-", "_"))
        if text is None:
            continue
        try:
            given[field] = read(text)
        except ValueError as error:
            raise typer.BadParameter(
                f"{text!r} is not possible: {error}", param_hint=f"'--{name}'"
            ) from error
    OwnerLimits(**given)
    return given


def remembered(data_dir: Path) -> OwnerLimits:
    """The limits stored in ``data_dir`` by its last node."""
    from swarmnet_node.owner.machine import load_limits

    return load_limits(data_dir)


def remember(data_dir: Path, limits: OwnerLimits) -> None:
    """Store ``limits`` in ``data_dir`` for the next start. Raises ``ConfigError`` if they cannot be
    written."""
    from swarmnet_node.owner.machine import save_limits

    save_limits(data_dir, limits)


def lifted(names: Sequence[str]) -> dict[str, Any]:
    """For each option in ``names``, its field of ``OwnerLimits`` with the default value. Raises
    ``typer.BadParameter`` for an unknown name."""
    if unknown := [name for name in names if name not in _READERS]:
        raise typer.BadParameter(
            f"there is no limit {unknown[0]!r}: use one of {', '.join(_READERS)}", param_hint="'--clear'"
        )
    defaults = asdict(OwnerLimits())
    return {field: defaults[field] for field in (_READERS[name][0] for name in names)}


def rows(limits: OwnerLimits) -> dict[str, str]:
    """The limits as rows of a table for users."""
    when = [limits.schedule] if limits.schedule else []
    if limits.idle_only:
        when.append(f"while the machine has not been used for {units.show_duration(limits.idle_after_s)}")
    if limits.no_battery:
        when.append("not on battery")
    share = limits.max_gpu_mem
    return {
        "memory": units.show_memory(limits.max_ram_bytes) if limits.max_ram_bytes else "no limit",
        "GPU memory": "no limit"
        if share is None
        else (f"{share:.0%}" if share <= 1 else units.show_memory(share)),
        "up": units.show_rate(limits.up_bytes_per_s) if limits.up_bytes_per_s else "no limit",
        "down": units.show_rate(limits.down_bytes_per_s) if limits.down_bytes_per_s else "no limit",
        "relay": units.show_rate(limits.relay_bytes_per_s) if limits.relay_bytes_per_s else "off",
        "in a month": units.show_size(limits.monthly_bytes) if limits.monthly_bytes else "no limit",
        "when": ", ".join(when) or "always",
        "cores": str(limits.cores or "all"),
    }
