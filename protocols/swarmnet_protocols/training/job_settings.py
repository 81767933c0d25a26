"""The settings of a job: its sections, and the rules that hold between their values.

An owner's file may name local files. A published job identifies data and model files by hash
instead (:meth:`Job.about`), and the user of each worker gives the paths of local copies
(:meth:`Job.with_files`).
"""

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.session import MAX_RANK
from swarmnet_protocols.training import MAX_MEMBERS, MAX_WORKERS

if TYPE_CHECKING:
    from swarmnet_protocols.training.methods import Method

PYTHON_STDLIB = "python-stdlib"
BYTES = "bytes"
OF_THE_MODEL = "model"
"""Stands in a sealed job for the tokenizer among the model's files."""
BUILT_IN_MODEL = "smollm2-135m-instruct"
MAX_STAGES = 64
"""Most stages of a model. With more, a microbatch travels too long for its step's deadline."""
MAX_SOURCES = 16
"""Most sources of a job's data. More do not fit the record of a job."""

_ON_HUB = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}(@[\w.][\w./-]{0,127})?", re.ASCII)
_PUBLISHED = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}@[0-9a-f]{40}", re.ASCII)
_FIX = 'write it as "org/name@REVISION", with the 40 hexadecimal digits of a commit'

Name = Annotated[str, Field(min_length=1, max_length=512)]
ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]{1,100}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class JobError(ConfigError):
    """A wrong value in a job.

    For a job read from a file, ``jobs.JobFile.naming_lines`` adds file and line.
    """

    def __init__(self, section: str, key: str, must: str, *, hint: str = "") -> None:
        super().__init__(f"{key!r} in [{section}] {must}" if key else f"[{section}] {must}", hint=hint)
        self.section = section
        self.key = key


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class JobSection(_Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    rounds: int = Field(ge=1, le=10_000_000)


class ModelSection(_Section):
    """The model: a transformers config, initialised from the seed, or the name of a checkpoint.

    In an owner's file ``config`` may be the path of a ``config.json`` or its folder
    (``jobs.parse_job``).

    In a sealed job ``manifest`` identifies the checkpoint's files. If the job has no ``checkpoint``
    name, the user of each worker gives the path of these files.
    """

    config: dict[str, JsonValue] | None = None
    checkpoint: Name | None = None
    manifest: Digest | None = None
    """SHA-256 of the checkpoint's manifest, set by `train create`."""
    train: Literal["all", "lora"] = "all"
    """The trained parameters: all weights, or a LoRA adapter to a frozen checkpoint."""
    weights: Literal["stored", "int8", "int4"] = "stored"
    """The form of frozen weights in memory: as their file stores them, or rounded when they are
    loaded."""
    rank: int = Field(default=8, ge=1, le=MAX_RANK)
    alpha: int = Field(default=16, ge=1, le=65_536)
    """LoRA adds ``alpha / rank`` times the product of its two matrices."""
    targets: Annotated[tuple[ModuleName, ...], Field(strict=False, max_length=64)] = ()
    """Names of the linear modules that get LoRA. Empty for PEFT's choice."""

    @property
    def is_checkpoint(self) -> bool:
        """True if training starts from the weights of a checkpoint."""
        return self.config is None

    @property
    def is_lora(self) -> bool:
        """True if workers train an adapter, and the weights of the checkpoint are frozen."""
        return self.train == "lora"

    @model_validator(mode="after")
    def _check(self) -> "ModelSection":
        for key in ("weights", "rank", "alpha", "targets"):
            if not self.is_lora and getattr(self, key) != type(self).model_fields[key].default:
                raise JobError("model", key, "is for adapters only", hint='add train = "lora", or remove it')
        if self.is_lora and not self.is_checkpoint:
            raise JobError(
                "model", "train", "is 'lora', which needs a 'checkpoint'", hint="name one instead of a config"
            )
        if (self.config is None) == (self.checkpoint is None and self.manifest is None):
            raise JobError("model", "", "needs 'config' or 'checkpoint'")
        if self.config is not None:
            try:
                json.dumps(self.config, allow_nan=False)
            except ValueError as error:
                raise JobError("model", "config", "may hold finite numbers only") from error
            if not isinstance(self.config.get("model_type"), str):
                raise JobError("model", "config", "must have a 'model_type', such as \"llama\"")
        return self


class DataSource(_Section):
    """One source of the data: local files, or a dataset of the hub, ``org/name[@REVISION]``. In a
    sealed job its revision is a commit.

    ``path`` names a file, a directory, a glob, or ``python-stdlib``. In a sealed job ``path`` is
    ``python-stdlib`` or missing. Without ``hub`` each worker's user gives the path of the files.
    """

    source: Literal["shared", "own"] = "shared"
    """``shared``: all workers have the same tokens and divide them. ``own``: each worker trains on
    files of its own, which never leave its machine. The job has no digest of these files."""
    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Share of the sequences of a batch, relative to the other sources."""
    format: Literal["text", "jsonl", "parquet"] = "text"
    path: Name | None = None
    hub: Name | None = None
    split: str = Field(default="train", pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")
    """Prefix of the names of a dataset's files."""
    field: Name | None = None
    """The field of a row that holds its text. None: the fields of a row show its kind, as in
    ``models.text.rows``."""
    max_documents: int | None = Field(default=None, ge=1)
    digest: Digest | None = None
    """SHA-256 of the tokens, set by `train create`. A worker with other data refuses to train."""
    size_bytes: int | None = Field(default=None, ge=1, lt=1 << 50)
    """Size of all documents, set by `train create`. Workers read no more than this."""

    @property
    def is_own(self) -> bool:
        """True if each worker trains on files of its own."""
        return self.source == "own"

    @property
    def needs_path(self) -> bool:
        """True if the user of each worker has to name the files."""
        return self.path is None and self.hub is None

    @model_validator(mode="after")
    def _check(self) -> "DataSource":
        if self.path is not None and self.hub is not None:
            raise JobError("data", "hub", "and 'path' exclude each other")
        if self.hub is not None and not is_on_hub(self.hub):
            raise JobError("data", "hub", "is not the name of a dataset", hint='write it as "org/name"')
        if self.is_own and (self.hub is not None or self.path == PYTHON_STDLIB):
            raise JobError(
                "data",
                "source",
                'is "own", so every worker names files of its own',
                hint="leave out 'hub' and 'path', or name your own files as 'path'",
            )
        if self.is_own and (self.digest is not None or self.size_bytes is not None):
            raise JobError("data", "digest", "or 'size_bytes' is given, but each worker has its own files")
        return self


class DataSection(_Section):
    """The data: what all sources share, and the sources.

    In a job file, ``[data]`` is a section with one source, and each ``[[data]]`` names another one.
    The first ``[[data]]`` has the shared keys; the others may repeat them.
    """

    tokenizer: Name = BYTES
    sequence_length: int = Field(ge=2, le=1 << 20)
    validation: float = Field(default=0.02, gt=0, le=0.5)
    sources: Annotated[tuple[DataSource, ...], Field(min_length=1, max_length=MAX_SOURCES, strict=False)]

    @model_validator(mode="before")
    @classmethod
    def _of_tables(cls, tables: object) -> object:
        if isinstance(tables, dict) and "sources" in tables:
            return tables
        shared: dict[str, object] = {}
        sources = []
        for table in tables if isinstance(tables, list) else [tables]:
            if not isinstance(table, dict):
                return tables
            keys = (cls.model_fields.keys() & table.keys()) - {"sources"}
            for key in keys:
                if shared.setdefault(key, table[key]) != table[key]:
                    raise JobError("data", key, "differs between sources", hint="give it once")
            sources.append({key: value for key, value in table.items() if key not in keys})
        return shared | {"sources": sources}


class TrainingSection(_Section):
    batch_size: int = Field(ge=1, le=65_536)
    microbatch: int | None = Field(default=None, ge=1)
    learning_rate: float = Field(gt=0, le=10)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["cosine", "constant"] = "cosine"
    weight_decay: float = Field(default=0.1, ge=0, le=1)
    optimizer: Literal["adamw", "muon"] = "adamw"
    """The inner optimizer. Muon updates hidden matrices, and AdamW everything else."""
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.95)
    clip_norm: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> "TrainingSection":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise JobError("training", "betas", "must be two numbers in [0, 1)")
        if self.microbatch is not None and self.batch_size % self.microbatch:
            raise JobError("training", "microbatch", f"must divide batch_size = {self.batch_size}")
        return self


class MethodSection(_Section):
    name: Name
    settings: dict[str, int | float | str] = {}
    code: Digest | None = None
    """SHA-256 of the Python file of a method from outside, set by `train create`. A worker with
    another file refuses to train."""


class ExchangeSection(_Section):
    codec: Name | None = None
    """The codec of contributions; None for the method's default."""
    deadline_s: float = Field(default=60.0, gt=0, le=86_400)
    min_workers: int = Field(default=1, ge=1, le=MAX_WORKERS)
    max_workers: int = Field(default=MAX_MEMBERS, ge=1, le=MAX_WORKERS)
    aggregate: Literal["mean", "median", "centered-clip"] = "mean"

    @model_validator(mode="after")
    def _check(self) -> "ExchangeSection":
        if self.max_workers < self.min_workers:
            raise JobError(
                "exchange",
                "max_workers",
                f"must be at least min_workers = {self.min_workers}",
                hint="raise it, or lower min_workers",
            )
        if self.max_workers > MAX_MEMBERS and self.aggregate != "mean":
            raise JobError(
                "exchange",
                "max_workers",
                f"must be at most {MAX_MEMBERS} with aggregate = {self.aggregate!r}: more workers form "
                "groups, and nobody can verify the result of another group",
                hint='lower it, or set aggregate = "mean"',
            )
        return self


class StagesSection(_Section):
    """The stages of the model, if no worker holds the whole. See ``pipeline.stages``."""

    count: int = Field(ge=2, le=MAX_STAGES)
    cuts: Literal["auto"] | Annotated[tuple[int, ...], Field(strict=False)] = "auto"
    """The first block of each stage but stage 0. `train create` replaces "auto" by the cuts whose
    largest stage has the fewest bytes."""
    codec: Literal["float32", "bfloat16", "int8", "int4", "auto"] = "float32"
    """The codec of activations and gradients between stages (``codecs.boundary``). "auto" lets each
    link choose."""
    subspace: int | None = Field(default=None, ge=1)
    """Numbers of a token that cross a boundary, for new models; None: the hidden size."""

    @model_validator(mode="after")
    def _check(self) -> "StagesSection":
        if self.cuts == "auto":
            return self
        if len(self.cuts) != self.count - 1:
            raise JobError(
                "stages",
                "cuts",
                f"has {len(self.cuts)} numbers, and {self.count} stages need {self.count - 1}",
                hint="give the first block of each stage but the first",
            )
        if any(one >= other for one, other in pairwise((-1, *self.cuts))):
            raise JobError("stages", "cuts", "must be block numbers that increase", hint="correct it")
        return self

    def spans(self, blocks: int) -> list[tuple[int, int]]:
        """Return the blocks [start, end) of each stage of a model of ``blocks`` blocks.

        ``cuts`` must be numbers.
        """
        return list(pairwise((0, *(cut for cut in self.cuts if isinstance(cut, int)), blocks)))

    def stage_of(self, block: int) -> int:
        """Return the stage of a block. ``cuts`` must be numbers."""
        return sum(cut <= block for cut in self.cuts if isinstance(cut, int))


class EvalSection(_Section):
    every_rounds: int = Field(default=1, ge=1)
    batches: int = Field(default=8, ge=1, le=100_000)


class PrivacySection(_Section):
    """Differential privacy of every row of a worker's own data.

    Gradients of rows are clipped and get noise in each inner step.
    """

    clip_norm: float = Field(gt=0, le=1e6)
    """Largest norm of the gradient of one row."""
    noise: float = Field(gt=0, le=1e4)
    """Standard deviation of the noise in the sum over a batch, in units of ``clip_norm``."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """Chance that the stated epsilon does not hold."""


class Job(_Section):
    """A validated job.

    Equal jobs have equal canonical forms, whatever the order and spacing of their files.
    """

    job: JobSection
    model: ModelSection
    data: DataSection
    training: TrainingSection
    method: MethodSection
    exchange: ExchangeSection = ExchangeSection()
    eval: EvalSection = EvalSection()
    stages: StagesSection | None = None
    privacy: PrivacySection | None = None

    @property
    def stage_count(self) -> int | None:
        """The number of stages; None if every worker holds the whole model."""
        return None if self.stages is None else self.stages.count

    def make_method(self) -> "Method":
        """Make the method with this job's settings.

        Raises ``JobError`` that names a wrong setting.
        """
        from swarmnet_protocols.training.methods import ZeroOrder, get_method

        try:
            method = get_method(self.method.name, self.method.settings, self.method.code)
        except ConfigError as error:
            named = (key for key in self.method.settings if re.search(rf"\b{re.escape(key)}\b", str(error)))
            raise JobError("method", next(named, "name"), f"is wrong: {error}", hint=error.hint) from error
        if isinstance(method, ZeroOrder):
            method.slots = max(MAX_MEMBERS, self.exchange.max_workers)
        return method

    def about(self, hashes: Sequence[tuple[str, int] | None], manifest: bytes | None) -> "Job":
        """Return this job in publishable form.

        It has the hashes of its data and of its checkpoint's manifest, and no local paths.
        ``hashes``: the digest and the size of each shared source, and None for workers' own ones.
        Raises ``JobError`` for a tokenizer that other machines cannot fetch.
        """
        from swarmnet_protocols.training.methods import code_of

        data, model = self.data, self.model
        tokenizer = data.tokenizer
        if tokenizer != BYTES and tokenizer == model.checkpoint and not is_published(tokenizer):
            tokenizer = OF_THE_MODEL
        sources = []
        for source, about in zip(data.sources, hashes, strict=True):
            path = source.path if source.path == PYTHON_STDLIB else None
            digest, size_bytes = about or (None, None)
            sources.append(
                source.model_copy(update={"path": path, "digest": digest, "size_bytes": size_bytes})
            )
        named = model.checkpoint is not None and is_published(model.checkpoint)
        job = self.model_copy(
            update={
                "method": self.method.model_copy(update={"code": code_of(self.method.name)}),
                "data": data.model_copy(update={"tokenizer": tokenizer, "sources": tuple(sources)}),
                "model": model.model_copy(
                    update={
                        "checkpoint": model.checkpoint if named else None,
                        "manifest": None if manifest is None else manifest.hex(),
                    }
                ),
            }
        )
        job.check_published()
        return job

    @property
    def evaluation_tokens(self) -> int:
        """Most tokens of one evaluation on held-out data."""
        return self.eval.batches * self.training.batch_size * self.data.sequence_length

    @property
    def round_tokens(self) -> int:
        """Tokens that a worker trains on in one round."""
        steps = self.make_method().steps_per_round
        return self.training.batch_size * self.data.sequence_length * steps

    def check_published(self) -> None:
        """Check that the job names no local file, and identifies its data and model by hash.

        Raises ``JobError``.
        """
        from swarmnet_protocols.training.methods import METHODS

        data, model = self.data, self.model
        if self.method.code is None and self.method.name not in METHODS:
            raise JobError(
                "method",
                "name",
                f"is wrong: unknown method {self.method.name[:64]!r}",
                hint=f"one of: {', '.join(METHODS)}",
            )
        for source in data.sources:
            if source.path not in (None, PYTHON_STDLIB):
                raise JobError(
                    "data",
                    "path",
                    "is a path: a job of another peer names no files of this machine",
                    hint="its owner makes it with `train create`; you give your copy of the data with --data",
                )
            if source.hub is not None and not _PUBLISHED.fullmatch(source.hub):
                raise JobError("data", "hub", "is not a dataset at a fixed revision", hint=_FIX)
            if not source.is_own and (source.digest is None or source.size_bytes is None):
                raise JobError(
                    "data", "digest", "or 'size_bytes' is missing", hint="make the job with `train create`"
                )
        if data.tokenizer not in (BYTES, OF_THE_MODEL) and not is_published(data.tokenizer):
            raise JobError(
                "data",
                "tokenizer",
                f'is neither "{BYTES}", nor that of the model, nor published',
                hint=f"use one of these, or a name of the hub: {_FIX}",
            )
        if data.tokenizer == OF_THE_MODEL and not model.is_checkpoint:
            raise JobError(
                "data", "tokenizer", "is the model's tokenizer, but a model from a config has none"
            )
        if model.checkpoint is not None and not is_published(model.checkpoint):
            raise JobError(
                "model",
                "checkpoint",
                "is no published model: a job of another peer names no files of this machine",
                hint=_FIX,
            )
        if self.stages is not None and self.stages.cuts == "auto":
            raise JobError("stages", "cuts", "are not known", hint="make the job with `train create`")
        if model.is_checkpoint and model.manifest is None:
            raise JobError("model", "manifest", "is missing", hint="make the job with `train create`")

    def with_files(
        self, data: Sequence[Path] = (), model: Path | None = None, *, reads_data: bool = True
    ) -> "Job":
        """Return this job with the local paths of its data and model, which this user gave.

        ``data``: a path for each source that names no data itself, in the order of the job. Not
        used unless this worker ``reads_data``. Raises ``ConfigError`` if a path is missing, or is
        given though the job does not need it.
        """
        job = self
        needed = sum(source.needs_path for source in self.data.sources) if reads_data else 0
        data = data if reads_data else ()
        if data and not needed:
            raise ConfigError("this job names its data itself", hint="leave out --data")
        if reads_data and not data and any(source.is_own for source in self.data.sources):
            raise ConfigError(
                "this job trains on files of your own, which stay on this machine",
                hint="name the file, the folder or the glob: --data PATH",
            )
        if needed and not data:
            raise ConfigError(
                "this job's data are files that its owner distributes separately",
                hint="give the path of your copy: --data PATH",
            )
        if len(data) != needed:
            raise ConfigError(
                f"this job needs --data {needed} times, and it was given {len(data)} times",
                hint="give one path for each source without a name, in the order of the job",
            )
        if data:
            paths = iter(data)
            sources = tuple(
                source.model_copy(update={"path": str(next(paths))}) if source.needs_path else source
                for source in self.data.sources
            )
            job = job.model_copy(update={"data": job.data.model_copy(update={"sources": sources})})
        if model is not None:
            if not self.model.is_checkpoint:
                raise ConfigError("this job starts from a new model", hint="leave out --model")
            job = job.model_copy(update={"model": job.model.model_copy(update={"checkpoint": str(model)})})
        elif self.model.is_checkpoint and self.model.checkpoint is None:
            raise ConfigError(
                "this job's model is files that its owner distributes separately",
                hint="give the path of your copy: --model PATH",
            )
        if job.data.tokenizer == OF_THE_MODEL:
            tokenizer = {"tokenizer": job.model.checkpoint}
            job = job.model_copy(update={"data": job.data.model_copy(update=tokenizer)})
        return job

    def check(self) -> None:
        """Check the method, the codec and the method's settings. Raises ``JobError``.

        A method from outside is checked by name only, unless its file was loaded.
        """
        from swarmnet_protocols.training.methods import METHODS
        from swarmnet_protocols.training.methods.outside import is_loaded

        code = self.method.code
        if code is None or self.method.name in METHODS or is_loaded(code):
            kind = self.make_method().kind
            if self.training.optimizer == "muon" and kind != "parameters":
                raise JobError(
                    "training",
                    "optimizer",
                    f"is 'muon', but workers exchange {kind} with {self.method.name}",
                    hint='use another method, such as diloco, or optimizer = "adamw"',
                )
            if self.stages is not None and kind == "scalars":
                raise JobError(
                    "stages",
                    "",
                    f"needs gradients, and {self.method.name} has none",
                    hint='use another method, such as "diloco", or remove [stages]',
                )
            if self.privacy is not None and kind == "scalars":
                raise JobError(
                    "privacy", "", f"needs gradients, and {self.method.name} has none", hint="use diloco"
                )
            slopes = kind == "scalars" or self.exchange.codec == "log8"
            if slopes and self.exchange.aggregate != "mean":
                raise JobError(
                    "exchange",
                    "aggregate",
                    'must be "mean" for slopes: each worker measures along directions of its own',
                    hint='leave it out; "mean" also limits a worker, to the median norm of all',
                )
        if self.privacy is not None and not all(source.is_own for source in self.data.sources):
            raise JobError(
                "privacy", "", "protects a worker's own data", hint='set source = "own" in each [[data]]'
            )
        if self.privacy is not None and self.stages is not None:
            raise JobError("privacy", "", "needs whole gradients of a row", hint="remove [stages]")
        if self.stages is not None and self.model.is_lora:
            raise JobError(
                "stages", "", "needs whole weights to train", hint='remove train = "lora", or remove [stages]'
            )
        if self.stages is not None and self.stages.subspace is not None:
            why = None
            if self.model.is_checkpoint:
                why = "is for new models, and this one starts from a checkpoint"
            elif any(source.is_own for source in self.data.sources):
                why = 'sends tokens to every stage, and data with source = "own" stays on its machine'
            elif self.stages.codec == "auto":
                why = 'sends few bytes, and codec = "auto" chooses for whole tensors'
            if why is not None:
                raise JobError("stages", "subspace", why, hint="remove subspace")
        if self.exchange.codec is None:
            return
        from swarmnet_protocols.training.codecs import get_codec

        try:
            get_codec(self.exchange.codec)
        except ConfigError as error:
            raise JobError("exchange", "codec", f"is wrong: {error}", hint=error.hint) from error


def is_on_hub(name: str) -> bool:
    """Return whether ``name`` has the form ``org/name[@REVISION]``. A path may have it, too."""
    return _ON_HUB.fullmatch(name) is not None


def is_published(name: str) -> bool:
    """Return whether every machine can fetch the model ``name``. A local path cannot be fetched."""
    return name == BUILT_IN_MODEL or _PUBLISHED.fullmatch(name) is not None
