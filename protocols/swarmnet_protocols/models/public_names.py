"""The names of built-in models, and the public name of a model that is given by its path."""

import os
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_MODEL_BYTES = 98_362_432
"""Bytes of its file."""
EXPERTS_MODEL = "stdlib-experts"
"""A small mixture of experts that is part of this package: 8 blocks of 32 experts
(``stdlib_experts/README.md``)."""


def name_for_peers(name: str) -> str:
    """Return the name of a model for others. A path on this machine becomes its last part.

    In the hub's cache, a folder is named for its commit, so its public name is the repository's.
    Links are not followed: in that cache they lead to files that are named for their hashes.
    """
    if not is_path(name):
        return name
    path = Path(os.path.abspath(Path(name).expanduser()))
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.name


def is_path(name: str) -> bool:
    """Return whether ``name`` is a path on this machine rather than the name of a model."""
    path = Path(name).expanduser()
    return path.exists() or path.is_absolute() or name.startswith(("~", "."))
