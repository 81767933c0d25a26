"""Every deadline of the conversations between peers, in one place, with the relations they must keep."""

from dataclasses import dataclass

from swarmnet_protocols.errors import ConfigError


@dataclass(frozen=True)
class Timing:
    """Deadlines and periods, in seconds. Two peers need not agree on them.

    A stopped peer or a cut path is noticed after ``silence_s``, and replaced within 3 s of the fault: silence, plus
    the worst wait for the next look (``beat_s / 2``), plus an open that may itself meet a dead peer.
    """

    heartbeat_s: float = 0.4
    """Between two beats on a stream in use."""
    silence_s: float = 2.0
    """A peer that sent nothing, not even a beat, for this long is taken for gone."""
    open_s: float = 2.5
    """To dial a peer and open a stream."""
    alive_s: float = 0.5
    """A connection over which nothing comes back for so long after a stream was opened, no echo either, carries nothing: it is closed."""
    reply_s: float = 5.0
    """For the first answer on a stream that opened."""
    opening_s: float = 5.0
    """Whoever opens a stream has said its first word by then; who has others in use, or is served, by ``chunk_s``."""
    handshake_s: float = 6.0
    """Whoever connects is a peer of libp2p by then, unless it is far away."""
    door_s: float = 5.0
    """To reach somebody for the first time, and for what they have to say at the door. Whoever is in a hurry need not wait."""
    link_wait_s: float = 5.0
    """A link may arrive this much before the session it belongs to."""
    client_silence_s: float = 30.0
    """A host frees the session of a client that was silent for this long."""
    first_step_s: float = 300.0
    """A host ends a session whose first step has not come for so long. Its client opens another one when it has a step."""
    stall_s: float = 60.0
    """A hop that has its input and beats but computes nothing for this long is taken for broken."""
    overtaken_s: float = 2.5
    """Sessions' work goes before a pass that waits for so long and no longer, and then for as long before the next one."""
    recover_s: float = 12.0
    """A client looks this long for somebody who hosts the missing blocks."""
    refresh_s: float = 5.0
    """Between two looks at the directory by a client in use."""
    ping_s: float = 1.0
    """Between two pings of the hosts a client knows."""
    pong_s: float = 1.0
    """A host that answers later than this is not chosen while there is another."""
    record_s: float = 45.0
    """Lifetime of a host's announcement."""
    announce_s: float = 15.0
    """Between two announcements by a host."""
    presence_s: float = 60.0
    """Between two words of a process that it is there under its identity: of a copy of its key its owner is told within one and a half."""
    chunk_s: float = 30.0
    """For a chunk of a job's state, a part of a pass, or each MiB of any message: over the slowest line that is worth waiting for.

    And for the first word on a stream of somebody who is at work with us, and whose machine may be busy.
    """
    graph_s: float = 120.0
    """A host keeps what a forward pass left for its backward pass no longer than this."""
    matchmaking_heartbeat_s: float = 2.0
    """Between two beats to a worker that waits for a round to begin: some wait long, and every beat is sent to all of them."""
    matchmaking_silence_s: float = 8.0
    """A gatherer that sent nothing, not even a beat, for this long is taken for gone."""
    matchmaking_probe_s: float = 10.0
    """Longest time between two looks after those who have not come to a round: sooner at first, as most who are dead are dead by then."""
    intent_s: float = 1.0
    """How long a joining host waits for the intents of others before it settles on its blocks."""

    def __post_init__(self) -> None:
        if self.silence_s < 3 * self.heartbeat_s:
            raise ConfigError("silence_s must be at least three beats, or one late packet looks like a death")
        if self.silence_s < self.alive_s + 3 * self.heartbeat_s:
            raise ConfigError("silence_s must leave room to find a dead connection, dial anew and be heard")
        if self.matchmaking_silence_s < 3 * self.matchmaking_heartbeat_s:
            raise ConfigError(
                "matchmaking_silence_s must be at least three beats, or one late packet looks like a death"
            )
        if self.record_s < 2 * self.announce_s:
            raise ConfigError("record_s must outlast two announcements, or one lost store hides a live host")
        if self.recover_s < self.silence_s + self.open_s:
            raise ConfigError("recover_s must leave room to notice a dead replacement and try another")
        if self.stall_s < 20 * self.overtaken_s:
            raise ConfigError("stall_s must outlast a queue of passes, or a host that is busy looks broken")
        if self.first_step_s < 2 * self.stall_s:
            raise ConfigError(
                "first_step_s must leave the hosts before one the time to compute the first step"
            )
        if self.client_silence_s < 2 * self.silence_s:
            raise ConfigError("a host must be more patient with a client than a client with a host")
