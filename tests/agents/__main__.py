"""Agents from npm take a turn with a tool call on a demo swarm.

    python -m tests.agents claude codex [--steps 30] [--keep DIR]

The demo's model is too small to choose a tool by itself, so it learns to:

1. Each agent asks an endpoint that answers by a script (``script.py``), in a folder of files.
2. ``swarmnet tune`` trains an adapter on these conversations, through the hosts of ``swarmnet demo
   --keep``.
3. ``swarmnet serve`` offers the adapter. ``swarmnet agent`` starts each agent again, in a folder
   whose file has a random name. Only the tool's answer tells this name.

Prints JSON, a line for each agent. The agents are looked for on PATH.
"""

import argparse
import json
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from swarmnet.cli.endpoint.agent_programs import AGENTS
from swarmnet.paths import default_cache_dir
from swarmnet.resident import Resident, announced
from swarmnet_protocols.models import resolve
from tests.agents.script import Script, playing
from tests.support.processes.commands import SWARMNET, RunningCommand

MODEL = "smollm2-135m-instruct"
ADAPTER = "turn"
CONTEXT = 8192
ROW = 1024
"""Most tokens of a row: hosts take no longer ones. Agents get few tools, so that a turn fits."""
LIMIT_S = 600.0
QUESTION = "List the files of this folder."
BRIEF = "You use a tool, then you answer briefly."
CODEX_LEFT_OUT = ("goals", "multi_agent", "view_image")
CODEX_SETTINGS = (
    "model_instructions_file={home}/brief.md",
    "web_search=disabled",
    "skills.include_instructions=false",
    "tools.experimental_request_user_input.enabled=false",
    "include_permissions_instructions=false",
    "include_environment_context=false",
)
ARGUMENTS: Mapping[str, Sequence[str]] = {
    "claude": (
        *("--print", QUESTION, "--tools", "Glob", "--allowedTools", "Glob", "--system-prompt", BRIEF),
        *("--output-format", "stream-json", "--verbose"),
    ),
    "codex": (
        *("exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only"),
        *(part for each in CODEX_LEFT_OUT for part in ("--disable", each)),
        *(part for each in CODEX_SETTINGS for part in ("-c", each)),
        QUESTION,
    ),
    "opencode": ("run", "--format", "json", QUESTION),
    "aider": ("--message", QUESTION, "--no-git", "--yes-always", "--no-show-model-warnings"),
}
"""Arguments with which an agent takes one turn, with few tools and short instructions."""


def take_turn(name: str, model: str, home: Path) -> dict[str, Any]:
    """Run an agent for one turn in a new folder. Return what it printed, and whether it listed the
    folder's file, whose name is random."""
    folder = home / f"folder-{secrets.token_hex(4)}"
    folder.mkdir()
    secret = f"{secrets.token_hex(6)}.txt"
    (folder / secret).write_text("The sea is calm.\n")
    (home / "brief.md").write_text(BRIEF)
    arguments = [each.format(home=home) for each in ARGUMENTS[name]]
    began_s = time.monotonic()
    done = subprocess.run(
        [*SWARMNET, "agent", name, "--model", model, "--", *arguments],
        cwd=folder,
        env={**os.environ, "HOME": str(home), "PWD": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return {
        "agent": name,
        "exit_code": done.returncode,
        "listed": secret in done.stdout,
        "seconds": round(time.monotonic() - began_s, 1),
        "output": done.stdout[-4000:],
        "errors": done.stderr[-2000:],
    }


@contextmanager
def demo_swarm(folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield the options with which commands enter a running demo swarm."""
    with RunningCommand(("demo", "--keep"), folder / "demo.log") as demo:
        ready = demo.wait("serving")
        yield ("--swarm", ready["swarm"], "--bootstrap", ready["bootstrap"])


def learn(rows: Sequence[Mapping[str, Any]], steps: int, enter: Sequence[str], folder: Path) -> Path:
    """Train an adapter on the rows, and return its directory. The loss is on every answer in a row,
    so a conversation that another row continues is left out."""
    talks = [row["messages"] for row in rows]
    last = [
        talk for talk in talks if not any(talk == other[: len(talk)] for other in talks if other is not talk)
    ]
    data, out = folder / "rows.jsonl", folder / ADAPTER
    data.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in last))
    settings = ("--steps", str(steps), "--batch-size", "1", "--held-out", "0", "--max-length", str(ROW))
    command = ("tune", *enter, "--data", str(data), "--out", str(out), *settings)
    with RunningCommand(command, folder / "tune.log") as tune:
        if tune.wait_for_end(timeout_s=3600.0):
            raise RuntimeError(f"{tune.events[-1:]} {(folder / 'tune.log').read_text()}")
        print(json.dumps({"rows": len(last), "end": tune.events[-1]}), flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.agents")
    parser.add_argument("agents", nargs="+", choices=AGENTS)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--keep", type=Path, help="keep requests, rows and adapter in this folder")
    asked = parser.parse_args()
    with ExitStack() as stack:
        folder = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        home = folder / "home"
        home.mkdir(parents=True, exist_ok=True)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        tokenizer = resolve(MODEL, cache_dir=default_cache_dir()).tokenizer()
        script = Script(MODEL, CONTEXT, tokenizer)
        with playing(script) as url, announced(Resident(url, "a-key", "", MODEL)):
            for name in asked.agents:
                print(json.dumps({"scripted": take_turn(name, MODEL, home)}), flush=True)
        (folder / "requests.json").write_text(json.dumps(script.bodies, indent=1))
        if asked.steps == 0:
            return
        enter = stack.enter_context(demo_swarm(folder))
        out = learn(script.rows, asked.steps, enter, folder)
        options = ("--model", MODEL, "--adapter", f"{ADAPTER}={out}", "--port", "0")
        serve = stack.enter_context(RunningCommand(("serve", *enter, *options), folder / "serve.log"))
        serve.wait("ready")
        for name in asked.agents:
            print(json.dumps(take_turn(name, f"{MODEL}:{ADAPTER}", home)), flush=True)


if __name__ == "__main__":
    main()
