"""Loads swarmnet's C code for this machine's processor.

1. The best target that the processor has is chosen: a set of instructions for the compiler.
   ``measured_targets`` may choose a simpler one that is faster here.
2. An installed wheel has a library for it. In a clone, this machine's compiler makes one.
3. A process of its own calls the library's ``trial``. If that dies or computes something wrong, the
   next simpler target takes its place, here and in all later starts.
4. A library that passed is kept in the cache folder.

Every library exports ``int trial(void)``, which returns 0 if the code computes what it should.
"""

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.platform import is_ours, mode_for_others

_log = logging.getLogger(__name__)

COMPILE = (
    # Results must be the same for every target. So a multiplication and an addition are joined into
    # one operation only where the code says so.
    *("-std=gnu11", "-O3", "-ffp-contract=off", "-fopenmp", "-fPIC", "-c"),
    # Products are 15 % faster without it, and compile faster.
    "-fno-gcse",
    # Nobody reads the processor's exception flags. Otherwise gcc takes comparisons for branches,
    # and AVX2 computes one exponential at a time.
    "-fno-trapping-math",
    # Sizes come from models that others made. So no array on the stack has such a size, and a write
    # beyond an array ends the process.
    *("-Werror=vla", "-fstack-protector-strong", "-fstack-clash-protection"),
)
LINK = ("-shared", "-Wl,-Bsymbolic")  # its own `times`, not that of libc
COMPILER_TIMEOUT_S = 300.0
"""Timeout in seconds. Compiling takes eight seconds of a fast core, and a minute on a busy or slow
machine."""
TRIAL_TIMEOUT_S = 20.0
"""Timeout in seconds. A trial takes a tenth of a second, and longer on a busy machine."""
IN_WHEEL = Path(__file__).with_name("compiled")
"""Libraries that came with the installed wheel. A clone has no such folder."""
_CHOSEN = {"target": ""}
_LOADED: dict[str, str] = {}
_CALL_TRIAL = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
sys.exit(ctypes.CDLL(sys.argv[2]).trial())
"""


@dataclass(frozen=True)
class Target:
    """A set of instructions that code is compiled for."""

    name: str
    flags: tuple[str, ...] = ()
    """Options of the compiler."""
    features: frozenset[str] = frozenset()
    """Features that the processor must have, by their names in /proc/cpuinfo."""


_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_PLAIN = Target("plain")
TARGETS = {
    "x86_64": (
        Target("avx512vnni", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
        Target("avxvnni", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),
        Target("avx2", ("-march=x86-64-v3",), _V3),
        _PLAIN,
    ),
    "aarch64": (Target("neon", ("-march=armv8.2-a+dotprod",), frozenset({"asimddp"})), _PLAIN),
}
"""The targets of a kind of machine, the best first. Others have ``plain``: the compiler's own
choice."""


class _Unavailable(Exception):
    pass


class _Untrusted(Exception):
    """Code for a target that cannot be used here. Code for another one may be."""


def choose_target(name: str) -> None:
    """Use no better target than this one in this process from now on."""
    _CHOSEN["target"] = name


def is_forced() -> bool:
    """Return whether ``choose_target`` chose a target in this process."""
    return bool(_CHOSEN["target"])


def loaded_target(source: Path) -> str:
    """Return the target of the code that was loaded last for a source. Empty if there is none."""
    return _LOADED.get(source.stem, "")


def known_targets() -> tuple[Target, ...]:
    """Return the targets of this kind of machine, the best first."""
    return TARGETS.get(platform.machine(), (_PLAIN,))


def targets(most: str | None = None) -> list[Target]:
    """Return the targets that this machine's processor has, the best first.

    ``most`` leaves out better ones than the named target; the default is what ``choose_target``
    chose. Raises ``ConfigError`` if the machine has no such target.
    """
    features = frozenset(" ".join(_processor()).split())
    found = [each for each in known_targets() if each.features <= features]
    most = most or _CHOSEN["target"]
    if not most:
        return found
    names = [each.name for each in found]
    if most not in names:
        raise ConfigError(f"no target {most} on this machine: it has {', '.join(names)}")
    return found[names.index(most) :]


def library_name(source: Path, target: Target) -> str:
    """Return the file name of a compiled source in a wheel."""
    return f"{source.stem}.{target.name}.so"


def provider(compiler: str = "cc") -> str:
    """Return where libraries come from: ``wheel``, the path of the compiler, or an empty text."""
    return "wheel" if IN_WHEEL.is_dir() else shutil.which(compiler) or ""


def load(
    source: Path,
    cache_dir: Path,
    *,
    headers: Sequence[Path] = (),
    target: str | None = None,
    compiler: str = "cc",
) -> ctypes.CDLL | None:
    """Load the compiled code of one C file, which may include ``headers``.

    ``target``: the best target to use, as in ``targets``. Returns None and logs a warning if there
    is no library and no compiler, or the code fails for every target.
    """
    failure: Exception | None = None
    for each in targets(target):
        try:
            library = _built(source, headers, cache_dir / "native", compiler, each)
            ctypes.CDLL(str(openmp_of_torch()), ctypes.RTLD_GLOBAL)
            loaded = ctypes.CDLL(str(library))
            _LOADED[source.stem] = each.name
            return loaded
        except _Untrusted as error:
            _log.warning("%s is not used for %s: %s", source.name, each.name, error)
            failure = error
        except (_Unavailable, OSError, subprocess.SubprocessError) as error:
            failure = error
            break
    _log.warning("computing without native code (%s): %s", source.name, failure)
    return None


def built(
    source: Path, cache_dir: Path, target: Target, *, headers: Sequence[Path] = (), compiler: str = "cc"
) -> Path | None:
    """Return the library of one target that passed its trial, or None if there is none here."""
    try:
        return _built(source, headers, cache_dir / "native", compiler, target)
    except (_Untrusted, _Unavailable, OSError, subprocess.SubprocessError) as error:
        _log.info("%s for %s is left out: %s", source.name, target.name, error)
        return None


def _built(source: Path, headers: Sequence[Path], folder: Path, compiler: str, target: Target) -> Path:
    """Return the path of a library that passed its trial.

    Its name has two hashes: of what it is built from, and of the library itself. A file with only
    the first hash says why the trial failed.
    """
    openmp = openmp_of_torch()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if not is_ours(status) or mode_for_others(status, 0o022):
        raise _Unavailable(f"others can write into {folder}")
    ready, path = IN_WHEEL / library_name(source, target), shutil.which(compiler)
    if ready.is_file():
        made_of = [_hash_of(ready)]
    elif path is not None:
        texts = [each.read_text() for each in (source, *headers)]
        made_of = [*texts, *COMPILE, *target.flags, *LINK, path]
    else:
        raise _Unavailable(f"no {compiler} on this machine")
    digest = hashlib.sha256("\0".join([*made_of, str(openmp), *_processor()]).encode()).hexdigest()
    failed = folder / f"{digest}.failed"
    if failed.exists():
        raise _Untrusted(failed.read_text())
    for library in folder.glob(f"{digest}-*.so"):
        if library.stem.removeprefix(f"{digest}-") == _hash_of(library):
            return library
        library.unlink(missing_ok=True)  # damaged
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch, "code.so")
        if path is None or ready.is_file():
            shutil.copyfile(ready, fresh)
        else:
            compile_library(source, fresh, target, headers=headers, compiler=path)
        verdict = _try(fresh, openmp, scratch)
        if verdict:
            failed.write_text(verdict)
            raise _Untrusted(verdict)
        library = folder / f"{digest}-{_hash_of(fresh)}.so"
        os.replace(fresh, library)
    return library


def compile_library(
    source: Path, library: Path, target: Target, *, headers: Sequence[Path], compiler: str
) -> None:
    """Compile one C file to a shared library. Raises an error with the compiler's words.

    The library names no OpenMP library: whoever loads it has loaded one for the whole process.
    """
    compiled = library.with_suffix(".o")
    include = [f"-I{folder}" for folder in sorted({str(each.parent) for each in headers})]
    _run(compiler, *COMPILE, *target.flags, *include, str(source), "-o", str(compiled))
    _run(compiler, *LINK, str(compiled), "-lm", "-o", str(library))


def _try(library: Path, openmp: Path, folder: str) -> str:
    """Call the library's trial in a process of its own. Return what is wrong, or an empty text."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _CALL_TRIAL, str(openmp), str(library.absolute())],
        cwd=folder,  # a core dump goes there, and with it
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TRIAL_TIMEOUT_S,
        check=False,
    )
    if done.returncode < 0:
        return f"its trial ends with {signal.Signals(-done.returncode).name}"
    wrong = done.stderr.strip()[-500:] or "it computes something else on this machine"
    return wrong if done.returncode else ""


def _hash_of(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:32]


def openmp_of_torch() -> Path:
    """Return torch's OpenMP library. A second one would compete with its threads for the cores."""
    torch = importlib.util.find_spec("torch")
    found = [
        library
        for folder in (torch and torch.submodule_search_locations) or ()
        for library in Path(folder).glob("lib/libgomp*.so*")
    ]
    if len(found) != 1:
        raise _Unavailable("torch has no libgomp")
    return found[0]


def _processor() -> list[str]:
    """Return what Linux says about the processor and its features. Empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return []
    return [line for line in lines if line.startswith(("model", "flags", "CPU", "Features"))]


def _run(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=COMPILER_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise _Untrusted(f"{command[0]} fails: {done.stderr.strip()[:500]}")
