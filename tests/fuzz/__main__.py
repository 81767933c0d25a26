"""Feeds every decoder with what a coverage-guided fuzzer makes of valid input: ``python -m
tests.fuzz --seconds 3600``.

Each target has a process of its own, two run at a time, and all share the time. What a target
learned is kept in a corpus, so that a later run begins where an earlier one ended. An input that a
decoder fails on is written to a file, and ``--input FILE TARGET`` reads it again.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.fuzz.targets import MAX_INPUT_S, MAX_RSS_MIB, PLANTED, TARGETS, believe_signatures

AT_ONCE = 2


@dataclass(frozen=True)
class Result:
    target: str
    runs: int
    """Number of inputs tried."""
    failed: str
    """The file with the input that the target failed on, or the last output of the process; empty
    if the target did not fail."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if no decoder failed. Prints one JSON object a target, and one of all."""
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument(
        "targets", nargs="*", choices=[[], *TARGETS, *PLANTED], metavar="TARGET", help="all without"
    )
    parser.add_argument("--seconds", type=int, default=3600, help="for all targets together")
    parser.add_argument("--folder", type=Path, default=Path(".pytest_cache/fuzz"), help="corpora, findings")
    parser.add_argument("--input", type=Path, help="read this one file, in this process")
    given = parser.parse_args(arguments)
    names = given.targets or list(TARGETS)
    if given.input:
        believe_signatures(setattr)
        for name in names:
            (TARGETS | PLANTED)[name].read(given.input.read_bytes())
        return 0
    each_s = max(1, given.seconds // math.ceil(len(names) / AT_ONCE))
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = []
        for result in pool.map(lambda name: fuzz(name, each_s, given.folder.absolute()), names):
            results.append(result)
            print(json.dumps(asdict(result)), flush=True)
    failed = [result.target for result in results if result.failed]
    runs = sum(result.runs for result in results)
    print(json.dumps({"seconds": round(time.monotonic() - began), "runs": runs, "failed": failed}))
    return 1 if failed else 0


def fuzz(name: str, seconds: int, folder: Path) -> Result:
    """Run one target in its own process."""
    corpus, findings = folder / name / "corpus", folder / name / "findings"
    for each in (corpus, findings):
        each.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate((TARGETS | PLANTED)[name].seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    before = set(findings.iterdir())
    flags = (
        f"-max_total_time={seconds}",
        f"-max_len={(TARGETS | PLANTED)[name].max_bytes}",
        f"-timeout={MAX_INPUT_S}",
        f"-rss_limit_mb={MAX_RSS_MIB}",
        f"-artifact_prefix={findings}/",
        "-print_final_stats=1",
    )
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.fuzz.one", name, *flags, str(corpus)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    said = ended.stderr.splitlines()
    runs = [int(line.split()[-1]) for line in said if line.startswith("stat::number_of_executed_units")]
    found = sorted(set(findings.iterdir()) - before)
    failed = str(found[0]) if found else "\n".join(said[-20:]) if ended.returncode else ""
    return Result(name, sum(runs), failed)


if __name__ == "__main__":
    sys.exit(main())
