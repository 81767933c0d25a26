"""Compiles swarmnet's C code with the machine's compiler at first use, and caches the library."""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from swarmnet_protocols.machine.platform import is_ours, mode_for_others

_log = logging.getLogger(__name__)

COMPILE = (
    *("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-c"),
    # Sizes come from models that others made. So no array on the stack has such a size, and a write
    # beyond an array ends the process.
    *("-Werror=vla", "-fstack-protector-strong", "-fstack-clash-protection"),
)
LINK = ("-shared", "-Wl,-z,defs")
COMPILER_TIMEOUT_S = 60.0


class _Unavailable(Exception):
    pass


def load(
    source: Path, cache_dir: Path, *, headers: Sequence[Path] = (), compiler: str = "cc"
) -> ctypes.CDLL | None:
    """Compile and load one C file, which may include ``headers``.

    Returns None and logs a warning if it cannot be compiled.
    """
    try:
        return ctypes.CDLL(str(_built(source, headers, cache_dir / "native", compiler)))
    except (_Unavailable, OSError, subprocess.SubprocessError) as error:
        _log.warning("computing without native code (%s): %s", source.name, error)
        return None


def _built(source: Path, headers: Sequence[Path], folder: Path, compiler: str) -> Path:
    """Return the path of the library. Its name has two hashes: of what it is built from, and of the
    library itself."""
    path = shutil.which(compiler)
    if path is None:
        raise _Unavailable(f"no {compiler} on this machine")
    openmp = _openmp_of_torch()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if not is_ours(status) or mode_for_others(status, 0o022):
        raise _Unavailable(f"others can write into {folder}")
    texts = [each.read_text() for each in (source, *headers)]
    key = [*texts, *COMPILE, *LINK, path, str(openmp), *_processor()]
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()
    for library in folder.glob(f"{digest}-*.so"):
        if library.stem.removeprefix(f"{digest}-") == _hash_of(library):
            return library
        library.unlink(missing_ok=True)  # damaged
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        compiled, linked = Path(scratch, "code.o"), Path(scratch, "code.so")
        include = [f"-I{folder}" for folder in sorted({str(each.parent) for each in headers})]
        _run(path, *COMPILE, *include, str(source), "-o", str(compiled))
        _run(path, *LINK, str(compiled), str(openmp), "-lm", "-o", str(linked))
        library = folder / f"{digest}-{_hash_of(linked)}.so"
        os.replace(linked, library)
    return library


def _hash_of(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:32]


def _openmp_of_torch() -> Path:
    """Return torch's OpenMP library. A second one would compete with its threads for the cores."""
    import torch

    found = list(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    if len(found) != 1:
        raise _Unavailable("torch has no libgomp")
    return found[0]


def _processor() -> list[str]:
    """Return the processor features that ``-march=native`` uses."""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    return [line for line in lines if line.startswith(("model", "flags", "CPU", "Features"))]


def _run(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=COMPILER_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise _Unavailable(f"{command[0]} fails: {done.stderr.strip()[:500]}")
