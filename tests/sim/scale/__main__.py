"""``python -m tests.sim.scale``: run scenarios at any number of hosts, print a table or JSON, and
draw plots."""

import argparse
import json
import sys
from pathlib import Path

from tests.sim.scale.rules import RULES
from tests.sim.scale.scenarios import CLIENTS, SCENARIOS, Result, Setting, run

COLUMNS = (
    ("nodes", "nodes", "{:d}"),
    ("coverage", "coverage", "{:.4f}"),
    ("throughput_of_optimum", "of optimum", "{:.2f}"),
    ("busiest_tenth", "busiest tenth", "{:.2f}"),
    ("moves_per_node_hour", "moves/node/h", "{:.3f}"),
    ("messages_per_node_s", "messages/node/s", "{:.1f}"),
    ("bytes_per_node_s", "bytes/node/s", "{:.0f}"),
    ("client_refresh_bytes", "refresh bytes", "{:d}"),
    ("wall_s", "wall s", "{:.0f}"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.scale", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000, help="hosts of each scenario")
    parser.add_argument("--rule", choices=list(RULES), default="ours", help="how hosts choose blocks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--days", type=float, default=1.0, help="length of the daily cycle")
    parser.add_argument("--scenario", choices=list(SCENARIOS), action="append", help="of all by default")
    parser.add_argument("--json", action="store_true", help="print one object for each scenario")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write PNG plots to this directory")
    options = parser.parse_args()
    results = []
    for name in options.scenario or SCENARIOS:
        result = run(name, Setting(options.rule, options.nodes, options.seed, options.clients, options.days))
        results.append(result)
        if options.json:
            print(json.dumps(result.row()), flush=True)
        else:
            print(f"{name}: {result.wall_s:.0f} s", file=sys.stderr)
    if not options.json:
        print(table(results))
    if options.plots is not None:
        from tests.sim.scale.plots import write_plots

        for path in write_plots(results, options.plots):
            print(path, file=sys.stderr)


def table(results: list[Result]) -> str:
    """The results in Markdown."""
    lines = [
        "| scenario | " + " | ".join(title for _, title, _ in COLUMNS) + " | more |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for result in results:
        cells = [form.format(getattr(result, name)) for name, _, form in COLUMNS]
        notes = ", ".join(f"{name} {value:.3g}" for name, value in result.notes.items())
        lines.append(f"| {result.scenario} | " + " | ".join(cells) + f" | {notes} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
