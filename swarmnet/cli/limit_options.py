"""The options that limit a node, shared by `join`, `limits` and `train join`: how they are read,
stored and shown."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from swarmnet import units
from swarmnet.cli.option_groups import From
from swarmnet_node.owner.limits import OwnerLimits

PANEL = "Limits on this machine"


def _limit(*names: str, about: str, metavar: str | None = None, default: str | bool = "none") -> Any:
    """Return an option of `join` and `limits`; without it the stored limit stays in force."""
    return typer.Option(*names, metavar=metavar, help=about, show_default=default, rich_help_panel=PANEL)


def read_relay_rate(text: str) -> float:
    """Return the value of ``--relay``, in bytes per second; 0 for ``off``. Raises
    ``ValueError``."""
    return 0.0 if text == "off" else units.parse_rate_bytes_per_s(text)


_SIZE, _RATE = From(str, units.parse_size_bytes), From(str, units.parse_rate_bytes_per_s)
Up = Annotated[
    float | None, _limit("--up", metavar="RATE", about="Send at most this fast, such as 20mbit."), _RATE
]
Down = Annotated[float | None, _limit("--down", metavar="RATE", about="Receive at most this fast."), _RATE]


@dataclass(frozen=True)
class LimitOptions:
    """An option for each field of ``OwnerLimits``; None where the stored limit stays in force."""

    max_ram_bytes: Annotated[
        int | None,
        _limit("--max-ram", metavar="SIZE", about="Use at most this much memory, such as 8GiB."),
        _SIZE,
    ] = None
    max_gpu_mem: Annotated[
        float | None,
        _limit("--max-gpu-mem", metavar="SIZE|N%", about="Use at most this much GPU memory."),
        From(str, units.parse_share),
    ] = None
    up_bytes_per_s: Up = None
    down_bytes_per_s: Down = None
    relay_bytes_per_s: Annotated[
        float | None,
        _limit(
            "--relay",
            metavar="off|RATE",
            about="Forward traffic of peers behind routers at most this fast. It applies if others can dial this node.",
            default="10mbit",
        ),
        From(str, read_relay_rate),
    ] = None
    monthly_bytes: Annotated[
        int | None,
        _limit(
            "--monthly",
            metavar="SIZE",
            about="Pause when this much was sent and received in a month, such as 200GB.",
        ),
        _SIZE,
    ] = None
    schedule: Annotated[
        str | None,
        _limit(
            "--schedule",
            metavar="WHEN",
            about="Run only at these times, such as 'mon-fri 19:00-07:00; sat,sun 00:00-24:00'.",
            default="always",
        ),
    ] = None
    idle_only: Annotated[
        bool | None, _limit("--idle-only", about="Run only while nobody uses the machine.", default=False)
    ] = None
    idle_after_s: Annotated[
        float | None,
        _limit(
            "--idle-after",
            metavar="TIME",
            about="With --idle-only: run after this time without keyboard or mouse.",
            default="3m",
        ),
        From(str, units.parse_duration_s),
    ] = None
    no_battery: Annotated[
        bool | None, _limit("--no-battery", about="Pause while the machine runs on battery.", default=False)
    ] = None
    cores: Annotated[
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
    ] = None

    def given(self) -> dict[str, Any]:
        """Return the fields of ``OwnerLimits`` that the owner named.

        Raises ``ConfigError`` for a limit that no node can keep.
        """
        named = {name: value for name, value in vars(self).items() if value is not None}
        OwnerLimits(**named)
        return named


def lifted(names: Sequence[str]) -> dict[str, Any]:
    """Return for each option in ``names`` its field of ``OwnerLimits`` with the default value.
    Raises ``typer.BadParameter`` for an unknown name."""
    # An option has the name of its field, without the unit.
    known = {
        re.sub("(_bytes|_bytes_per_s|_s)$", "", each.name).replace("_", "-"): each.name
        for each in fields(LimitOptions)
    }
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(
            f"there is no limit {unknown[0]!r}: use one of {', '.join(known)}", param_hint="'--clear'"
        )
    return {known[name]: getattr(OwnerLimits(), known[name]) for name in names}


def rows(limits: OwnerLimits) -> dict[str, str]:
    """Return the limits as rows of a table for users."""
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
