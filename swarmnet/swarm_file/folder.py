"""What a data directory keeps of a swarm: its newest file, our certificate, who is revoked, whom we let in."""

import re
from pathlib import Path

from swarmnet import swarm_file
from swarmnet.swarm_file import FILE_NAME
from swarmnet.swarm_file.content import SwarmFile
from swarmnet_protocols.errors import ConfigError, IncompatibleVersion, IntegrityError, SwarmnetError
from swarmnet_protocols.machine.files import write_whole


def folder_of(data_dir: Path, swarm_id: bytes) -> Path:
    """Where ``data_dir`` keeps what belongs to a swarm."""
    return data_dir / "swarms" / swarm_id.hex()


def remember(data_dir: Path, data: bytes, *, source: str = FILE_NAME) -> SwarmFile:
    """The swarm file in ``data``, which is kept from now on instead of an older one of the same swarm.

    Raises ``IntegrityError`` as :func:`check_follows` does.
    """
    file = swarm_file.parse(data, source=source)
    folder = folder_of(data_dir, file.swarm_id)
    path = folder / FILE_NAME
    if path.exists():
        known = swarm_file.load(path)
        check_follows(file, known, source)
        if file.serial == known.serial:
            return known
    try:
        write_whole(path, data, mode=0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot write into {folder}: {error.strerror}", hint="choose another --data-dir"
        ) from error
    return file


def check_follows(file: SwarmFile, known: SwarmFile, source: str) -> None:
    """Raise ``IntegrityError`` unless ``file`` is ``known`` or comes after it.

    An older file, handed out again, could bring back who was removed; so could another one with the same serial, or one
    signed with a key that was replaced.
    """
    if file.serial < known.serial:
        raise IntegrityError(
            f"{source} is older than the one used before: serial {file.serial} after {known.serial}",
            hint=f"get the current file from the person who runs the swarm, or name the swarm: {known.name}",
        )
    if file.serial == known.serial and file != known:
        raise IntegrityError(
            f"{source} is another file than the one used before, with the same serial {file.serial}",
            hint="ask the person who runs the swarm to sign the right one again: swarmnet swarm sign",
        )
    if known.authority and file.authority and not file.authority.continues(known.authority):
        raise IntegrityError(
            f"{source} has keys that do not follow from those known before",
            hint="an old key of the authority may be in wrong hands: ask the person who runs the swarm",
        )


def find(data_dir: Path, name: str) -> SwarmFile | None:
    """The swarm of this name, or with this id in hexadecimal, that ``data_dir`` knows.

    Raises ``ConfigError`` if there are several of that name. A file that cannot be read hides no other; ``IntegrityError`` or
    ``ConfigError``, as for ``swarm_file.load``, comes of it when it may be the one that is meant.
    """
    fitting: list[SwarmFile] = []
    damage: SwarmnetError | None = None
    for path in sorted((data_dir / "swarms").glob(f"*/{FILE_NAME}")):
        if not re.fullmatch("[0-9a-f]{64}", path.parent.name):
            continue
        try:
            file = swarm_file.load(path)
        except (ConfigError, IncompatibleVersion, IntegrityError) as error:
            damage = damage or error
            continue
        if name in {file.name, file.swarm_id.hex()}:
            fitting.append(file)
    if len(fitting) > 1:
        ids = ", ".join(file.swarm_id.hex()[:16] for file in fitting)
        raise ConfigError(
            f"{data_dir} knows several swarms {name!r}", hint=f"give the whole id; they begin with {ids}"
        )
    if not fitting and damage is not None:
        raise damage
    return fitting[0] if fitting else None
