"""Commands that cannot work: each ends with its documented exit code, says what is wrong and what
to do, and does nothing."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnet import cli
from tests.support.processes.commands import SWARMNET

P = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWNvSZnPi3RrhrTwEY4LuuBeB6K6facKUCJcyWG1aoDd2p"
JOB = "0" * 64
RUN = "run smollm2-135m-instruct hi --swarm open"
SERVE = "serve --swarm open --port 0"
TUNE = "tune --swarm open --data rows.jsonl --out out"
JOIN = "join open --yes"
HELP = "--help"

# The command, its exit code, a word of the message, a word of the next step.
BAD = [
    ("bogus", 2, "bogus", HELP),
    ("rnu", 2, "Did you mean 'run'", HELP),
    ("chat lab", 2, "Did you mean 'run'", HELP),
    ("--bogus", 2, "--bogus", HELP),
    ("--log-level loud status", 2, "--log-level", HELP),
    ("swarm", 2, "command", "swarm --help"),
    ("swarm creat lab", 2, "Did you mean 'create'", "swarm --help"),
    # Commands that use a model
    ("run --swarm open", 2, "'M'", "run --help"),
    ("run m hi", 2, "--swarm'. A swarm.toml or its directory", "run --help"),
    ("run m hi --swarm", 2, "--swarm", "run --help"),
    (f"{RUN} extra", 2, "extra", "run --help"),
    (f"{RUN} -n 0", 2, "-n", "run --help"),
    (f"{RUN} -n many", 2, "-n", "run --help"),
    (f"{RUN} --temperature nan", 2, "--temperature", "run --help"),
    (f"{RUN} --temperature inf", 2, "--temperature", "run --help"),
    (f"{RUN} --temperature=-0.1", 2, "--temperature", "run --help"),
    (f"{RUN} --top-p 0", 2, "--top-p", "run --help"),
    (f"{RUN} --top-p 1.1", 2, "--top-p", "run --help"),
    (f"{RUN} --top-k=-1", 2, "--top-k", "run --help"),
    (f"{RUN} --min-p 2", 2, "--min-p", "run --help"),
    (f"{RUN} --repetition-penalty 0", 2, "--repetition-penalty", "run --help"),
    (f"{RUN} --bad-word ''", 2, "--bad-word", "run --help"),
    (f"{RUN} --logit-bias 5", 2, "--logit-bias", "run --help"),
    (f"{RUN} --seed=-1", 2, "--seed", "run --help"),
    (f"{RUN} --no-speculate --draft m", 2, "--no-speculate", "run --help"),
    (f"{SERVE} --no-speculate --draft m", 2, "--no-speculate", "serve --help"),
    (f"{SERVE} --router-cost 1", 2, "--router", "serve --help"),
    (f"{SERVE} --router r --router-cost nan", 2, "--router-cost", "serve --help"),
    (f"{SERVE} --router r --model m", 2, "--adapter", "serve --help"),
    (f"{SERVE} --router nowhere.safetensors", 3, "nowhere.safetensors", "router fit"),
    ("router fit nowhere.jsonl --out r", 3, "nowhere.jsonl", "check the path"),
    ("router fit file --out r", 3, "0 comparisons", '"model_a"'),
    ("router fit broken/swarm.toml --out r", 3, "line 1 of broken/swarm.toml: it is not JSON", '"model_a"'),
    ("batch /dev/null --out out --swarm open", 3, "no plain file", "into a file"),
    ("batch file --out out --swarm open", 3, "no prompts in the file", '{"prompt": TEXT}'),
    ("batch broken/swarm.toml --out out --swarm open", 3, "it is not JSON", '{"prompt": TEXT}'),
    ("batch rows.jsonl --out out --swarm open", 5, "no bootstrap peer", "--bootstrap"),
    (
        f"batch rows.jsonl --out nowhere/x --swarm open --bootstrap {P}",
        3,
        "nowhere/x",
        "a folder that exists",
    ),
    (f"batch rows.jsonl --out binary --swarm open --bootstrap {P}", 3, "not a file of answers", "--out"),
    ("agent gpt", 2, "gpt", "agent --help"),
    (f"{RUN} --dtype int3", 2, "--dtype", "run --help"),
    (f"{RUN} --chat", 2, "--chat", "run --help"),
    ("run m ' ' --swarm open", 2, "prompt is empty", "run --help"),
    ("run m hi --swarm nowhere.toml", 3, "nowhere.toml", "swarm create"),
    ("run m hi --swarm swn1garbage", 3, "invite", "copy"),
    (f"{RUN} --bootstrap x", 3, "multiaddr", "/ip4/"),
    (f"{RUN} --adapter nowhere", 3, "adapter_config.json", "tune"),
    (RUN, 5, "no bootstrap peer", "--bootstrap"),
    (f"run nosuchmodel hi --swarm open --bootstrap {P}", 3, "nosuchmodel", "org/name"),
    (f"run ./model hi --swarm open --bootstrap {P}", 3, "safetensors", "gguf"),
    (f"{RUN} --bootstrap {P}", 5, "no bootstrap peer answers", "--bootstrap"),
    ("bench m", 2, "--local", "bench --help"),
    ("bench m --local --swarm open", 2, "one of them", "bench --help"),
    ("bench m --swarm open --dtype int4", 2, "--dtype", "bench --help"),
    ("bench m --swarm open --runs 0", 2, "--runs", "bench --help"),
    ("bench smollm2-135m-instruct --local --dtype int4", 3, "quantised already", "--dtype"),
    ("bench nosuchmodel --local", 3, "nosuchmodel", "org/name"),
    (f"{SERVE} --adapter law=tuned", 2, "M:law=tuned/law", "serve --help"),
    (f"{SERVE} --adapter law", 2, "NAME=DIR", "serve --help"),
    (f"{SERVE} --adapter m:a=x --adapter m:a=y", 2, "called a", "serve --help"),
    (f"{SERVE} {' '.join(f'--adapter m:a{n}=x' for n in range(17))}", 2, "16 are the most", "serve --help"),
    (f"{SERVE} --port 70000", 2, "--port", "serve --help"),
    (f"{SERVE} --max-concurrent 0", 2, "--max-concurrent", "serve --help"),
    (f"{SERVE} --host 0.0.0.0", 3, "key", "--api-key-file"),
    (f"{SERVE} --api-key secret", 2, "--api-key", "serve --help"),
    (SERVE, 5, "no bootstrap peer", "--bootstrap"),
    ("model show nosuchmodel", 3, "nosuchmodel", "org/name"),
    ("model pull org/name@", 3, "org/name@", "org/name"),
    ("model verify ./model", 3, "safetensors", "gguf"),
    # Commands that share a machine
    ("start ../open", 3, "cannot name a swarm", "letters, digits"),
    ("serve --swarn open", 2, "Did you mean '--swarm'?", "serve --help"),
    (f"{JOIN} extra", 2, "extra", "join --help"),
    (f"{JOIN} --blocks", 2, "--blocks", "join --help"),
    (f"{JOIN} --blocks 5", 2, "--blocks", "join --help"),
    (f"{JOIN} --blocks 5:5", 2, "--blocks", "join --help"),
    (f"{JOIN} --blocks 9:5", 2, "--blocks", "join --help"),
    (f"{JOIN} --blocks=-1:5", 2, "--blocks", "join --help"),
    (f"{JOIN} --blocks a:b", 2, "--blocks", "join --help"),
    (f"{JOIN} --blocks 0:5 --num-blocks 5", 2, "--num-blocks", "join --help"),
    (f"{JOIN} --num-blocks 0", 2, "--num-blocks", "join --help"),
    (f"{JOIN} --device toaster", 2, "--device", "join --help"),
    (f"{JOIN} --dtype float8", 2, "--dtype", "join --help"),
    (f"{JOIN} --max-cache lots", 2, "--max-cache", "join --help"),
    (f"{JOIN} --max-cache 0", 2, "--max-cache", "join --help"),
    (f"{JOIN} --threads 0", 2, "--threads", "join --help"),
    (f"{JOIN} --name 'bell\a'", 2, "--name", "join --help"),
    (f"{JOIN} --up fast", 2, "--up", "join --help"),
    (f"train join {'0' * 64} --swarm lab --down fast", 2, "--down", "join --help"),
    (f"{JOIN} --schedule sometimes", 3, "sometimes", "19:00"),
    (f"{JOIN} --listen /ip4/127.0.0.1/tcp/70000", 3, "port", "/ip4/"),
    (f"{JOIN} --announce /ip4/300.0.0.1/tcp/1", 3, "host", "/ip4/"),
    (f"{JOIN} --bootstrap 127.0.0.1:4000", 3, "multiaddr", "/ip4/"),
    (f"{JOIN} --bootstrap /ip4/127.0.0.1/tcp/4000", 3, "peer id", "/p2p/"),
    ("join nowhere.toml", 3, "nowhere.toml", "swarm create"),
    ("join broken", 3, "line 1", "get the file again"),
    ("join empty", 3, "'format' is missing", "get the file again"),
    ("join binary", 3, "not a text file", "swarm file"),
    ("join tampered", 7, "changed", "swarm sign"),
    ("join later", 8, "format", "newer swarmnet"),
    ("join swn1garbage", 3, "invite", "copy"),
    ("status --data-dir nowhere", 5, "nothing is running", "swarmnet join"),
    ("status extra", 2, "extra", "status --help"),
    ("finish --data-dir nowhere", 5, "nothing is running", "swarmnet join"),
    ("finish --grace nan", 2, "--grace", "finish --help"),
    ("pause --data-dir nowhere", 5, "nothing is running", "swarmnet join"),
    ("resume --data-dir nowhere", 5, "nothing is running", "swarmnet join"),
    ("limits --data-dir nowhere", 5, "nothing is running", "swarmnet join"),
    ("limits --up fast --data-dir nowhere", 2, "--up", "limits --help"),
    ("limits --clear upload --data-dir nowhere", 2, "--clear", "limits --help"),
    ("demo --nodes 0", 2, "--nodes", "demo --help"),
    ("demo --nodes two", 2, "--nodes", "demo --help"),
    # Commands about swarms
    ("dashboard --swarm open --port 0", 5, "no bootstrap peer", "--bootstrap"),
    ("dashboard --swarm open --api-key-file file", 3, "file can be read by every user", "chmod 600"),
    ("dashboard --swarm open --api-key-file blank", 3, "no key in blank", "write one"),
    ("swarm create", 2, "NAME", "create --help"),
    ("swarm create a/b --out out", 3, "a/b", "letters"),
    ("swarm create x --out lab", 3, "already exists", "--force"),
    ("swarm create x --out file", 3, "file", "another directory"),
    ("swarm create x --out out --days 0", 2, "--days", "create --help"),
    ("swarm create x --out out --open --like lab/swarm.toml", 2, "--like", "create --help"),
    ("swarm create x --out out --like nowhere", 3, "nowhere", "get the file"),
    ("swarm create x --out out --bootstrap x", 3, "multiaddr", "/ip4/"),
    ("swarm show nowhere", 3, "nowhere", "get the file"),
    ("swarm verify tampered/swarm.toml", 7, "changed", "swarm sign"),
    ("swarm verify later/swarm.toml", 8, "format", "newer swarmnet"),
    ("swarm sign lab --key other/authority.key", 3, "does not belong to the authority", "authority.key"),
    ("swarm sign open --key nowhere", 3, "no authority", "--key"),
    ("swarm invite open", 3, "no authority", "swarm create"),
    ("swarm invite lab --role king", 2, "--role", "invite --help"),
    ("swarm invite lab --role client --uses 0", 2, "--uses", "invite --help"),
    ("swarm invite lab --role client --expires yesterday", 2, "--expires", "invite --help"),
    ("swarm approve notapeer lab", 2, "notapeer", "approve --help"),
    ("swarm revoke notapeer lab", 2, "notapeer", "revoke --help"),
    ("swarm members lab --data-dir nowhere", 3, "no issuer has admitted", "--issuer"),
    ("swarm new-key file", 3, "already exists", "another file"),
    ("swarm rotate-key open", 3, "no authority", "--open"),
    ("swarm rotate-key lab --overlap soon", 2, "--overlap", "rotate-key --help"),
    # Commands about training
    (f"{TUNE} --method magic", 2, "--method", "tune --help"),
    (f"{TUNE} --learning-rate nan", 2, "--learning-rate", "tune --help"),
    (f"{TUNE} --learning-rate 0", 2, "--learning-rate", "tune --help"),
    (f"{TUNE} --held-out 1", 2, "--held-out", "tune --help"),
    (f"{TUNE} --method es", 2, "--reward", "tune --help"),
    ("adapter merge a b --out c --weight 1 --weight nan", 2, "--weight", "adapter merge --help"),
    (f"{TUNE} --reward mine.py", 2, "--reward", "tune --help"),
    (f"{TUNE} --method zo --population 3", 2, "--population", "tune --help"),
    (f"{TUNE} --method zo --spread nan", 2, "--spread", "tune --help"),
    (f"{TUNE} --steps 0", 2, "--steps", "tune --help"),
    (f"{TUNE} --batch-size 257", 2, "--batch-size", "tune --help"),
    (f"{TUNE} --device toaster", 2, "--device", "tune --help"),
    ("tune --swarm open --out out", 2, "--data", "tune --help"),
    (f"{TUNE} --bootstrap x", 3, "multiaddr", "/ip4/"),
    (TUNE, 3, "rows.jsonl:1", "nothing was sent"),
    ("tune --swarm open --data nowhere.jsonl --out out", 3, "nowhere.jsonl", "JSON object a line"),
    ("tune --swarm open --data binary --out out", 3, "UTF-16 or UTF-32", "save it as UTF-8"),
    ("train template magic", 3, "magic", "diloco"),
    ("train create job.toml --swarm open", 3, "line 1", "correct"),
    ("train create file --swarm open", 3, "[job] is missing", "train template"),
    ("train create nowhere.toml --swarm open", 3, "nowhere.toml", "train template"),
    ("train join notajob --swarm open", 5, "no job 'notajob'", "--bootstrap"),
    ("train export nojob --out out", 3, "'nojob'", "train list"),
    ("train status nowhere.toml", 3, "nowhere.toml", "train template"),
    (f"train join {JOB} --swarm nowhere", 3, "nowhere", "swarm create"),
    ("train status --data-dir nowhere", 3, "nowhere", "train join"),
    (f"train status {JOB} --swarm open", 5, "no bootstrap peer", "--bootstrap"),
    ("train export --out out --data-dir nowhere", 3, "nowhere", "train join"),
    ("train plot --out out --data-dir nowhere", 3, "nowhere", "train join"),
]
IN_A_PROCESS = [
    "bogus",
    f"{JOIN} --blocks 5",
    "join tampered",
    "status --data-dir nowhere",
    "swarm verify later/swarm.toml",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Swarm files, good and bad, and files that are no such thing."""
    there = tmp_path_factory.mktemp("place")
    assert cli.execute(["swarm", "create", "open", "--open", "--out", str(there / "open")]) == 0
    for name in ("lab", "other"):
        assert cli.execute(["swarm", "create", name, "--out", str(there / name)]) == 0
    good = (there / "lab" / "swarm.toml").read_text()
    for name, text in (
        ("tampered", good.replace("serial = 1", "serial = 9")),
        ("later", re.sub("format = [0-9]+", "format = 1000", good)),
        ("broken", 'name = "x\n'),
        ("empty", ""),
    ):
        (there / name).mkdir()
        (there / name / "swarm.toml").write_text(text)
    (there / "model").mkdir()
    (there / "model" / "config.json").write_text("{}")
    (there / "rows.jsonl").write_text('{"prompt": 1}\n')
    (there / "job.toml").write_text("x = \n")
    (there / "file").touch()
    (there / "blank").touch(mode=0o600)
    (there / "binary").write_bytes(b"\xff\xfe\x00")
    return there


@pytest.fixture(autouse=True)
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with empty data directories, so that a test sees files that a command
    leaves behind."""
    for variable in ("XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.chdir(place)
    return place


@pytest.mark.parametrize(("typed", "code", "wrong", "remedy"), BAD, ids=[typed for typed, *_ in BAD])
def test_errors_come_with_a_next_step_and_nothing_is_done(
    typed: str,
    code: int,
    wrong: str,
    remedy: str,
    here: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(here.rglob("*"))
    assert cli.execute(shlex.split(typed)) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    message, hint = shown.err.split("error: ", 1)[1].split("\nhint: ")
    assert wrong in message
    assert remedy in hint
    assert "Traceback" not in shown.err
    assert sorted(here.rglob("*")) == before
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_missing_bootstrap_peer_is_reported_before_heavy_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swarmnet_client.model.model", None)
    assert cli.execute(shlex.split(RUN)) == 5


@pytest.mark.parametrize(("typed", "code", "wrong"), [each[:3] for each in BAD[7::6]])
def test_an_error_is_reported_in_json_too(
    typed: str, code: int, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.execute([*shlex.split(typed), "--json"]) == code
    event = json.loads(capsys.readouterr().out)
    assert (event["event"], event["exit_code"]) == ("error", code)
    assert wrong in event["message"]
    assert event["hint"]


@pytest.mark.parametrize("typed", IN_A_PROCESS)
def test_a_process_ends_with_the_exit_code_and_without_a_traceback(typed: str) -> None:
    done = subprocess.run(
        [*SWARMNET, *shlex.split(typed)], capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert done.returncode == next(code for bad, code, *_ in BAD if bad == typed)
    assert done.stdout == ""
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_every_exit_code_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "exit-codes.md").read_text()
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert {code for _, code, *_ in BAD} | {0, 1, 4, 6, 130} == documented
