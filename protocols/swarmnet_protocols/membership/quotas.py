"""How much of every host one peer may use at once."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Quotas:
    """Limits a swarm sets for each peer on each host; None leaves one to the host."""

    sessions: int | None = None
    passes: int | None = None
    cache_bytes: int | None = None
    """Of keys and values of its sessions."""
    adapter_bytes: int | None = None
    positions_per_s: int | None = None
    """On average, of each block a host has."""
    bytes_per_s: int | None = None
    """On average, of what it sends to a host, and of what it gets."""

    def to_dict(self) -> dict[str, int | None]:
        return asdict(self)
