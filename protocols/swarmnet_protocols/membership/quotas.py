"""How much of every host one peer may use at once."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Quotas:
    """Limits a swarm sets for each peer on each host; None leaves one to the host."""

    sessions: int | None = None
    passes: int | None = None

    def to_dict(self) -> dict[str, int | None]:
        return asdict(self)
