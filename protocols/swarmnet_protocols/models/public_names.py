"""Names of a model for peers and callers. They reveal nothing about this machine."""

import os
from pathlib import Path


def name_for_peers(name: str) -> str:
    """Return the name of a model for others. A path on this machine becomes its last part.

    In the hub's cache, a folder is named for its commit, so its public name is the repository's.
    Links are not followed: in that cache they lead to files that are named for their hashes.
    """
    path = Path(name).expanduser()
    if not (path.exists() or path.is_absolute() or name.startswith(("~", "."))):
        return name
    path = Path(os.path.abspath(path))
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.name
