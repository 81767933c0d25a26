"""The models that the hosts of a swarm offer: complete, or with blocks that nobody hosts yet.

:meth:`SwarmOffers.read` reads the catalog and the announcements of each model's hosts. Any stranger
may host a model under any name, so the names in the swarm file win.
"""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.catalog import CatalogModel, read_catalog
from swarmnet_protocols.directory.host_announcements import HostSample
from swarmnet_protocols.membership.rules import Rules
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.chain_search import find_chain, uncovered
from swarmnet_protocols.routing.chain_view import View, credible
from swarmnet_protocols.routing.coordinates import distance
from swarmnet_protocols.routing.host_info import HostInfo

HOSTS_READ = 32
"""Approximate number of announcements that one look at a model reads. With more, a look at many
models takes longer. With fewer, more looks miss a block's host, and are repeated."""
DIGITS = 12
"""Digits of the hash that tell apart models with one name."""
_HASHED = re.compile(rf".*@([0-9a-f]{{{DIGITS}}})", re.DOTALL)
"""A name with the beginning of a hash."""


@dataclass(frozen=True)
class ModelOffer:
    """A model of a swarm, and what its hosts have of it now.

    - ``context``: most positions of a prompt with its answer; 0 if unknown.
    - ``missing``: ranges of blocks without a host.
    - ``missing_bytes``: approximate size of these blocks; 0 if unknown.
    - ``tokens_per_s``: most tokens per second of one answer; 0 if unknown.
    """

    name: str
    manifest: bytes
    blocks: int
    context: int = 0
    missing: tuple[tuple[int, int], ...] = ()
    missing_bytes: int = 0
    tokens_per_s: float = 0.0

    @property
    def fingerprint(self) -> str:
        """The name of the weights in answers and lists."""
        return f"swarm-{self.manifest.hex()[:DIGITS]}"

    def fields(self) -> dict[str, Any]:
        """Return the offer as JSON. Unknown values are null."""
        return {
            "available": not self.missing,
            "blocks": self.blocks,
            "missing_blocks": [list(each) for each in self.missing],
            "missing_gb": round(self.missing_bytes / 1e9, 3) if self.missing_bytes else None,
            "tokens_per_s": round(self.tokens_per_s, 1) or None,
            "context_length": self.context or None,
        }

    def lack(self) -> str:
        """Return which blocks are missing, as text."""
        listed = ", ".join(f"{start}:{end}" for start, end in self.missing)
        size = f", {self.missing_bytes / 1e9:.2g} GB" if self.missing_bytes else ""
        return f"nobody hosts blocks {listed} of {self.blocks}{size}"


class SwarmOffers:
    """The offers of one swarm, read again and again."""

    def __init__(
        self, directory: Directory, rules: Rules, rng: random.Random, hosts: frozenset[PeerId] = frozenset()
    ) -> None:
        """``hosts``: the only hosts that count; empty: all."""
        self._directory = directory
        self._rules = rules
        self._rng = rng
        self._allowed = hosts
        self._samples: dict[bytes, HostSample] = {}

    async def read(self) -> list[ModelOffer]:
        """Return the offers of now. Raises ``Unreachable`` if the directory is out of reach."""
        models = named((await read_catalog(self._directory)).models, self._rules)
        self._samples = {each.manifest: self._sample(each.manifest) for each in models}
        return [*await asyncio.gather(*map(self._offer, models))]

    def _sample(self, manifest: bytes) -> HostSample:
        found = self._samples.get(manifest)
        return found or HostSample(self._directory, manifest, self._rng, wanted=HOSTS_READ)

    async def _offer(self, model: CatalogModel) -> ModelOffer:
        sample = self._samples[model.manifest]
        found = offer_of(model, self._usable(await sample.refresh()))
        if found.missing:  # the sample of a large swarm may lack hosts
            blocks = found.missing[0][0], found.missing[-1][1]
            found = offer_of(model, self._usable(await sample.refresh(blocks=blocks)))
        return found

    def _usable(self, hosts: Sequence[HostInfo]) -> list[HostInfo]:
        return [each for each in hosts if each.online and (not self._allowed or each.peer in self._allowed)]


def named(models: Sequence[CatalogModel], rules: Rules) -> list[CatalogModel]:
    """Return the models that the swarm serves, each with a name of its own.

    A model in the swarm file has its name there, and no other model has this name. If other models
    share a name, or have the hash of another model in their name, the beginning of their own hash
    is appended.
    """
    signed = {manifest: name for name, manifest in rules.names.items()}
    served = [
        replace(each, name=signed.get(each.manifest, each.name))
        for each in models
        if not rules.models or each.manifest in rules.models
    ]
    served = [each for each in served if rules.names.get(each.name, each.manifest) == each.manifest]
    count = Counter(each.name for each in served)

    def own_name(model: CatalogModel) -> str:
        begin = model.manifest.hex()[:DIGITS]
        found = _HASHED.fullmatch(model.name)
        is_own = model.manifest in signed or found is None or found[1] == begin
        return model.name if is_own and count[model.name] == 1 else f"{model.name}@{begin}"

    return [replace(each, name=own_name(each)) for each in served]


def offer_of(model: CatalogModel, hosts: Sequence[HostInfo]) -> ModelOffer:
    """Return what these online hosts offer of a model."""
    span = (0, model.blocks)
    missing = uncovered(hosts, span)
    count = sum(end - start for start, end in missing)
    return ModelOffer(
        model.name,
        model.manifest,
        model.blocks,
        model.context,
        tuple(missing),
        model.size_bytes * count // model.blocks,
        0.0 if missing else tokens_per_s(hosts, span),
    )


def tokens_per_s(hosts: Sequence[HostInfo], span: tuple[int, int]) -> float:
    """Return the most tokens per second of one answer over a chain of these hosts.

    The hosts cover ``span``. Computing and the delays between hosts count, as hosts announce them.
    The way from and to the client, its own computing and other answers make it slower. 0 if a host
    of the chain has not measured its speed.
    """
    chain = find_chain(View(hosts), span, random.Random(0))
    block_s = credible(View(hosts)).block_s
    if not all(block_s[hop.peer] for hop in chain):
        return 0.0
    places = {host.peer: host.coordinate for host in hosts}
    token_s = sum(block_s[hop.peer] * (hop.end - hop.start) for hop in chain)
    for one, other in pairwise(chain):
        here, there = places[one.peer], places[other.peer]
        if here is not None and there is not None:
            token_s += distance(here, there)
    return 1 / token_s
