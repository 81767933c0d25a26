"""Spans of blocks [start, end): overlaps, and the part of a span that a model has."""

from typing import Protocol

Span = tuple[int, int]


class HasSpan(Protocol):
    """A host, a hop or a claim with blocks [start, end)."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


def overlap(one: HasSpan, span: Span) -> bool:
    """Return whether ``one`` has some block of ``span``."""
    return one.start < span[1] and span[0] < one.end


def clipped(one: HasSpan, blocks: int) -> Span:
    """Return the span of ``one`` within a model of ``blocks`` blocks. Hosts may claim others."""
    return max(one.start, 0), min(one.end, blocks)
