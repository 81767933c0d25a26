"""Job files: refused contents with their messages, and the fields that a signature covers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.training import jobs, methods
from swarmnet_protocols.training.job_settings import OF_THE_MODEL, Job, JobError
from swarmnet_protocols.training.job_templates import TEMPLATES, template
from swarmnet_protocols.training.jobs import load_job, open_job, parse_job, seal_job
from tests.defences import defence, nothing, replacing
from tests.support.training.tiny_job import for_others, tiny_job

OWNER = Identity.from_seed(b"owner")
DILOCO = template("diloco")


def _line(text: str, start: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.startswith(start))


@pytest.mark.parametrize("method", TEMPLATES)
def test_every_template_is_a_job_of_its_method(method: str) -> None:
    job = parse_job(template(method).encode()).job
    assert job.method.name == {"lora": "diloco", "pipeline": "allreduce"}.get(method, method)
    assert job.make_method().name == job.method.name
    assert job.make_method().steps_per_round * job.job.rounds in range(500, 1001)


def test_there_is_a_template_for_every_method() -> None:
    assert set(TEMPLATES) == {*methods.METHODS, "lora", "pipeline"}


def test_a_template_of_no_method_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'adam'") as caught:
        template("adam")
    assert "diloco" in caught.value.hint


@pytest.mark.parametrize(
    ("old", "new", "at", "words", "hint"),
    [
        ("learning_rate =", "learning_rat =", "learning_rat", "unknown key", "did you mean 'learning_rate'"),
        ("[training]", "[trainig]", "[trainig]", "unknown section", "did you mean 'training'"),
        ("sync_every = 50", "sync_evry = 50", "sync_evry", "'sync_evry' in \\[method\\]", ""),
        ("sync_every = 50", "sync_every = 0", "sync_every", "'sync_every' in \\[method\\]", ""),
        ("sync_every = 50", "sync_every = -3", "sync_every", "'sync_every' in \\[method\\]", ""),
        ("sync_every = 50", "sync_every = true", "sync_every", "'sync_every' in \\[method\\]", ""),
        ('name = "diloco"', 'name = "dilocco"', "[method]", "'name' in \\[method\\]", ""),
        ("rounds = 20", "rounds = 0", "rounds", "'rounds' in \\[job\\]", ""),
        ("rounds = 20", 'rounds = "20"', "rounds", "'rounds' in \\[job\\]", ""),
        ("seed = 0", "seed = -1", "seed", "'seed' in \\[job\\]", ""),
        ("learning_rate = 1e-3", "learning_rate = inf", "learning_rate", "finite", ""),
        ("betas = [0.9, 0.95]", "betas = [0.9, 1.0]", "betas", "betas", ""),
        ("betas = [0.9, 0.95]", "betas = [0.9]", "betas", "betas", ""),
        ("batch_size = 8", "batch_size = 8\nmicrobatch = 3", "microbatch", "must divide", ""),
        ("min_workers = 1", "min_workers = 60", "max_workers", "at least min_workers", ""),
        ("min_workers = 1", "min_workers = 1025", "min_workers", "less than or equal to 1024", ""),
        ("max_workers = 16", "max_workers = 1025", "max_workers", "less than or equal to 1024", ""),
        ('aggregate = "mean"', 'aggregate = "mode"', "aggregate", "aggregate", ""),
        ('# codec = "int8"', 'codec = "int7"', "codec", "int7", ""),
        ('aggregate = "mean"', 'aggregate = "median"\ncodec = "log8"', "aggregate", 'must be "mean"', ""),
        ('model_type = "llama"', "", "[model.config]", "model_type", ""),
        ("hidden_size = 128", "hidden_size = nan", "[model.config]", "finite", ""),
        (
            "[model.config]",
            "[model]\ntrain = 'lora'\n[model.config]",
            "train",
            "needs a 'checkpoint'",
            "instead of a config",
        ),
        ("[model.config]", "[model]\nrank = 4\n[model.config]", "rank", "for adapters only", "train ="),
        (
            "[model.config]",
            "[model]\ncheckpoint = 'x'\n[model.config]",
            "[model]",
            "needs 'config' or 'checkpoint'",
            "",
        ),
        ('path = "python-stdlib"', "", "[data]", "needs 'path' or 'hub'", ""),
        ("sequence_length = 256", "", "[data]", "'sequence_length' in \\[data\\] is missing", ""),
    ],
)
def test_errors_name_their_line(old: str, new: str, at: str, words: str, hint: str) -> None:
    assert old in DILOCO
    text = DILOCO.replace(old, new, 1)
    section = "[method]" if at == "[method]" else ""
    line = _line(text, section or at)
    if section and "name" in new:
        line += 1

    with pytest.raises(ConfigError, match=rf"job\.toml:{line}: .*{words}") as caught:
        parse_job(text.encode())
    assert hint in caught.value.hint


def test_a_robust_rule_with_more_workers_than_a_group_is_refused() -> None:
    text = DILOCO.replace("max_workers = 16", "max_workers = 65")
    assert parse_job(text.encode()).job.exchange.max_workers == 65
    with pytest.raises(ConfigError, match="at most 64 with aggregate = 'median'"):
        parse_job(text.replace('aggregate = "mean"', 'aggregate = "median"').encode())


def test_fragments_that_do_not_divide_are_refused() -> None:
    text = template("streaming").replace("fragments = 5", "fragments = 7")
    with pytest.raises(ConfigError, match=r"job\.toml:\d+: .*fragments"):
        parse_job(text.encode())


def test_the_bound_of_noloco_is_in_the_message() -> None:
    text = template("noloco").replace("gamma = 0.4", "gamma = 0.8")
    with pytest.raises(ConfigError, match=r"job\.toml:\d+: .*0\.72"):
        parse_job(text.encode())


@pytest.mark.parametrize("section", ["job", "data", "training", "method"])
def test_a_section_that_is_missing_or_no_table_is_refused(section: str) -> None:
    header = f"[{section}]"
    start = DILOCO.index(header)
    end = DILOCO.index("\n[", start + 1)
    with pytest.raises(ConfigError, match=section):
        parse_job((DILOCO[:start] + DILOCO[end:]).encode())
    with pytest.raises(ConfigError, match=section):
        parse_job((f"{section} = 1\n" + DILOCO[:start] + DILOCO[end:]).encode())


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xfe", b"[" * 5000, b"a = " + b"[" * 5000, b"a" * (jobs.MAX_JOB_BYTES + 1)]
)
def test_files_that_are_no_job_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigError):
        parse_job(data)


def test_an_error_found_later_is_given_its_line() -> None:
    file = parse_job(DILOCO.encode())
    line = _line(DILOCO, "path")
    with (
        pytest.raises(ConfigError, match=rf"^job\.toml:{line}: 'path' in \[data\] is empty"),
        file.naming_lines(),
    ):
        raise JobError("data", "path", "is empty")


def test_a_sealed_job_gives_back_the_job_and_its_owner() -> None:
    job = for_others(parse_job(DILOCO.encode()).job)
    sealed = open_job(seal_job(job, OWNER))
    assert sealed.job == job
    assert sealed.owner == OWNER.public_key


def test_the_id_is_of_the_content_and_the_owner() -> None:
    def id_of(text: str, owner: Identity) -> str:
        return open_job(seal_job(for_others(parse_job(text.encode()).job), owner)).id

    plain = id_of(DILOCO, OWNER)
    assert id_of(DILOCO.replace("seed = 0", "seed   =   0 # the same"), OWNER) == plain
    assert id_of(DILOCO.replace("seed = 0", "seed = 1"), OWNER) != plain
    assert id_of(DILOCO, Identity.from_seed(b"another")) != plain


def _canonical(document: dict[str, object]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _resigned(document: dict[str, object]) -> bytes:
    document.pop("signature")
    fields = _canonical(document)
    document["signature"] = OWNER.sign(b"swarmnet-training-job-1\0" + fields).hex()
    return _canonical(document)


CHANGES: dict[str, Callable[[dict[str, object]], object]] = {
    "value": lambda sealed: sealed["job"]["job"].update(seed=9),  # type: ignore[index]
    "owner": lambda sealed: sealed.update(owner=Identity.from_seed(b"thief").public_key.hex()),
    "signature": lambda sealed: sealed.update(signature="00" * 64),
    "no signature": lambda sealed: sealed.pop("signature"),
    "more": lambda sealed: sealed.update(more=1),
    "format": lambda sealed: sealed.update(format=jobs.FORMAT + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_sealed_job_that_was_changed_is_refused(change: str) -> None:
    sealed = json.loads(seal_job(for_others(parse_job(DILOCO.encode()).job), OWNER))
    CHANGES[change](sealed)
    with pytest.raises(IntegrityError):
        open_job(_canonical(sealed))


def test_a_signature_does_not_make_a_bad_job_good() -> None:
    sealed = json.loads(seal_job(for_others(parse_job(DILOCO.encode()).job), OWNER))
    sealed["job"]["job"]["rounds"] = 0
    with pytest.raises(JobError, match="rounds"):
        open_job(_resigned(sealed))


def test_a_job_that_leaves_out_a_default_has_no_second_id() -> None:
    sealed = json.loads(seal_job(for_others(parse_job(DILOCO.encode()).job), OWNER))
    del sealed["job"]["eval"]
    with pytest.raises(ConfigError, match="another version"):
        open_job(_resigned(sealed))


REVISION = "0123456789" * 4
HOSTILE: list[tuple[str, str, object]] = [
    *(("data", "path", path) for path in ("~/.ssh/*", "/etc/passwd", "texts", "python-stdlib/../x")),
    ("data", "digest", None),
    ("data", "size_bytes", None),
    *(
        ("data", "hub", hub)
        for hub in ("org/name", "org/name@main", f"../name@{REVISION}", f"/etc@{REVISION}")
    ),
    *(("data", "tokenizer", name) for name in ("~/model", "org/name", f"a/b/c@{REVISION}", "model", ".")),
    *(
        ("model", "checkpoint", name)
        for name in ("/models/mine", "~/m.gguf", "org/name", "org/name@main", "..")
    ),
    *(("data", "split", split) for split in ("../../x", "a/b", "*", "")),
]


def hostile(section: str, key: str, value: object) -> bytes:
    """A job that is signed and well-formed but for one value."""
    sealed = json.loads(seal_job(for_others(parse_job(DILOCO.encode()).job), OWNER))
    job = sealed["job"]
    source = job["data"]["sources"][0]
    (source if key in source else job[section])[key] = value
    if key == "hub":
        source["path"] = None
    if key == "checkpoint":
        job["model"] |= {"config": None, "manifest": "00" * 32}
    return _resigned(sealed)


@defence(
    "a job of another peer has no {key} {value}",
    off=replacing(Job, "check_published", nothing),
    cases=[
        {"section": "data", "key": "digest", "value": None},
        {"section": "model", "key": "checkpoint", "value": "/models/mine"},
        {"section": "data", "key": "tokenizer", "value": "~/model"},
    ],
)
@pytest.mark.parametrize(("section", "key", "value"), HOSTILE, ids=lambda each: str(each)[:24])
def test_a_job_of_another_peer_names_no_file_of_this_machine(section: str, key: str, value: object) -> None:
    with pytest.raises(JobError, match=key):
        open_job(hostile(section, key, value))


def test_a_checkpoint_is_known_by_its_manifest() -> None:
    named = json.loads(hostile("model", "checkpoint", "smollm2-135m-instruct"))
    assert open_job(_resigned(dict(named))).job.model.is_checkpoint
    named["job"]["model"]["manifest"] = None
    with pytest.raises(JobError, match="manifest"):
        open_job(_resigned(named))


def test_paths_stay_on_the_machine_that_gave_them(tmp_path: Path) -> None:
    text = DILOCO.replace('path = "python-stdlib"', f'path = "{tmp_path}"')
    job = for_others(parse_job(text.encode()).job)
    assert str(tmp_path) not in seal_job(job, OWNER).decode()
    assert job.with_files(data=[tmp_path]).data.sources[0].path == str(tmp_path)
    with pytest.raises(ConfigError) as missing:
        job.with_files()
    assert "--data PATH" in missing.value.hint


MIXED = DILOCO.replace("[data]", "[[data]]").replace(
    'path = "python-stdlib"',
    """source = "own"
weight = 3

[[data]]
path = "python-stdlib" """,
)


def test_a_job_names_its_sources_and_not_the_text_of_own_ones(tmp_path: Path) -> None:
    written = parse_job(MIXED.encode()).job
    own, shared = written.data.sources
    assert (own.is_own, own.weight, shared.path) == (True, 3.0, "python-stdlib")
    here = written.with_files(data=[tmp_path])
    sealed = seal_job(here.about([None, ("00" * 32, 1)], None), OWNER)
    assert str(tmp_path) not in sealed.decode()
    job = open_job(sealed).job
    assert [source.digest for source in job.data.sources] == [None, "00" * 32]
    with pytest.raises(ConfigError, match="files of your own, which stay") as missing:
        job.with_files()
    assert "--data PATH" in missing.value.hint
    with pytest.raises(ConfigError, match="--data 1 times, and it was given 2"):
        job.with_files(data=[tmp_path, tmp_path])


WRONG_SOURCES = {
    "a digest of own data": ("weight = 3", f'digest = "{"00" * 32}"\nweight = 3', "digest"),
    "a dataset of the hub as own": ("weight = 3", 'hub = "org/name"\nweight = 3', "source"),
    "another tokenizer": ("weight = 3", 'tokenizer = "org/other"\nweight = 3', "tokenizer"),
    "a weight of nothing": ("weight = 3", "weight = 0", "weight"),
    "an unknown key": ("weight = 3", "wieght = 3", "wieght"),
    "sources within a source": ("weight = 3", "sources = []", "sources"),
}


@pytest.mark.parametrize(("old", "new", "key"), WRONG_SOURCES.values(), ids=WRONG_SOURCES)
def test_a_wrong_source_is_refused_with_its_line(old: str, new: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"job\.toml:\d+: '{key}' in \[data\]"):
        parse_job(MIXED.replace(old, new).encode())


@pytest.mark.parametrize(("option", "path"), [("data", Path("d")), ("model", Path("m"))])
def test_a_path_that_the_job_has_no_use_for_is_refused(option: str, path: Path) -> None:
    job = for_others(parse_job(DILOCO.encode()).job)
    with pytest.raises(ConfigError) as refused:
        job.with_files(**{option: [path] if option == "data" else path})
    assert f"--{option}" in refused.value.hint


def test_the_tokenizer_of_model_files_travels_as_such(tmp_path: Path) -> None:
    written = parse_job(DILOCO.encode()).job
    model = written.model.model_copy(update={"config": None, "checkpoint": str(tmp_path)})
    data = written.data.model_copy(update={"tokenizer": str(tmp_path)})
    job = for_others(written.model_copy(update={"model": model, "data": data}), bytes(32))
    assert (job.model.checkpoint, job.data.tokenizer) == (None, OF_THE_MODEL)
    here = job.with_files(model=tmp_path)
    assert here.model.checkpoint == here.data.tokenizer == str(tmp_path)
    with pytest.raises(ConfigError) as missing:
        job.with_files()
    assert "--model PATH" in missing.value.hint


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"[" * 10_000, b"\xff", b" " * (jobs.MAX_JOB_BYTES + 1)])
def test_invalid_sealed_jobs_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        open_job(data)


def test_a_job_that_is_too_large_to_travel_is_refused() -> None:
    job = for_others(parse_job(DILOCO.encode()).job)
    config = {**(job.model.config or {}), "more": "x" * jobs.MAX_JOB_BYTES}
    with pytest.raises(ConfigError, match="larger"):
        seal_job(job.model_copy(update={"model": job.model.model_copy(update={"config": config})}), OWNER)


def test_the_architecture_may_be_in_a_config_json(tmp_path: Path) -> None:
    config = tiny_job(tmp_path).model.config
    assert config is not None
    of_files = {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "_name_or_path": "/home/ada",
    }
    (tmp_path / "config.json").write_text(json.dumps(config | of_files))
    for path in (tmp_path, tmp_path / "config.json"):
        file = tmp_path / "job.toml"
        file.write_text(_with_config(str(path)))
        assert load_job(file).job.model.config == config


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "is not JSON"), ("[]", "is not a JSON object"), ("[" * 9999, "is not JSON"), (None, "cannot read")],
    ids=["empty", "a list", "nested", "missing"],
)
def test_a_config_json_that_cannot_be_read_names_the_line(
    tmp_path: Path, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    toml = _with_config(str(tmp_path / "config.json"))
    (tmp_path / "job.toml").write_text(toml)
    with pytest.raises(ConfigError, match=said) as caught:
        load_job(tmp_path / "job.toml")
    line = next(n for n, each in enumerate(toml.splitlines(), 1) if each.startswith("config ="))
    assert f"job.toml:{line}:" in str(caught.value)


def _with_config(path: str) -> str:
    """The template with the path of a config in place of the config."""
    before, _, after = DILOCO.partition("[model.config]")
    return f'{before}[model]\nconfig = "{path}"\n[data]{after.partition("[data]")[2]}'
