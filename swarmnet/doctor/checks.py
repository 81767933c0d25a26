"""The checks: pure functions from facts to findings. A finding says what was found, why it matters,
and what to do next."""

import ipaddress
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from swarmnet.doctor.facts import BootstrapPeer, Disk, Facts, SecretFile
from swarmnet.units import counted, show_duration
from swarmnet_protocols.machine.clock import MAX_CLOCK_ERROR_S, SET_CLOCK

PYTHON = ((3, 11), (3, 13))
"""The oldest and the newest Python version that swarmnet is tested with."""
TESTED = {
    "torch": ">=2.4,<3",
    "transformers": ">=5.23,<5.24",
    "hivemind": ">=1.1.12,<1.2",
    "protobuf": ">=5,<8",
    "grpcio": ">=1.66,<2",
    "cryptography": ">=42",
    "safetensors": ">=0.4",
}
"""The versions of packages that swarmnet is tested with."""
GIB = 1 << 30
DISK_FAIL_BYTES, DISK_WARN_BYTES = GIB // 2, 5 * GIB
RAM_FAIL_BYTES, RAM_WARN_BYTES = GIB // 2, 2 * GIB
CLOCK_WARN_S = 30.0
"""Clock error in seconds that gives a warning. At ``MAX_CLOCK_ERROR_S``, peers refuse records and
certificates."""
FILE_WARN_S = 14 * 24 * 3600.0
"""Seconds before the expiry of a swarm file that give a warning."""
CERTIFICATE_WARN_S = 24 * 3600.0
"""Seconds before the expiry of a certificate that give a warning. With the default lifetime, it is
renewed days before."""


class Level(StrEnum):
    """The result of a check. FAIL: a node cannot run, or must not; WARN: it runs with a
    disadvantage; SKIP: not checked."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``fix``: the next step, mostly a command; every WARN and FAIL has
    one."""

    check: str
    level: Level
    text: str
    fix: str = ""


def examine(facts: Facts) -> list[Finding]:
    """Return all findings, from the parts of this machine to its place in the network."""
    return [
        *_python(facts),
        *_packages(facts),
        _kernels(facts),
        _device(facts),
        _memory(facts),
        *_model(facts),
        *map(_disk, facts.disks),
        *_secrets(facts),
        *_listening(facts),
        *_swarm(facts),
        *_peers(facts),
        *_local_network(facts),
        *_clock(facts),
        *_reachable(facts),
        *(_not_gathered(name, why) for name, why in facts.not_gathered.items()),
    ]


def _python(facts: Facts) -> Iterator[Finding]:
    oldest, newest = PYTHON
    version = ".".join(map(str, facts.python))
    if facts.python < oldest:
        text = f"Python {version} is too old: swarmnet needs {oldest[0]}.{oldest[1]} or newer"
        yield Finding("python", Level.FAIL, text, "python3.11 -m venv .venv, and install swarmnet there")
    elif facts.python > newest:
        text = f"Python {version} is untested: the newest tested version is {newest[0]}.{newest[1]}"
        yield Finding("python", Level.WARN, text, "python3.11 -m venv .venv, and install swarmnet there")
    else:
        yield Finding("python", Level.OK, f"Python {version}")


def _packages(facts: Facts) -> Iterator[Finding]:
    wrong = False
    for name, tested in TESTED.items():
        version = facts.installed.get(name)
        install = f"pip install {shlex.quote(name + tested)}"
        if version is None:
            wrong = True
            yield Finding(
                name, Level.FAIL, f"the package {name} is not installed: swarmnet needs it", install
            )
        elif not _within(version, tested):
            wrong = True
            too_old = not _within(version, tested.partition(",")[0])
            level = Level.FAIL if too_old else Level.WARN
            yield Finding(
                name,
                level,
                f"{name} {version} is {'too old' if too_old else 'untested'}: swarmnet is tested with {tested}",
                install,
            )
    if not wrong:
        main = ", ".join(f"{name} {facts.installed[name]}" for name in ("torch", "transformers", "hivemind"))
        yield Finding("packages", Level.OK, main)


def _within(version: str, tested: str) -> bool:
    try:
        return SpecifierSet(tested).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _kernels(facts: Facts) -> Finding:
    target = f" for {facts.target}" if facts.target else ""
    if facts.kernels == "wheel":
        return Finding("kernels", Level.OK, f"compiled kernels{target} came with swarmnet")
    if facts.kernels:
        return Finding("kernels", Level.OK, f"kernels{target} are compiled with {facts.kernels}")
    text = "no C compiler was found: without compiled kernels, a CPU decodes about half as fast"
    return Finding("kernels", Level.WARN, text, "install swarmnet from its wheel, or: sudo apt install gcc")


def _device(facts: Facts) -> Finding:
    gpu = facts.device.gpu
    if not gpu:
        return Finding("device", Level.OK, "no GPU: the CPU is used")
    if facts.device.usable:
        return Finding("device", Level.OK, gpu)
    text = f"torch cannot use the {gpu}: the CPU is used, which is slower"
    return Finding("device", Level.WARN, text, "pip install --force-reinstall torch")


def _free_bytes(facts: Facts) -> int:
    return min(facts.memory.available_bytes, facts.memory.limit_bytes or facts.memory.available_bytes)


def _model(facts: Facts) -> Iterator[Finding]:
    model = facts.model
    if model is None:
        return
    if model.error:
        yield Finding("model", Level.FAIL, model.error, model.hint)
        return
    if model.memory_bytes > _free_bytes(facts):
        text = f"all weights of {model.name} take {_gib(model.memory_bytes)} of memory, more than is free"
        yield Finding("model", Level.WARN, text, "swarmnet join … --num-blocks N, or --max-ram SIZE")
    if model.notice:
        fix = "choose a file of another quantisation, such as Q4_K_M or IQ4_XS"
        yield Finding("model", Level.WARN, f"{model.name}: {model.notice}", fix)
    elif model.memory_bytes <= _free_bytes(facts):
        yield Finding("model", Level.OK, f"{model.name} can be used")


def _memory(facts: Facts) -> Finding:
    free = _free_bytes(facts)
    text = f"{_gib(free)} of memory is free"
    if free < RAM_FAIL_BYTES and not facts.node:
        return Finding(
            "memory", Level.FAIL, f"{text}: too little for a node", "close other programs, or add memory"
        )
    if free < RAM_WARN_BYTES and not facts.node:
        return Finding(
            "memory",
            Level.WARN,
            f"{text}: enough for only a few blocks",
            "swarmnet join … --num-blocks 4 --max-cache 256MiB",
        )
    return Finding("memory", Level.OK, text)


def _disk(disk: Disk) -> Finding:
    if disk.error:
        fix = f"sudo chown -R $USER {shlex.quote(str(disk.path))}"
        if disk.is_read_only:
            fix = "swarmnet … --data-dir DIR --cache-dir DIR"
        return Finding("disk", Level.FAIL, f"cannot write {disk.purpose} into {disk.path}: {disk.error}", fix)
    text = f"{_gib(disk.free_bytes)} is free for {disk.purpose} in {disk.path}"
    fix = f"du -sh {shlex.quote(str(disk.path))}/* | sort -h"
    if disk.free_bytes < DISK_FAIL_BYTES:
        return Finding("disk", Level.FAIL, f"{text}: too little for a node", fix)
    if disk.free_bytes < DISK_WARN_BYTES:
        return Finding("disk", Level.WARN, f"{text}: too little for most models", fix)
    return Finding("disk", Level.OK, text)


def _secrets(facts: Facts) -> Iterator[Finding]:
    bad = [secret for secret in facts.secrets if not secret.is_ours or secret.mode & 0o077]
    for secret in bad:
        yield _open_secret(secret)
    if facts.secrets and not bad:
        yield Finding("keys", Level.OK, f"only you can read the keys in {facts.data_dir}")


def _open_secret(secret: SecretFile) -> Finding:
    path = shlex.quote(str(secret.path))
    if not secret.is_ours:
        return Finding(
            "keys",
            Level.FAIL,
            f"{secret.path} belongs to another user, who can read and replace keys",
            f"sudo chown $USER {path}",
        )
    mode = "700" if secret.path.suffix == "" and secret.mode & 0o100 else "600"
    return Finding(
        "keys",
        Level.FAIL,
        f"other users can read {secret.path}: whoever has this machine's keys can act in its name",
        f"chmod {mode} {path}",
    )


def _listening(facts: Facts) -> Iterator[Finding]:
    if facts.node:
        yield Finding("node", Level.OK, f"the command that uses {facts.data_dir} is {facts.node}")
    if facts.node_reached:
        level = Level.WARN if facts.node_advice else Level.OK
        yield Finding("reach", level, f"peers reach the node {facts.node_reached}", facts.node_advice)
    if facts.node_warning:
        yield Finding("node", Level.WARN, facts.node_warning, "swarmnet finish, on one of the two machines")
    for each in facts.listening:
        if each.error:
            yield Finding("listen", Level.FAIL, each.error, each.hint)
        else:
            yield Finding("listen", Level.OK, f"{each.address} is free")


def _swarm(facts: Facts) -> Iterator[Finding]:
    swarm = facts.swarm
    if swarm is None:
        text = "no swarm was given: its peers, the clock and whether peers can dial this machine were not checked"
        yield Finding("swarm", Level.SKIP, text, "swarmnet doctor --swarm SWARM")
        return
    if swarm.error:
        yield Finding("swarm", Level.FAIL, swarm.error, swarm.hint)
        return
    expires = swarm.not_after
    if expires is not None and expires - facts.now < FILE_WARN_S:
        text = f"the swarm file of {swarm.name} expires in {show_duration(expires - facts.now)}: then nodes refuse it"
        yield Finding("swarm", Level.WARN, text, "ask the person who runs the swarm for the next swarm file")
    else:
        yield Finding("swarm", Level.OK, f"the swarm file of {swarm.name} is valid")
    if not swarm.needs_certificate:
        return
    if swarm.certificate_error:
        fix = "ask the person who runs the swarm for an invite, then: swarmnet join INVITE"
        yield Finding("certificate", Level.FAIL, swarm.certificate_error, fix)
    elif swarm.certificate_until is not None and swarm.certificate_until - facts.now < CERTIFICATE_WARN_S:
        text = (
            f"the certificate expires in {show_duration(swarm.certificate_until - facts.now)}: no issuer has renewed it,"
            " and without it peers refuse this machine"
        )
        yield Finding(
            "certificate", Level.WARN, text, "check whether an issuer runs: swarmnet swarm members SWARM"
        )
    else:
        yield Finding("certificate", Level.OK, "this machine is a member")


def _peers(facts: Facts) -> Iterator[Finding]:
    if facts.swarm is None or facts.swarm.error or "peers" in facts.not_gathered:
        return
    if not facts.peers and facts.swarm.mdns:
        text = "the swarm file lists no bootstrap peer: nodes find the swarm in their local network only"
        yield Finding("bootstrap", Level.OK, text)
        return
    if not facts.peers:
        text = "the swarm file lists no bootstrap peer: a node cannot find the swarm without one"
        fix = "swarmnet swarm sign SWARM --bootstrap ADDR, with an address that a node prints"
        yield Finding("bootstrap", Level.WARN, text, fix)
        return
    silent = [peer for peer in facts.peers if peer.probed is None]
    if len(silent) == len(facts.peers):
        text = f"none of {len(silent)} bootstrap peers answers: {silent[0].error}"
        yield Finding(
            "bootstrap", Level.FAIL, text, "check that one of them runs, or give another: --bootstrap ADDR"
        )
        return
    for peer in silent:
        text = f"the bootstrap peer {_short(peer)} does not answer: {peer.error}"
        yield Finding(
            "bootstrap", Level.WARN, text, "if it is gone for good, ask for a swarm file without it"
        )
    fastest = min(peer.probed.round_trip_s for peer in facts.peers if peer.probed)
    text = f"{len(facts.peers) - len(silent)} of {len(facts.peers)} bootstrap peers answer"
    yield Finding("bootstrap", Level.OK, f"{text}, the first after {1000 * fastest:.0f} ms")


def _local_network(facts: Facts) -> Iterator[Finding]:
    if facts.swarm is None or facts.swarm.error or "local peers" in facts.not_gathered:
        return
    if not facts.swarm.mdns:
        yield Finding("mdns", Level.OK, "mDNS is off: the swarm file does not switch it on")
    elif facts.local_peers or any(peer.probed for peer in facts.peers):
        found = counted(facts.local_peers, "peer")
        yield Finding("mdns", Level.OK, f"mDNS is on, and found {found} in the local network")
    else:
        text = "mDNS is on, and found no peer in the local network"
        fix = (
            "start a node there; if one runs, this network drops multicast between machines: --bootstrap ADDR"
        )
        yield Finding("mdns", Level.WARN, text, fix)


def _clock(facts: Facts) -> Iterator[Finding]:
    errors_s = [peer.probed.behind_s for peer in facts.peers if peer.probed]
    if not errors_s:
        return
    behind_s = median(errors_s)
    if abs(behind_s) < CLOCK_WARN_S:
        yield Finding("clock", Level.OK, f"the clock agrees with {counted(len(errors_s), 'peer')}")
        return
    way = "behind" if behind_s > 0 else "ahead of"
    text = (
        f"the clock is {show_duration(abs(behind_s))} {way} {counted(len(errors_s), 'peer')}:"
        f" from {show_duration(MAX_CLOCK_ERROR_S)} on, records and certificates are refused"
    )
    level = Level.FAIL if abs(behind_s) >= MAX_CLOCK_ERROR_S else Level.WARN
    yield Finding("clock", level, text, SET_CLOCK)


def _reachable(facts: Facts) -> Iterator[Finding]:
    probed = [peer.probed for peer in facts.peers if peer.probed]
    if not probed:
        return
    direct = [each for each in probed if each.observed_ip]
    if not direct or not facts.ports:
        text = "peers see this machine only through a relay: whether they can dial it is unknown"
        yield Finding("reachable", Level.WARN, text, _OPEN)
        return
    reached = [each for each in direct if each.reached]
    ports = ", ".join(map(str, facts.ports))
    if not reached:
        text = (
            f"no peer could dial TCP port {ports}: peers must use this node through relays, which is slower"
        )
        yield Finding("reachable", Level.WARN, text, _OPEN)
    elif not any(ipaddress.ip_address(each.observed_ip).is_global for each in reached):
        text = f"peers in your own network can dial TCP port {ports}; there was no peer outside it to ask"
        yield Finding("reachable", Level.OK, text)
    else:
        yield Finding("reachable", Level.OK, f"peers outside your network can dial TCP port {ports}")


def _not_gathered(name: str, why: str) -> Finding:
    return Finding(name, Level.WARN, f"could not be checked: {why}", "run `swarmnet doctor` again")


_OPEN = (
    "sudo ufw allow 31337; forward TCP and UDP 31337 on your router; then "
    "swarmnet join … --listen /ip4/0.0.0.0/tcp/31337 --listen /ip4/0.0.0.0/udp/31337/quic-v1"
)


def _short(peer: BootstrapPeer) -> str:
    return f"…{peer.address[-12:]}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


def worst(findings: Sequence[Finding]) -> Level:
    """Return the worst level among the findings."""
    levels = {finding.level for finding in findings}
    return next((level for level in (Level.FAIL, Level.WARN) if level in levels), Level.OK)
