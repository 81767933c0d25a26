"""The restart that makes a paused node or worker small.

torch and its libraries stay in a process until it ends. So a node whose process has imported torch
ends when it pauses, and its command starts again in the same process id:

1. The sessions have moved away, and the blocks are freed, as in every pause.
2. The node ends, and ``restart`` replaces the program. The environment says what the node hosted.
3. The new program connects under the same identity and announces the paused node. It reads the
   model when the pause ends.

A training worker restarts in the same way. It gets nothing from the previous program: its
checkpoint and the stored pause suffice.
"""

import json
import os
import sys
from dataclasses import asdict
from typing import NoReturn

from swarmnet_node.resting import Resting

VARIABLE = "SWARMNET_RESTING"
"""Environment variable from a node to the program that replaces it."""


def was_restarted() -> bool:
    """Return whether this program replaced another. False after ``take_resting``."""
    return VARIABLE in os.environ


def take_resting() -> Resting | None:
    """Return what the previous program hosted, and forget it. None unless this program replaced
    a node's."""
    values = json.loads(os.environ.pop(VARIABLE, "null"))
    return Resting(**values) if values else None


def restart(resting: Resting | None = None) -> NoReturn:
    """Replace this program by the same command. ``resting``: the paused node, if it is one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ[VARIABLE] = json.dumps(resting and asdict(resting))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - this same command


def may_restart() -> bool:
    """Return whether a restart frees memory here, because this process has imported torch.

    On Windows it may not restart: the command would go on in another process, and the program that
    started this one would think that it has ended.
    """
    return os.name == "posix" and "torch" in sys.modules
