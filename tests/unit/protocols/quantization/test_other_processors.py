"""Processors that this machine emulates compute the bits of plain C.

``test_exact_products.py`` and ``test_equal_bits.py`` show it for the processors that it has.
"""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from swarmnet.paths import default_cache_dir
from swarmnet_node.engine.kernels import native_backend
from swarmnet_protocols.machine import native_code
from swarmnet_protocols.quantization import products
from swarmnet_protocols.quantization.formats import WHOLE_ROWS, Format
from swarmnet_protocols.quantization.products import load_products
from tests.support.gguf.packed_matrices import loaded_copy, random_matrix
from tests.support.house.source_code import ROOT

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
TARGETS = native_code.TARGETS["aarch64"]
PIPED = ROOT / "tests/support/gguf/piped_products.c"

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
        reason=f"not installed: {COMPILER}, {EMULATOR} (Debian: gcc-aarch64-linux-gnu, qemu-user)",
    ),
]


def compiled(source: Path, target: native_code.Target, folder: Path, *options: str) -> Path:
    program = folder / target.name
    kept = [each for each in native_code.COMPILE if each not in ("-c", "-fPIC")]
    includes = [f"-I{path.parent}" for path in (products.SOURCE, native_backend.SOURCE)]
    subprocess.run(
        [
            COMPILER,
            *kept,
            *target.flags,
            *includes,
            *options,
            str(source),
            "-static",
            "-o",
            str(program),
            "-lm",
        ],
        check=True,
    )
    return program


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_an_emulated_processor_multiplies_to_the_bit(target: native_code.Target, tmp_path: Path) -> None:
    program = compiled(PIPED, target, tmp_path)
    plain = load_products(default_cache_dir(), "plain")
    cases, expected = [], []
    for format in Format:
        for outputs, columns, counts in ((43, 512, (1, 2, 3, 4, 7)), (5, 1280, (6, 17)), (16, 256, (65,))):
            matrix = random_matrix(format, outputs, columns)
            groups = matrix if format in WHOLE_ROWS else loaded_copy(matrix, plain)
            [segment] = matrix.segments
            for rows in counts:
                x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
                x *= torch.where(x > 2, 20.0, 1.0)
                numbers = struct.pack("5q", int(format), segment.row_bytes, outputs, columns, rows)
                cases.append(numbers + segment.data.tobytes() + x.numpy().tobytes())
                found = plain.multiply(x.numpy(), groups).tobytes()
                expected += [(format, rows, found)] * (1 if format in WHOLE_ROWS else 2)
    done = subprocess.run([EMULATOR, program], input=b"".join(cases), capture_output=True, check=True)
    assert len(done.stdout) == sum(len(found) for *_, found in expected)
    at = 0
    for format, rows, found in expected:
        assert done.stdout[at : at + len(found)] == found, (format.name, rows)
        at += len(found)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_an_emulated_processor_decodes_to_the_bit(target: native_code.Target, tmp_path: Path) -> None:
    """The trial compares a digest of its outputs with that of plain C."""
    program = compiled(native_backend.SOURCE, target, tmp_path, "-Dtrial=main")
    assert subprocess.run([EMULATOR, program], check=False).returncode == 0
