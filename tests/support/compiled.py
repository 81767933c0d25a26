"""The C code of this machine, for tests of what it computes. They share what is compiled."""

import sys
from pathlib import Path

import pytest

from swarmnet.paths import default_cache_dir
from swarmnet_node.engine.kernels.native_backend import NativeBackend
from swarmnet_protocols.quantization.products import Products, load_products


def compiled_backend(target: str | None = None, cache_dir: Path | None = None) -> NativeBackend:
    """Return the backend in C, as ``NativeBackend.load``.

    On Linux the test fails without it. Elsewhere PyTorch has another OpenMP library, which the C
    code does not use: the test is skipped.
    """
    found = NativeBackend.load(cache_dir or default_cache_dir(), target)
    if found is None and sys.platform != "linux":
        pytest.skip("PyTorch has no libgomp here")
    assert found is not None, "the C code does not compile, or fails its trial"
    return found


def compiled_products(target: str | None = None) -> Products:
    """Return the products in C, or skip the test, as ``compiled_backend``."""
    compiled_backend(target)
    return load_products(default_cache_dir(), target)
