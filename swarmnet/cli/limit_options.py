"""The options that limit a command on its owner's machine, shared by `join`, `train join`,
`volunteer` and `limits`: how they are read, stored and shown."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import typer

from swarmnet import units
from swarmnet.cli.option_groups import From
from swarmnet.cli.options import choice
from swarmnet_node.owner.limits import PRESETS, OwnerLimits, preset_limits

PANEL = "Limits on this machine"
NO_LIMIT = "no limit"
NOTHING = {NO_LIMIT, "always", "all", "no"}
"""The texts of limits that limit nothing."""


def _limit(*names: str, about: str, metavar: str | None = None, default: str | bool = "none") -> Any:
    """Return an option of a limit; without it the stored limit stays in force."""
    return typer.Option(*names, metavar=metavar, help=about, show_default=default, rich_help_panel=PANEL)


def read_relay_rate(text: str) -> float:
    """Return the value of ``--relay``, in bytes per second; 0 for ``off``. Raises
    ``ValueError``."""
    return 0.0 if text == "off" else units.parse_rate_bytes_per_s(text)


def read_preset(text: str) -> str:
    """Return the value of ``--preset``. Raises ``ValueError``."""
    if text not in PRESETS:
        raise ValueError(f"use {', '.join(PRESETS[:-1])} or {PRESETS[-1]}")
    return text


_SIZE, _RATE = From(str, units.parse_size_bytes), From(str, units.parse_rate_bytes_per_s)
PriorityOption = Annotated[
    str,
    choice("--priority", ("low", "normal"), "low: every other program on this machine goes first.", PANEL),
]


@dataclass(frozen=True)
class LimitOptions:
    """An option for each field of ``OwnerLimits``; None where the stored limit stays in force."""

    preset: Annotated[
        str | None,
        _limit(
            "--preset",
            metavar="laptop|desktop|server",
            about="Begin with careful limits for such a machine, such as a quarter of its memory. Other options win. `swarmnet limits` shows them.",
        ),
        From(str, read_preset),
    ] = None
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
    up_bytes_per_s: Annotated[
        float | None, _limit("--up", metavar="RATE", about="Send at most this fast, such as 20mbit."), _RATE
    ] = None
    down_bytes_per_s: Annotated[
        float | None, _limit("--down", metavar="RATE", about="Receive at most this fast."), _RATE
    ] = None
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
            about="Pause when this much was sent and received in a month, such as 200GB. A worker pauses before the round that would exceed it.",
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

    def applied_to(self, stored: OwnerLimits, *, anew: bool = False) -> OwnerLimits:
        """Return ``stored`` with the limits that the owner named.

        A preset replaces all stored limits. The preset from which ``stored`` began changes nothing,
        unless ``anew``: its owner may have changed limits since.
        """
        if self.preset is not None and (anew or self.preset != stored.preset):
            import psutil

            stored = preset_limits(self.preset, psutil.virtual_memory().total, os.cpu_count() or 1)
        return replace(stored, **self.given())


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
    """Return the limits as rows of a table for users, named as their options."""
    share = limits.max_gpu_mem
    after = units.show_duration(limits.idle_after_s)
    return {
        **({"preset": limits.preset} if limits.preset else {}),
        "max-ram": units.show_memory(limits.max_ram_bytes) if limits.max_ram_bytes else NO_LIMIT,
        "max-gpu-mem": NO_LIMIT
        if share is None
        else (f"{share:.0%}" if share <= 1 else units.show_memory(share)),
        "up": units.show_rate(limits.up_bytes_per_s) if limits.up_bytes_per_s else NO_LIMIT,
        "down": units.show_rate(limits.down_bytes_per_s) if limits.down_bytes_per_s else NO_LIMIT,
        "relay": units.show_rate(limits.relay_bytes_per_s) if limits.relay_bytes_per_s else "off",
        "monthly": units.show_size(limits.monthly_bytes) if limits.monthly_bytes else NO_LIMIT,
        "schedule": limits.schedule or "always",
        "idle-only": f"after {after} without keyboard or mouse" if limits.idle_only else "no",
        "no-battery": "yes" if limits.no_battery else "no",
        "cores": str(limits.cores or "all"),
    }
