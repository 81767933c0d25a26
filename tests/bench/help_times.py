"""How long `--help` of every command takes, as a process that ends: median of several, in
milliseconds of a clock and of a core."""

import argparse
import json
import resource
import statistics
import subprocess
import time

from tests.support.processes.commands import SWARMNET, every_command


def _measure(arguments: list[str]) -> tuple[float, float]:
    """Milliseconds of one call: by the clock, and of a core."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([*SWARMNET, *arguments, "--help"], stdout=subprocess.DEVNULL, check=True)
    elapsed, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return elapsed * 1000, cpu * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    rows = {}
    for command in every_command():
        measured = [_measure(command) for _ in range(repeats)]
        clock, cpu = (statistics.median(values) for values in zip(*measured, strict=True))
        rows[" ".join(["swarmnet", *command])] = {"clock_ms": round(clock), "cpu_ms": round(cpu)}
    slowest = max(rows.values(), key=lambda row: row["clock_ms"])
    print(json.dumps({"goal_ms": 300, "slowest": slowest, "commands": rows}))


if __name__ == "__main__":
    main()
