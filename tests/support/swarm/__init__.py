"""Swarms in one process. They import transformers as nodes do, which takes half the time.

Nodes on CPUs hide accelerate from transformers, which remembers that for good. Tests of GPUs may
run later in the same process, so accelerate stays visible here.
"""

import pytest

from swarmnet_protocols.machine import devices
from swarmnet_protocols.machine.lean_imports import import_transformers

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(devices, "has_accelerator", lambda: True)
    import_transformers()
