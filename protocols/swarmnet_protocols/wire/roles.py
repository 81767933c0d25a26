"""The roles of a swarm's members."""

from collections.abc import Iterable
from enum import StrEnum


class Role(StrEnum):
    CLIENT = "client"
    """Uses hosted models."""
    HOST = "host"
    """Hosts blocks."""
    TRAINER = "trainer"
    """Trains jobs."""
    OBSERVER = "observer"
    """Reads the directory."""
    BOOTSTRAP = "bootstrap"
    """Stores a part of the directory; new peers connect to it first."""


ANY_ROLE = frozenset(Role)


def name_roles(roles: Iterable[Role]) -> str:
    """Return ``roles`` as messages name them: ``client, host``, or ``none``."""
    return ", ".join(role for role in Role if role in set(roles)) or "none"
