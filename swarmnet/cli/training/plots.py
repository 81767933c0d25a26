"""Plots of training as PNG files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet_protocols.errors import ConfigError, how_to_add

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# An axis uses the largest unit that fits at least twice into its range.
_TOKENS = ((1e9, "billion tokens"), (1e6, "million tokens"), (1e3, "thousand tokens"), (1, "tokens"))
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))
_TIMES = ((3600, "hours"), (60, "minutes"), (1, "seconds"))


@dataclass(frozen=True)
class Line:
    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: str | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot of loss against ``x``. Above ``linear_until`` the axis is logarithmic."""

    x_label: str
    lines: Sequence[Line]
    linear_until: float | None = None
    y_label: str = "loss, nats a token"
    title: str = ""


def save_panels(panels: Sequence[Panel], path: Path) -> None:
    """Draw panels side by side. Raises ``ConfigError`` when matplotlib is not installed."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib", hint=how_to_add("matplotlib")) from error
    with mpl.rc_context({"axes.grid": True, "grid.alpha": 0.3, "lines.markersize": 2.5}):
        figure = Figure(figsize=(max(7, 6 * len(panels)), 4.5), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw(axes, panel)
        figure.savefig(path, dpi=150)


def plot_histories(runs: Mapping[str, Iterable[Mapping[str, float]]], out: Path) -> list[Path]:
    """Write ``tokens.png``, ``bytes.png`` and ``time.png`` of workers' histories into ``out``.
    Returns their paths. ``runs``: label → points.

    With several runs, each run has one colour, and its validation is dashed.
    """
    histories = {label: list(points) for label, points in runs.items()}
    axes = (
        ("tokens", "{} of all workers", "tokens", _TOKENS),
        ("bytes", "{} sent by this worker", "bytes_sent", _BYTES),
        ("time", "{}", "elapsed_s", _TIMES),
    )
    out.mkdir(parents=True, exist_ok=True)
    title = next(iter(runs)) if len(runs) == 1 else f"{len(runs)} runs"
    paths = []
    for name, x_label, key, units in axes:
        most = max((point[key] for points in histories.values() for point in points), default=0)
        unit, unit_name = next((each for each in units if most >= 2 * each[0]), units[-1])
        lines = []
        for number, (run, points) in enumerate(histories.items()):
            for loss, label in (("loss", "training"), ("val_loss", "validation")):
                found = [point for point in points if loss in point]
                x, y = [point[key] / unit for point in found], [point[loss] for point in found]
                if len(runs) == 1:
                    lines.append(Line(label, x, y))
                else:
                    lines.append(Line(f"{run}, {label}", x, y, f"C{number}", dashed=loss == "val_loss"))
        paths.append(out / f"{name}.png")
        save_panels([Panel(x_label.format(unit_name), lines, title=f"{title}: loss by {name}")], paths[-1])
    return paths


def plot_tuning(
    title: str, losses: Sequence[float], evaluations: Sequence[Mapping[str, float]], path: Path
) -> None:
    """Draw the loss of steps 1, 2, ... and the ``val_loss`` of ``evaluations``, if any, into a PNG
    file at ``path``."""
    lines = [Line("training", range(1, len(losses) + 1), losses)]
    if evaluations:
        steps = [point["step"] for point in evaluations]
        lines.append(Line("held out", steps, [point["val_loss"] for point in evaluations]))
    save_panels([Panel("steps", lines, y_label="loss, nats", title=title)], path)


def _draw(axes: "Axes", panel: Panel) -> None:
    for line in panel.lines:
        style = "--" if line.dashed else "-"
        axes.plot(line.x, line.y, style, marker="o", label=line.label, color=line.color)
    if panel.linear_until is not None:
        axes.set_xscale("symlog", linthresh=panel.linear_until)
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.legend(fontsize="small")
