"""Every timeout and period of the protocols between peers, with the relations between them that
must hold."""

from dataclasses import dataclass

from swarmnet_protocols.errors import ConfigError


@dataclass(frozen=True)
class Timing:
    """Timeouts and periods, in seconds. Two peers need not agree on them.

    The client detects a stopped hop or a cut path after ``silence_s``, and replaces it within 3 s
    of the fault. This time covers the silence, and the wait for the next check (at most half of
    ``heartbeat_s``). It also covers the opening of a stream, which may itself meet a dead peer.

    Raises ``ConfigError`` for values that contradict each other.
    """

    heartbeat_s: float = 0.4
    """Period of heartbeats on a session or link."""
    silence_s: float = 2.0
    """A peer that sent nothing for this long, not even a heartbeat, counts as failed. While its
    heartbeats are late, the time grows, up to ``MAX_EXTENSION`` times."""
    open_s: float = 2.5
    """Timeout for dialling a peer and opening a stream."""
    alive_s: float = 0.5
    """A peer that was heard from within this time is not pinged when a stream to it is opened."""
    reply_s: float = 5.0
    """Timeout for the reply to a request."""
    first_message_s: float = 5.0
    """Timeout for the first message on an incoming stream of a new peer. Other peers have
    ``chunk_s``."""
    handshake_s: float = 5.0
    """Timeout of the membership handshake, dialling included. Callers may give it less."""
    link_wait_s: float = 5.0
    """Longest time for which a host keeps a link that arrives before its session."""
    client_silence_s: float = 30.0
    """A host ends the session of a client that was silent for this long."""
    first_step_s: float = 300.0
    """A host ends a session without a first step after this. The client opens another one when it
    has a step."""
    stall_s: float = 60.0
    """A hop that has its input, sends heartbeats and computes nothing for this long counts as
    failed."""
    pass_wait_s: float = 2.5
    """Longest time that decode steps may delay a waiting training pass. They may delay the next
    pass as long again."""
    recover_s: float = 12.0
    """Time for which a client looks for hosts of missing blocks before it gives up."""
    refresh_s: float = 5.0
    """Period at which a client with open sessions reads the directory."""
    ping_s: float = 1.0
    """Period of a client's pings to the hosts it knows."""
    pong_s: float = 1.0
    """A host that takes longer to answer a ping is chosen only if no other host has its blocks."""
    record_s: float = 45.0
    """Lifetime of a host's announcement in the directory."""
    announce_s: float = 15.0
    """Period of a host's announcements."""
    address_check_s: float = 1.0
    """Seconds between two checks of a host's own addresses. A change is announced at once."""
    identity_announce_s: float = 60.0
    """Period of the announcements by which a second process with the same key is found.

    Usually both processes know within two periods."""
    chunk_s: float = 30.0
    """Timeout for one chunk of a job's state, one part of a training pass, or each MiB of any
    message, over the slowest link worth using.

    It is also the timeout for the first message on a stream of a peer that is known or has other
    streams here: its machine may be busy.
    """
    graph_s: float = 120.0
    """Time for which a host keeps the autograd graph of a forward pass for its backward pass."""
    matchmaking_heartbeat_s: float = 2.0
    """Period of the leader's heartbeats to followers. Longer than ``heartbeat_s``: followers wait
    long, and each gets every heartbeat."""
    matchmaking_silence_s: float = 8.0
    """A leader that sent nothing for this long, not even a heartbeat, counts as failed."""
    matchmaking_poll_s: float = 10.0
    """Longest pause between two checks on workers missing from a round. The first pauses are
    shorter: most failed workers are known by then."""
    locate_s: float = 10.0
    """Period at which a host pings another one, to correct its network coordinate."""
    intent_s: float = 1.0
    """Time for which a joining host collects the intents of others before it chooses its blocks."""

    def __post_init__(self) -> None:
        if self.silence_s < 3 * self.heartbeat_s:
            raise ConfigError(
                "silence_s must be at least 3 heartbeat_s: one late packet would look like a failure"
            )
        if self.matchmaking_silence_s < 3 * self.matchmaking_heartbeat_s:
            raise ConfigError(
                "matchmaking_silence_s must be at least 3 matchmaking_heartbeat_s: one late packet would look like a failure"
            )
        if self.record_s < 2 * self.announce_s:
            raise ConfigError(
                "record_s must be at least 2 announce_s: one lost announcement would hide a live host"
            )
        if self.recover_s < self.silence_s + self.open_s:
            raise ConfigError("recover_s must leave time to detect a dead replacement and try another")
        if self.stall_s < 20 * self.pass_wait_s:
            raise ConfigError(
                "stall_s must be at least 20 pass_wait_s: a host with queued passes would look failed"
            )
        if self.first_step_s < 2 * self.stall_s:
            raise ConfigError(
                "first_step_s must be at least 2 stall_s: the hops before compute the first step first"
            )
        if self.client_silence_s < 2 * self.silence_s:
            raise ConfigError(
                "client_silence_s must be at least 2 silence_s: a client recovers before its host gives up"
            )
