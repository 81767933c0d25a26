"""Limits on the use of a host, for one client and for all clients together."""

import math
from dataclasses import dataclass

from swarmnet_node.owner.limits import ONE_CLIENT
from swarmnet_protocols.membership.rules import Quotas
from swarmnet_protocols.net.limits.rate_limit import RateLimit
from swarmnet_protocols.net.limits.resource_limits import Rate, Resource
from swarmnet_protocols.net.limits.resources import ResourceManager

MIN_MESSAGES_BYTES = 8 << 20
"""Smallest limit on the bytes of received messages of one client."""
MESSAGES_PER_CLIENT = 8
"""Steps of the largest size that one client may have in memory. Further steps wait at their
sender."""
CLIENTS_AT_ONCE = 6
"""Limit on received messages of all clients, as a multiple of one client's limit."""
BURST_S = 4.0
"""Seconds of its rate that a client may use in one burst after a pause."""
CONTINUED_WAITS = 2.0
"""A session that continues an answer may wait this many times as long as a new session. With a
larger factor, clients would give up the host first. With a smaller one, more started work would be
lost."""


@dataclass(frozen=True)
class ClientLimits:
    """Limits for the clients of one host. None means no limit.

    The engine limits the KV caches of all clients together.
    """

    sessions: int = 256
    sessions_per_client: int = 64
    """By default one client gets a quarter of the sessions, passes, logs and KV caches, even when
    nobody else is here."""
    pending_links: int = 256
    """Links that wait until their session is opened."""
    pending_links_per_client: int = 64
    log_bytes: int = 256 << 20
    """Bytes of one session's activation log."""
    log_bytes_per_client: int = 256 << 20
    total_log_bytes: int = 1 << 30
    cache_share_per_client: float = ONE_CLIENT
    """Share of one client in the bytes for all KV caches. These bytes vary with the free memory."""
    cache_bytes_per_client: int | None = None
    """Bytes of one client's KV caches. Replaces ``cache_share_per_client``."""
    positions_per_s: float | None = None
    """Mean rate of one client, in positions times blocks."""
    bytes_per_s: float | None = None
    """Mean rate in each direction between the host and one peer."""
    passes: int = 16
    passes_per_client: int = 4
    adapters: int = 256
    adapters_per_client: int = 16
    adapter_bytes: int = 512 << 20
    adapter_bytes_per_client: int = 128 << 20
    adapter_idle_s: float = 1800.0
    max_wait_s: float = 20.0
    """Longest expected wait in seconds for a new session or its first step. Beyond it, the host
    refuses."""

    @classmethod
    def within(cls, quotas: Quotas, share: float, *, max_wait_s: float) -> "ClientLimits":
        """Return limits with ``share`` of the host for one client, within the swarm's quotas."""
        whole = cls()
        return cls(
            sessions_per_client=min(whole.sessions, quotas.sessions or math.ceil(whole.sessions * share)),
            passes_per_client=min(whole.passes, quotas.passes or math.ceil(whole.passes * share)),
            pending_links_per_client=math.ceil(whole.pending_links * share),
            adapter_bytes_per_client=min(
                whole.adapter_bytes, quotas.adapter_bytes or int(whole.adapter_bytes * share)
            ),
            log_bytes_per_client=int(whole.total_log_bytes * share),
            cache_share_per_client=share,
            cache_bytes_per_client=quotas.cache_bytes,
            positions_per_s=quotas.positions_per_s,
            bytes_per_s=quotas.bytes_per_s,
            max_wait_s=max_wait_s,
        )

    def max_session_wait_s(self, *, continues: bool) -> float:
        """Return the longest wait in seconds that a session may expect. A longer one is refused.

        A session that ``continues`` an answer may wait twice as long, because a refusal would lose
        started work. Both times are well below ``Timing.stall_s``, after which clients give up a
        host that computes nothing for them.
        """
        return CONTINUED_WAITS * self.max_wait_s if continues else self.max_wait_s

    def client_cache_bytes(self, max_cache_bytes: int) -> int:
        """Return the limit of one client's KV caches if all clients may take
        ``max_cache_bytes``."""
        if self.cache_bytes_per_client is not None:
            return self.cache_bytes_per_client
        return int(max_cache_bytes * self.cache_share_per_client)

    def set_on(self, resources: ResourceManager, largest_step_bytes: int) -> None:
        """Set these limits on ``resources``. ``largest_step_bytes``: the largest step that a client
        sends."""
        each_bytes = max(MIN_MESSAGES_BYTES, MESSAGES_PER_CLIENT * largest_step_bytes)
        resources.limit(Resource.MEMORY, system=CLIENTS_AT_ONCE * each_bytes, per_peer=each_bytes)
        resources.limit(Resource.SESSIONS, system=self.sessions, per_peer=self.sessions_per_client)
        resources.limit(
            Resource.PENDING_LINKS, system=self.pending_links, per_peer=self.pending_links_per_client
        )
        resources.limit(Resource.LOG, system=self.total_log_bytes, per_peer=self.log_bytes_per_client)
        resources.limit(Resource.PASSES, system=self.passes, per_peer=self.passes_per_client)
        resources.limit(Resource.ADAPTERS, system=self.adapters, per_peer=self.adapters_per_client)
        resources.limit(
            Resource.ADAPTER_BYTES, system=self.adapter_bytes, per_peer=self.adapter_bytes_per_client
        )
        if self.positions_per_s is not None:
            resources.limit_rate(Rate.POSITIONS, per_peer=_rate(self.positions_per_s))
        if self.bytes_per_s is not None:
            for flow in (Rate.BYTES_IN, Rate.BYTES_OUT):
                resources.limit_rate(flow, per_peer=_rate(self.bytes_per_s))


def _rate(per_s: float) -> RateLimit:
    return RateLimit(per_s, BURST_S * per_s)
