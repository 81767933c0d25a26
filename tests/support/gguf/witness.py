"""llama.cpp as a second witness: what it makes of a gguf file.

``make llama-cpp`` builds it, and ``witness.cpp``, the program that is asked.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.house.source_code import ROOT

SOURCE = ROOT / ".pytest_cache" / "llama.cpp"
"""llama.cpp's source, which also holds vocabularies."""
_PROGRAM = SOURCE / "build" / "witness"

needs_llama_cpp = pytest.mark.skipif(not _PROGRAM.exists(), reason="make llama-cpp builds it")
"""For tests that ask the witness. ``make thorough`` builds it first."""


class WitnessRefusesError(Exception):
    """llama.cpp does not load the file. The message is llama.cpp's log."""


def ids_and_ends(file: Path, text: str) -> tuple[list[int], list[int]]:
    """Return llama.cpp's tokens of a text, and the tokens that end an answer."""
    tokens, ends = _ask(["ids", file], text).decode().splitlines()
    return [int(token) for token in tokens.split()], [int(token) for token in ends.split()]


def greedy_logits(file: Path, prompt: Sequence[int], count: int) -> torch.Tensor:
    """Return ``count`` rows of llama.cpp's logits: after the prompt, then after each greedy
    token."""
    answer = _ask(["logits", file, str(count)], " ".join(map(str, prompt)))
    return torch.from_numpy(np.frombuffer(answer, np.float32).reshape(count, -1).copy())


def expanded(file: Path) -> Path:
    """Return a copy of a file next to it, with the float32 values that llama.cpp gives its
    matrices."""
    copy = file.with_stem(f"{file.stem}-expanded")
    _ask(["expand", file, copy], "")
    return copy


def _ask(arguments: Sequence[str | Path], text: str) -> bytes:
    done = subprocess.run([_PROGRAM, *arguments], input=text.encode(), capture_output=True, check=False)
    if done.returncode:
        raise WitnessRefusesError(done.stderr.decode(errors="replace"))
    return done.stdout
