"""What a member of a swarm may be."""

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
    """Keeps the directory, and is where others begin."""


ANY_ROLE = frozenset(Role)


def name_roles(roles: Iterable[Role]) -> str:
    """Roles as people read them: ``client, host``; ``none`` if there is none."""
    return ", ".join(role for role in Role if role in set(roles)) or "none"
