"""Chooses between targets of the same bits by measuring them on this machine.

1. The code is built for each target that the processor has, and passes its trial (``native_code``).
2. A process of its own times all of them in turns, for at most ``MEASURE_S``.
3. The times stay in a file next to the libraries. Its name is a hash of the processor and of the
   libraries, so another processor and other code are measured again.
4. ``fastest`` decides.
"""

import hashlib
import json
import logging
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import geometric_mean

from swarmnet_protocols.machine import native_code
from swarmnet_protocols.machine.files import write_whole

_log = logging.getLogger(__name__)

MEASURE_S = 0.4
"""Seconds of measuring. With more, the first start takes noticeably longer. With less, each case is
timed fewer than about ten times, and noise of other programs enters the least time."""
MARGIN = 0.95
"""A simpler target replaces a better one if it takes at most this part of the better one's time.
With a larger part, noise would choose. With a smaller part, real gains would be lost."""
Times = dict[str, list[float]]
"""Target → least seconds of each case. The best target comes first."""
_CALL_PACE = """
import ctypes, json, sys, time
openmp, measure_s, cases, *libraries = sys.argv[1:]
ctypes.CDLL(openmp, ctypes.RTLD_GLOBAL)
paces, cases = [ctypes.CDLL(each).pace for each in libraries], json.loads(cases)
for pace in paces:
    pace.restype, pace.argtypes = ctypes.c_double, [ctypes.c_int64] * len(cases[0])
least = [[float("inf")] * len(cases) for _ in paces]
end = time.monotonic() + float(measure_s)
while True:
    for number, case in enumerate(cases):
        for pace, found in zip(paces, least):
            found[number] = min(found[number], pace(*case))
    if time.monotonic() > end:
        break
print(json.dumps(least))
"""


def fastest(times: Mapping[str, Sequence[float]]) -> str:
    """Return the first target within ``MARGIN`` of the fastest, by the geometric mean of times."""
    means = {target: geometric_mean(found) for target, found in times.items()}
    most = min(means.values()) / MARGIN
    return next(target for target, mean in means.items() if mean <= most)


def measure(
    source: Path,
    cache_dir: Path,
    cases: Sequence[tuple[int, ...]],
    *,
    headers: Sequence[Path] = (),
    compiler: str = "cc",
) -> Times:
    """Return the times of a source's ``double pace(int64_t, ...)``, called with each of ``cases``.

    Empty if there is nothing to choose: a target is forced, the processor has plain C alone, or the
    others cannot be built or measured here.
    """
    targets = [each for each in native_code.targets() if each.features]
    if native_code.is_forced() or not targets:
        return {}
    with ThreadPoolExecutor(len(targets)) as pool:
        built = pool.map(
            lambda each: native_code.built(source, cache_dir, each, headers=headers, compiler=compiler),
            targets,
        )
        libraries = {each.name: path for each, path in zip(targets, built, strict=True) if path is not None}
    if not libraries:
        return {}
    names = json.dumps([cases, *(path.name for path in libraries.values())])
    kept = cache_dir / "native" / f"{hashlib.sha256(names.encode()).hexdigest()}.json"
    shape = {target: len(cases) for target in libraries}
    if kept.is_file() and (times := parsed(kept.read_text(errors="replace"), shape)):
        return times
    done = _paces(list(libraries.values()), cases)
    if not (times := parsed(done, shape)):
        _log.warning("%s: targets cannot be measured: %s", source.name, done[-500:])
        return {}
    try:
        write_whole(kept, done.encode(), durable=False)
    except OSError as error:
        _log.warning("%s: targets are measured again at the next start: %s", source.name, error)
    return times


def parsed(text: str, shape: Mapping[str, int]) -> Times:
    """Return the times in ``text``, a JSON list of seconds for each target of ``shape``.

    ``shape`` says how many seconds each target has. Empty for any other text, such as a damaged
    file.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, list) or [_count(each) for each in found] != list(shape.values()):
        return {}
    return dict(zip(shape, found, strict=True))


def _count(times: object) -> int:
    """Return the number of seconds in a list, or -1 if it has anything else."""
    if not isinstance(times, list):
        return -1
    are_seconds = all(isinstance(each, float) and 0 < each < math.inf for each in times)
    return len(times) if are_seconds else -1


def _paces(libraries: Sequence[Path], cases: Sequence[tuple[int, ...]]) -> str:
    arguments = [str(native_code.openmp_of_torch()), str(MEASURE_S), json.dumps(cases), *map(str, libraries)]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CALL_PACE, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=native_code.TRIAL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return done.stderr if done.returncode else done.stdout
