"""Curves of training runs as PNG: loss against tokens, bytes and simulated time."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.bench.training_run import Curve


def write_plots(curves: Sequence[Curve], links: Sequence[str], out: Path) -> None:
    """Write ``curves.json``, ``tokens.png``, ``bytes.png`` and ``hours.png``, with a panel for every link, into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "curves.json").write_text(json.dumps([asdict(curve) for curve in curves]))
    with mpl.rc_context({"axes.grid": True, "grid.alpha": 0.3, "lines.markersize": 2.5}):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        panel(figure.subplots(), curves, [[point.tokens for point in each.points] for each in curves])
        figure.axes[0].set_xlabel("tokens of all workers")
        figure.savefig(out / "tokens.png", dpi=150)

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        panel(axes, curves, [[point.size_bytes / 1e6 for point in each.points] for each in curves])
        axes.set_xscale("symlog", linthresh=0.1)
        axes.set_xlabel("MB sent by a worker")
        figure.savefig(out / "bytes.png", dpi=150)

        figure = Figure(figsize=(6 * len(links), 4.5), layout="constrained")
        for axes, link in zip(figure.subplots(1, len(links), squeeze=False)[0], links, strict=True):
            panel(axes, curves, [[point.hours[link] for point in each.points] for each in curves])
            axes.set_xlabel(f"simulated hours, {link}")
        figure.savefig(out / "hours.png", dpi=150)


def panel(axes: Axes, curves: Sequence[Curve], x: Sequence[Sequence[float]]) -> None:
    """Validation loss against ``x``, one sequence a curve."""
    for curve, positions in zip(curves, x, strict=True):
        losses = [point.val_loss for point in curve.points]
        axes.plot(positions, losses, marker="o", label=curve.label)
    axes.set_ylabel("validation loss, nats a byte")
    axes.legend(fontsize="small")
