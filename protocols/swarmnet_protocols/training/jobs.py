"""Jobs: the signed description of a training run on which all its workers agree.

1. The owner writes a TOML file (``load_job``).
2. The owner publishes the sealed job (``seal_job``): canonical JSON with the owner's Ed25519 key
   and signature.
3. Each worker fetches and verifies the sealed job (``open_job``). The id of a job is a hash of its
   content and its owner, so a worker that has the id knows the owner.

``job_settings.py`` has what a job says.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.machine.toml_lines import line_of
from swarmnet_protocols.net.identity import KEY_BYTES, SIGNATURE_BYTES, Identity, verify
from swarmnet_protocols.training.job_settings import DataSource, Job, JobError
from swarmnet_protocols.wire.canonical_json import canonical_json

FORMAT = 4
MAX_JOB_BYTES = 64 << 10
_OF_FILES = {"architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"}
"""Keys of a ``config.json`` that describe a checkpoint's files or code rather than its
architecture."""
_OTHER_VERSION = ConfigError(
    "this job was made by another version of swarmnet",
    hint="train it with that version, or make it anew from its job file: swarmnet train create JOB.toml",
)
_ID_DOMAIN = b"swarmnet-training-job-id-1\0"
_SIGNATURE_DOMAIN = b"swarmnet-training-job-1\0"


@dataclass(frozen=True)
class SealedJob:
    """A job with the Ed25519 public key (32 bytes) of its owner, who signed it."""

    job: Job
    owner: bytes

    @property
    def id(self) -> str:
        """The SHA-256 of the canonical job and its owner, as 64 hexadecimal digits."""
        return job_id(_signed_fields(self.job, self.owner))

    @contextmanager
    def naming_job(self) -> Iterator[None]:
        """Convert a ``JobError`` raised inside to a ``ConfigError`` that names the job."""
        try:
            yield
        except JobError as error:
            raise ConfigError(f"job {self.id[:16]}…: {error}", hint=error.hint) from error


@dataclass(frozen=True)
class JobFile:
    """A job with the text and the path that it was read from."""

    job: Job
    text: str
    source: str

    @contextmanager
    def naming_lines(self) -> Iterator[None]:
        """Convert a ``JobError`` raised inside to a ``ConfigError`` that names file and line."""
        try:
            yield
        except JobError as error:
            raise _located(error, self.text, self.source) from error


def load_job(path: Path) -> JobFile:
    """Read and validate a job file. Raises ``ConfigError`` with file, line and key."""
    return parse_job(job_bytes(path), source=str(path))


def job_bytes(path: Path) -> bytes:
    """Read a job file, up to one byte more than a job may have. Raises ``ConfigError``."""
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_JOB_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the job file {path}: {error.strerror}",
            hint="write one with `swarmnet train template METHOD > job.toml`",
        ) from error


def parse_job(data: bytes, *, source: str = "job.toml") -> JobFile:
    """Parse and validate a TOML job, and read the ``config.json`` if it names one.

    Raises the errors of ``load_job``, which name ``source``.
    """
    if len(data) > MAX_JOB_BYTES:
        raise ConfigError(f"{source} is larger than {MAX_JOB_BYTES} bytes", hint="this is not a job file")
    try:
        text = data.decode()
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}", hint="correct it") from error
    if isinstance(method := document.get("method"), dict):
        document["method"] = {"settings": {k: v for k, v in method.items() if k != "name"}}
        if "name" in method:
            document["method"]["name"] = method["name"]
    try:
        if isinstance(model := document.get("model"), dict) and isinstance(model.get("config"), str):
            document["model"] = {**model, "config": _config_file(Path(model["config"]))}
        job = _validate(document)
        if any(source.needs_path and not source.is_own for source in job.data.sources):
            raise JobError("data", "", "needs 'path' or 'hub', or source = \"own\"")
        job.check()
    except JobError as error:
        raise _located(error, text, source) from error
    return JobFile(job, text, source)


def seal_job(job: Job, owner: Identity) -> bytes:
    """Sign a job as ``owner`` and return its sealed form, at most ``MAX_JOB_BYTES`` bytes.

    Raises ``ConfigError`` for a larger job, and for a job that cannot be published
    (``Job.check_published``).
    """
    job.check_published()
    fields = _signed_fields(job, owner.public_key)
    signature = owner.sign(_SIGNATURE_DOMAIN + fields)
    sealed = canonical_json({**json.loads(fields), "signature": signature.hex()})
    if len(sealed) > MAX_JOB_BYTES:
        raise ConfigError(f"the job is larger than {MAX_JOB_BYTES} bytes", hint="shorten its model config")
    return sealed


def open_job(data: bytes) -> SealedJob:
    """Verify and parse a sealed job.

    Raises ``IntegrityError`` if it is not a sealed job or was changed after it was signed, and
    ``ConfigError`` for values that this version refuses.
    """
    content, owner, canonical = verified(data)
    job = _validate(content)
    job.check_published()
    job.check()
    if _signed_fields(job, owner) != canonical:  # otherwise one job would have two ids
        raise _OTHER_VERSION
    return SealedJob(job, owner)


def verified(data: bytes) -> tuple[Any, bytes, bytes]:
    """Return the content, the owner and the signed bytes of a sealed job.

    The content is JSON that its owner signed, and may be anything. Raises ``IntegrityError`` if it
    is not a sealed job or was changed, and ``ConfigError`` for one of another version.
    """
    broken = IntegrityError("this is not a sealed job, or it was changed", hint="get the job again")
    if len(data) > MAX_JOB_BYTES:
        raise broken
    try:
        document = json.loads(data)
        owner, signature = bytes.fromhex(document["owner"]), bytes.fromhex(document.pop("signature"))
        content, canonical = document["job"], canonical_json(document)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise broken from error
    if (
        len(owner) != KEY_BYTES
        or len(signature) != SIGNATURE_BYTES
        or document.keys() != {"format", "job", "owner"}
    ):
        raise broken
    # A job has only one sealed form.
    if canonical_json({**document, "signature": signature.hex()}) != data:
        raise broken
    if not verify(owner, signature, _SIGNATURE_DOMAIN + canonical):
        raise broken
    if document["format"] != FORMAT:
        raise _OTHER_VERSION
    return content, owner, canonical


def job_id(signed_fields: bytes) -> str:
    """Return the SHA-256 of the canonical job and its owner, as 64 hexadecimal digits."""
    return hashlib.sha256(_ID_DOMAIN + signed_fields).hexdigest()


def _config_file(path: Path) -> dict[str, Any]:
    """Return the architecture in a ``config.json``, without the keys about a checkpoint's files."""
    path = path.expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        with path.open("rb") as stream:
            config = json.loads(stream.read(MAX_JOB_BYTES))
    except OSError as error:
        raise JobError("model", "config", f"is wrong: cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise JobError("model", "config", f"is wrong: {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise JobError("model", "config", f"is wrong: {path} is not a JSON object")
    return {key: value for key, value in config.items() if key not in _OF_FILES and not key.startswith("_")}


def _signed_fields(job: Job, owner: bytes) -> bytes:
    return canonical_json({"format": FORMAT, "job": job.model_dump(mode="json"), "owner": owner.hex()})


def _validate(document: object) -> Job:
    try:
        return Job.model_validate(document)
    except ValidationError as error:
        _refuse(error)


def _refuse(error: ValidationError) -> NoReturn:
    # A misspelt key gives two errors: an unknown key and a missing key. The unknown key is more
    # helpful.
    first = min(error.errors(include_url=False), key=lambda found: found["type"] != "extra_forbidden")
    place = [str(part) for part in first["loc"]] + ["", ""]
    section, key = place[:2]
    depth = {"method": 2, "data": 3}.get(section, 1)
    if len(first["loc"]) > depth:
        key = place[depth]
    if first["type"] == "extra_forbidden":
        fields: Mapping[str, Any] = Job.model_fields
        if key:
            fields = fields[section].annotation.model_fields
            fields = {**fields, **DataSource.model_fields} if section == "data" else fields
        meant = get_close_matches(key or section, fields, n=1)
        raise JobError(
            section,
            key,
            "is an unknown key" if key else "is an unknown section",
            hint=f"did you mean {meant[0]!r}?"
            if meant
            else f"remove it; known are {', '.join(sorted(fields))}",
        ) from error
    if first["type"] == "missing":
        raise JobError(
            section,
            key,
            "is missing",
            hint="add it; `swarmnet train template METHOD` prints a whole job file",
        ) from error
    message = first["msg"]
    raise JobError(
        section, key, f"is wrong: {message[:1].lower()}{message[1:]}", hint="correct it"
    ) from error


def _located(error: JobError, text: str, source: str) -> ConfigError:
    line = line_of(text, error.section, error.key)
    return ConfigError(f"{source}:{line}: {error}", hint=error.hint)
