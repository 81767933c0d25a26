"""The swarm files that a data directory stores, in one folder for each swarm with an authority.

``store_file`` refuses a file older than the stored one, because an old file would readmit removed
members (rollback protection, as in The Update Framework).
"""

import re
from contextlib import suppress
from pathlib import Path

from swarmnet import swarm_file
from swarmnet.swarm_file import FILE_NAME
from swarmnet.swarm_file.content import SwarmFile
from swarmnet_protocols.errors import ConfigError, IncompatibleVersion, IntegrityError, SwarmnetError
from swarmnet_protocols.machine.files import write_whole


def swarm_dir(data_dir: Path, swarm_id: bytes) -> Path:
    """Return the folder of one swarm in ``data_dir``."""
    return data_dir / "swarms" / swarm_id.hex()


def store_file(data_dir: Path, data: bytes, *, source: str = FILE_NAME) -> SwarmFile:
    """Verify the swarm file ``data`` and store it in place of an older one of the same swarm.

    Raises what ``swarm_file.load`` and ``check_update`` raise, and ``ConfigError`` if the data
    directory cannot be written.
    """
    file = swarm_file.parse(data, source=source)
    folder = swarm_dir(data_dir, file.swarm_id)
    path = folder / FILE_NAME
    if path.exists():
        stored = swarm_file.load(path)
        check_update(file, stored, source)
        if file.serial == stored.serial:
            return stored
    try:
        write_whole(path, data, mode=0o600)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return file


def cannot_write(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write into {folder}: {error.strerror}", hint="choose another --data-dir")


def check_update(file: SwarmFile, stored: SwarmFile, source: str) -> None:
    """Raise ``IntegrityError`` unless ``file`` is ``stored`` or a newer file.

    A lower serial is refused, and so is another file with the same serial. A file whose keys do not
    continue the stored rotations is refused, because a replaced key may be stolen.
    """
    if file.serial < stored.serial:
        raise IntegrityError(
            f"{source} is older than the one used before: serial {file.serial} after {stored.serial}",
            hint=f"get the current file from the person who runs the swarm, or name the swarm: {stored.name}",
        )
    if file.serial == stored.serial and file != stored:
        raise IntegrityError(
            f"{source} differs from the file used before, but has the same serial {file.serial}",
            hint="ask the person who runs the swarm to sign the right file again: swarmnet swarm sign",
        )
    if stored.authority and file.authority and not file.authority.continues(stored.authority):
        raise IntegrityError(
            f"{source} does not continue the authority keys of the file used before",
            hint="an old key of the authority may be stolen: ask the person who runs the swarm",
        )


def stored_names(data_dir: Path) -> list[str]:
    """Return the names of the stored swarms whose files can be read."""
    names = []
    for path in (data_dir / "swarms").glob(f"*/{FILE_NAME}"):
        with suppress(ConfigError, IncompatibleVersion, IntegrityError):
            names.append(swarm_file.load(path).name)
    return names


def find_swarm(data_dir: Path, name: str) -> SwarmFile | None:
    """Return the stored swarm file with this name, or with this id in hexadecimal; None if there is
    none.

    Raises ``ConfigError`` if several swarms have the name. If no file matches and a file is
    damaged, its error is raised, because that file may have the name.
    """
    matches: list[SwarmFile] = []
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
            matches.append(file)
    if len(matches) > 1:
        ids = ", ".join(file.swarm_id.hex()[:16] for file in matches)
        raise ConfigError(
            f"{data_dir} has several swarms named {name!r}", hint=f"give the whole id; they begin with {ids}"
        )
    if not matches and damage is not None:
        raise damage
    return matches[0] if matches else None
