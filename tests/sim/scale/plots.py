"""Plots of what the scenarios measured over time."""

from collections.abc import Sequence
from pathlib import Path

from tests.sim.scale.population import HOUR
from tests.sim.scale.scenarios import Result


def write_plots(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write a PNG file for each scenario with measurements over time, and return their paths."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for result in results:
        measures = result.measures
        if not measures.times:
            continue
        hours = [time_s / HOUR for time_s in measures.times]
        figure, (shares, counts) = plt.subplots(2, 1, sharex=True, figsize=(8, 5), layout="constrained")
        shares.plot(hours, measures.coverage, label="blocks with a host")
        shares.plot(hours, measures.of_optimum, label="throughput of optimum")
        shares.set(ylim=(0, 1.05), ylabel="share", title=f"{result.scenario}, {result.nodes} hosts")
        shares.legend(loc="lower right")
        counts.plot(hours, measures.hosts)
        counts.set(ylim=(0, None), xlabel="hours", ylabel="serving hosts")
        path = folder / f"{result.scenario.replace(' ', '-')}-{result.nodes}.png"
        figure.savefig(path, dpi=100)
        plt.close(figure)
        written.append(path)
    return written
