"""Models for tests. They import transformers as nodes do, which takes half the time."""

from swarmnet_protocols.machine.lean_imports import import_transformers

import_transformers()
