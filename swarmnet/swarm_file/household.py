"""A household swarm: the computers in one room. Its owner starts it on one of them, and the others
join by a code.

It is a private swarm like any other. Its swarm file and the authority's key are in the data
directory of the computer that started it. A computer that joined remembers which one it is.
"""

from pathlib import Path

from swarmnet import swarm_file
from swarmnet.swarm_file import FILE_NAME
from swarmnet.swarm_file.content import SwarmFile
from swarmnet.swarm_file.keys import KEY_NAME, load_key
from swarmnet.swarm_file.reader import NAME
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.machine.files import make_private, write_whole
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire.roles import Role

DEFAULT_NAME = "home"
_OWN_DIR = "households"
_JOINED_NAME = "household"
_INVITE_S = 600
"""Seconds that the invite of a newcomer is valid. It is redeemed at once."""


def own_household(data_dir: Path, name: str) -> Path:
    """Return the folder of the household swarm ``name`` that this computer started, and create it
    if missing. Raises ``ConfigError``."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a swarm",
            hint="use 1 to 64 letters, digits, '.', '_' and '-', a letter or digit first",
        )
    folder = data_dir / _OWN_DIR / name
    if not (folder / FILE_NAME).exists():
        from swarmnet.swarm_file.writer import NewSwarm, create

        make_private(folder)
        create(folder, NewSwarm(name), now=wall_clock(), overwrite=True)
    return folder


def find_own(data_dir: Path, name: str) -> Path | None:
    """Return the folder of the household swarm ``name`` that this computer started, if any."""
    folder = data_dir / _OWN_DIR / name
    return folder if (folder / FILE_NAME).exists() else None


def started_here(data_dir: Path, file: SwarmFile) -> Path | None:
    """Return the swarm file of a household swarm that this computer started; None for any other
    swarm."""
    folder = find_own(data_dir, file.name)
    if folder is None or swarm_file.load(folder).swarm_id != file.swarm_id:
        return None
    return folder / FILE_NAME


def is_household(data_dir: Path, file: SwarmFile) -> bool:
    """Return whether this computer started the swarm of ``file`` as a household, or joined it by a
    code."""
    return joined_household(data_dir) == file.swarm_id.hex() or started_here(data_dir, file) is not None


def invite_newcomer(folder: Path, peer: PeerId, label: str) -> str:
    """Return an invite to the household in ``folder`` for ``peer`` alone, as host and client."""
    from swarmnet_protocols.membership.invites import InviteTerms, make_invite

    file = swarm_file.load(folder)
    terms = InviteTerms(
        frozenset({Role.HOST, Role.CLIENT}), int(wall_clock()) + _INVITE_S, peer=peer, label=label
    )
    key = load_key(folder / KEY_NAME)
    return make_invite(terms, swarm=file.swarm_id, key=key, bootstrap=file.bootstrap)


def joined_household(data_dir: Path) -> str | None:
    """Return the id of the household swarm that this computer joined; None if it joined none."""
    try:
        return (data_dir / _JOINED_NAME).read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def remember_household(data_dir: Path, swarm_id: bytes) -> None:
    """Note that this computer joined a household swarm. Raises ``OSError``."""
    write_whole(data_dir / _JOINED_NAME, swarm_id.hex().encode(), mode=0o600)
