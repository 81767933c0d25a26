"""Curves of training runs as PNG: loss against tokens, bytes and simulated time."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from swarmnet.cli.training.plots import Line, Panel, save_panels
from tests.bench.training_run import Curve, Point


def write_plots(curves: Sequence[Curve], links: Sequence[str], out: Path) -> None:
    """Write ``curves.json``, ``tokens.png``, ``bytes.png`` and ``hours.png``, with a panel for
    every link, into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "curves.json").write_text(json.dumps([asdict(curve) for curve in curves]))

    def panel(label: str, x: Callable[[Point], float], linear_until: float | None = None) -> Panel:
        lines = [
            Line(
                curve.label, [x(point) for point in curve.points], [point.val_loss for point in curve.points]
            )
            for curve in curves
        ]
        return Panel(label, lines, linear_until, "validation loss, nats a byte")

    save_panels([panel("tokens of all workers", lambda point: point.tokens)], out / "tokens.png")
    save_panels([panel("MB sent by a worker", lambda point: point.size_bytes / 1e6, 0.1)], out / "bytes.png")
    hours = [panel(f"simulated hours, {link}", lambda point, link=link: point.hours[link]) for link in links]
    save_panels(hours, out / "hours.png")
