"""The scenarios of the simulator at scale. Each is a function of a rule, a number of hosts and a
seed, and gives a :class:`Result`."""

import math
import random
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass, field
from statistics import mean

from swarmnet_client.hosts.pings import drawn
from swarmnet_protocols.net import PeerId
from tests.sim.scale.clients import Clients, Hosted, first_by_id
from tests.sim.scale.costs import client_refresh_bytes, traffic_per_node
from tests.sim.scale.population import (
    CONTINENTS,
    DAY,
    HOUR,
    KINDS,
    SHAPE,
    SILENT,
    Kind,
    Peer,
    arrivals_per_s,
    lifetime,
    random_peer_id,
    random_place,
    residual,
    two_decades,
    weibull,
)
from tests.sim.scale.rules import RULES
from tests.sim.scale.swarm import Measures, SimulatedHost, SimulatedSwarm

BLOCKS = 80
LENGTH = 10
"""Blocks of each host where all are equal."""
LENGTHS = (4, 6, 8, 10, 12, 16, 20)
"""Blocks of hosts otherwise, equally often."""
SPEED = 20.0
"""Blocks per second of each host where all are equal: a large model on processors."""
CLIENTS = 200
COVERED_S = 120.0
"""Within which every block must have a host again after many left."""
CLIENT_ROUNDS = 24
"""Two minutes, after which the work of hosts is measured."""
SLANDER_DRAWS = 4
"""Draws of clients over which the work of slandered hosts is averaged: of 60 clients, those of one
draw give a host that few others can replace up to a third more or less."""


@dataclass
class Result:
    """What one scenario gave; the fields of ``--json``, and more figures for the table."""

    scenario: str
    nodes: int
    coverage: float
    """Mean share of blocks with a host."""
    throughput_of_optimum: float
    """Of clients, where the scenario is about them; else mean throughput of the hosts, divided by
    that of the same hosts if each had every block."""
    busiest_tenth: float
    """Share of all work that the busiest tenth of the hosts does for 200 clients."""
    moves_per_node_hour: float
    messages_per_node_s: float
    bytes_per_node_s: float
    client_refresh_bytes: int
    wall_s: float = 0.0
    notes: dict[str, float] = field(default_factory=dict)
    trace: str = ""
    """Hash of all that happened."""
    measures: Measures = field(default_factory=Measures)

    def row(self) -> dict[str, object]:
        """The fields of ``--json``."""
        row = asdict(self)
        return {name: row[name] for name in row if name not in ("notes", "trace", "measures")}


@dataclass(frozen=True)
class Setting:
    """What a scenario is run with."""

    rule: str
    nodes: int
    seed: int
    clients: int = CLIENTS
    days: float = 1.0
    """Length of the daily cycle."""

    def swarm(self, blocks: int = BLOCKS) -> SimulatedSwarm:
        return SimulatedSwarm(RULES[self.rule], self.seed, blocks=blocks)

    def clients_of(self, swarm: SimulatedSwarm, number: int = 0) -> Clients:
        """Clients of these hosts; another ``number`` gives others."""
        hosts = [Hosted(host.peer, *host.span) for host in swarm.serving() if host.span is not None]
        draw = first_by_id if self.rule == "none" else drawn
        return Clients(hosts, self.clients, self.seed + number, blocks=swarm.blocks, draw=draw)


Scenario = Callable[[Setting], Result]


def _equal_hosts(rng: random.Random, count: int, speed: float = SPEED) -> list[Peer]:
    return [Peer(random_peer_id(rng), speed, LENGTH, random_place(rng)) for _ in range(count)]


def _uneven_host(rng: random.Random) -> Peer:
    return Peer(random_peer_id(rng), two_decades(rng), rng.choice(LENGTHS), random_place(rng))


def _result(
    scenario: str,
    swarm: SimulatedSwarm,
    clients: Clients,
    of_optimum: float | None = None,
    **notes: float,
) -> Result:
    measures = swarm.measures
    nodes = round(mean(measures.hosts)) if measures.hosts else len(swarm.serving())
    hours = measures.host_s / HOUR
    messages, size = traffic_per_node(nodes)
    return Result(
        scenario,
        nodes,
        mean(measures.coverage) if measures.coverage else 1.0,
        mean(measures.of_optimum) if of_optimum is None else of_optimum,
        clients.busiest_tenth,
        measures.moves / hours if hours else 0.0,
        messages,
        size,
        client_refresh_bytes(nodes),
        notes=notes,
        trace=swarm.trace,
        measures=measures,
    )


def idle_clients(setting: Setting) -> Result:
    """200 clients choose chains over equal hosts, at first without any load, and then again and
    again."""
    rng = random.Random(setting.seed)
    swarm = setting.swarm()
    swarm.place(_equal_hosts(rng, setting.nodes))
    clients = setting.clients_of(swarm)
    clients.run(1)
    served, busiest = clients.served, clients.busiest_tenth
    clients.run(CLIENT_ROUNDS)
    of_optimum = clients.tokens_per_s / clients.optimum()
    return _result(
        "idle clients",
        swarm,
        clients,
        of_optimum,
        first_served=served / setting.nodes,
        first_busiest=busiest,
        later_served=clients.served / setting.nodes,
    )


def third_leaves(setting: Setting) -> Result:
    """Half of equal hosts are replaced within an hour; then a third leaves without a word, and none
    joins for another hour."""
    rng = random.Random(setting.seed)
    swarm = setting.swarm()
    swarm.place(_equal_hosts(rng, setting.nodes))

    def replace_one() -> None:
        swarm.leave(rng.choice(swarm.serving()), silent=rng.random() < SILENT)
        swarm.join(*_equal_hosts(rng, 1))

    for _ in range(setting.nodes // 2):
        swarm.after(rng.uniform(0, HOUR), replace_one)
    swarm.run(HOUR)
    steady, steady_moves = swarm.measures.since(0), swarm.measures.moves / swarm.measures.host_s * HOUR
    for host in rng.sample(swarm.serving(), round(len(swarm.serving()) / 3)):
        swarm.leave(host, silent=True)
    swarm.run(HOUR + COVERED_S)
    covered = swarm.measures.coverage[-1] == 1.0
    swarm.run(HOUR + HOUR / 2)
    moved = swarm.measures.moves
    swarm.run(2 * HOUR)
    clients = setting.clients_of(swarm)
    clients.run(1)
    after = swarm.measures.since(HOUR + COVERED_S)
    return _result(
        "a third leaves",
        swarm,
        clients,
        before=steady.of_optimum[-1],
        steady_moves=steady_moves,
        covered_in_time=float(covered),
        unserved=float(min(after.coverage) < 1.0),
        after=after.of_optimum[-1],
        weakest=after.weakest[-1],
        late_moves=(swarm.measures.moves - moved) / len(swarm.serving()),
    )


def half_hour_lifetimes(setting: Setting) -> Result:
    """Hosts of uneven speeds and lengths that stay half an hour on average, for an hour; of more
    than 2000 hosts for 20 minutes."""
    rng = random.Random(setting.seed)
    swarm = setting.swarm()
    mean_s = HOUR / 2
    for host in swarm.place(_uneven_host(rng) for _ in range(setting.nodes)):
        _leave_later(swarm, rng, host, residual(rng, SHAPE, mean_s))

    def arrive() -> None:
        swarm.join(_uneven_host(rng), weibull(rng, SHAPE, mean_s), silent=rng.random() < SILENT)
        swarm.after(rng.expovariate(setting.nodes / mean_s), arrive)

    swarm.after(rng.expovariate(setting.nodes / mean_s), arrive)
    swarm.run(HOUR if setting.nodes <= 2000 else HOUR / 3)
    return _served(setting, swarm, "half-hour lifetimes")


def daily_cycle(setting: Setting) -> Result:
    """Always-on hosts, evening machines and visitors of four continents, for a day."""
    rng = random.Random(setting.seed)
    swarm = setting.swarm()
    for host in swarm.place(_uneven_host(rng) for _ in range(setting.nodes)):
        [kind] = rng.choices(list(KINDS), list(KINDS.values()))
        _leave_later(swarm, rng, host, lifetime(rng, kind) * rng.random())
    highest = {kind: 1.5 * arrivals_per_s(kind, setting.nodes, 0.0, 0) for kind in KINDS}

    def arrive(kind: Kind, continent: int) -> None:
        if rng.random() < arrivals_per_s(kind, setting.nodes, swarm.now, continent) / highest[kind]:
            swarm.join(_uneven_host(rng), lifetime(rng, kind), silent=rng.random() < SILENT)
        swarm.after(rng.expovariate(highest[kind]), lambda: arrive(kind, continent))

    for kind in KINDS:
        for continent in range(len(CONTINENTS)):
            swarm.after(rng.expovariate(highest[kind]), lambda kind=kind, at=continent: arrive(kind, at))
    swarm.run(setting.days * DAY)
    return _served(
        setting, swarm, "daily cycle", fewest=min(swarm.measures.hosts), most=max(swarm.measures.hosts)
    )


def outages(setting: Setting) -> Result:
    """The tenth of the hosts nearest to one of them is down for 20 minutes; after an hour, half of
    all hosts end within ten minutes."""
    rng = random.Random(setting.seed)
    swarm = setting.swarm()
    swarm.place(_uneven_host(rng) for _ in range(setting.nodes))
    swarm.run(600)
    middle = rng.choice(swarm.serving()).peer.place.position
    near = sorted(swarm.serving(), key=lambda host: math.dist(middle, host.peer.place.position))
    down = near[: round(len(near) / 10)]
    for host in down:
        swarm.leave(host, silent=True)
    swarm.run(1800)
    for host in down:
        swarm.join(host.peer)
    swarm.run(HOUR)
    for host in rng.sample(swarm.serving(), len(swarm.serving()) // 2):
        _leave_later(swarm, rng, host, rng.uniform(0, 600))
    swarm.run(2 * HOUR)
    after = swarm.measures.since(HOUR + 600 + COVERED_S)
    return _served(
        setting,
        swarm,
        "outages",
        after=mean(after.of_optimum),
        unserved=float(min(after.coverage) < 1.0),
        suffices=float(sum(host.peer.length for host in swarm.serving()) >= swarm.blocks),
    )


def started_together(setting: Setting) -> Result:
    """All hosts start within a second on a model of 30 blocks; 20 of them at most. Loads: the work
    of hosts over a minute, in multiples of the mean."""
    rng = random.Random(setting.seed)
    swarm = setting.swarm(30)
    for host in _equal_hosts(rng, min(setting.nodes, 20)):
        swarm.after(rng.uniform(0, 1.0), lambda host=host: swarm.join(host) and None)
    swarm.run(HOUR)
    clients = setting.clients_of(swarm)
    clients.run(CLIENT_ROUNDS)
    loads = list(clients.minute.values())
    result = _result(
        "started together",
        swarm,
        clients,
        swarm.measures.of_optimum[-1],
        most_moves=max(host.moves for host in swarm.serving()),
        highest_load=max(loads) / mean(loads),
        lowest_load=min(loads) / mean(loads),
    )
    result.coverage = swarm.measures.coverage[-1]
    return result


def liars(setting: Setting) -> Result:
    """One of 20 equal hosts announces a hundred times its speed, and has a mined peer id;
    ``liars_share``: its work, in shares of an honest host."""
    rng = random.Random(setting.seed)
    peers = _equal_hosts(rng, setting.nodes)
    lying = {f"12D3KooW{number:050x}" for number in range(max(setting.nodes // 20, 1))}
    for peer, name in zip(peers, sorted(lying), strict=False):
        peer.peer, peer.announced = PeerId(name), 100 * peer.speed
    rng.shuffle(peers)
    swarm = setting.swarm()
    swarm.place(peers)
    clients = setting.clients_of(swarm)
    clients.run(1)
    first = _share(clients.work, lying)
    clients.run(12)  # a minute
    return _result(
        "liars",
        swarm,
        clients,
        clients.tokens_per_s / clients.optimum(),
        liars_share_at_first=first,
        liars_share=_share(clients.work, lying),
    )


def slanderers(setting: Setting) -> Result:
    """Three of ten equal hosts report to clients that they do not reach those of one in 20, which
    are honest.

    ``honest_share`` and ``slandered_share``: the work of these over two minutes, in shares of
    another host, without such reports and with them, the mean of ``SLANDER_DRAWS`` draws of
    clients.
    """
    rng = random.Random(setting.seed)
    peers = _equal_hosts(rng, setting.nodes)
    swarm = setting.swarm()
    swarm.place(peers)
    names = [peer.peer for peer in rng.sample(peers, max(round(0.35 * setting.nodes), 2))]
    slandered = frozenset(names[: max(setting.nodes // 20, 1)])
    shares: dict[bool, list[float]] = {False: [], True: []}
    of_optimum, reports = [], 0
    for number in range(SLANDER_DRAWS):
        for reported in (False, True):
            clients = setting.clients_of(swarm, number)
            clients.slandered = slandered
            clients.slanderers = frozenset(names) - slandered if reported else frozenset()
            clients.run(1 + CLIENT_ROUNDS)
            shares[reported].append(_share(clients.minute, slandered))
        of_optimum.append(clients.tokens_per_s / clients.optimum())
        reports += clients.reports
    return _result(
        "slanderers",
        swarm,
        clients,
        mean(of_optimum),
        honest_share=mean(shares[False]),
        slandered_share=mean(shares[True]),
        reports=reports,
    )


def _share(work: Mapping[PeerId, float], chosen: Set[str]) -> float:
    """The mean work of the ``chosen`` hosts, divided by that of the others."""
    those = [each for peer, each in work.items() if peer in chosen]
    others = [each for peer, each in work.items() if peer not in chosen]
    return mean(those) / mean(others)


def _leave_later(swarm: SimulatedSwarm, rng: random.Random, host: SimulatedHost, after_s: float) -> None:
    silent = rng.random() < SILENT
    swarm.after(after_s, lambda: swarm.leave(host, silent=silent))


def _served(setting: Setting, swarm: SimulatedSwarm, scenario: str, **notes: float) -> Result:
    """The result of a scenario at whose end clients come."""
    clients = setting.clients_of(swarm)
    clients.run(1)
    lowest = min(swarm.measures.block_coverage())
    return _result(
        scenario,
        swarm,
        clients,
        lowest_block=lowest,
        lowest_throughput=min(swarm.measures.of_optimum),
        steady_moves=(swarm.measures.moves - swarm.measures.repairs) / swarm.measures.host_s * HOUR,
        repairs_per_leave=swarm.measures.repairs / max(swarm.measures.leaves, 1),
        **notes,
    )


SCENARIOS: dict[str, Scenario] = {
    "idle-clients": idle_clients,
    "third-leaves": third_leaves,
    "half-hour-lifetimes": half_hour_lifetimes,
    "daily-cycle": daily_cycle,
    "outages": outages,
    "started-together": started_together,
    "liars": liars,
    "slanderers": slanderers,
}


def run(name: str, setting: Setting) -> Result:
    """The result of one scenario, with the seconds that it took."""
    started = time.perf_counter()
    result = SCENARIOS[name](setting)
    result.wall_s = time.perf_counter() - started
    return result
