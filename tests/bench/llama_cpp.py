"""Rates of llama.cpp's own programs on this machine, in one process and over its RPC backend, as a
yardstick.

The programs are not part of this repository. ``make llama-bench`` builds them in
``.pytest_cache/llama.cpp/build/bin``.
"""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_SERVERS = ("ggml-rpc-server", "rpc-server")
"""Names of the program of a server: the present one and a former one."""
_READY_S = 30.0


@dataclass(frozen=True)
class Rates:
    """Tokens a second: of a prompt, and of decoding after an empty prompt."""

    prompt: float
    decode: float


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp's programs in ``directory``, each with this number of threads."""

    directory: Path
    threads: int

    def measure(self, model: Path, *, prompt: int, tokens: int, servers: Sequence[str] = ()) -> Rates:
        """Measure the rates for ``prompt`` and ``tokens`` tokens in one process, or on ``servers``
        (host:port), each with an equal share of the layers.

        Raises ``RuntimeError`` with llama.cpp's message if it fails.
        """
        command = [
            self.directory / "llama-bench",
            "-m",
            model,
            "-t",
            str(self.threads),
            "-o",
            "json",
            "-r",
            "1",
        ]
        command += ["-p", str(prompt), "-n", str(tokens)]
        if servers:
            command += ["--rpc", ",".join(servers), "-ngl", "99", "-ts", "/".join("1" for _ in servers)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=_environment())
        if done.returncode:
            raise RuntimeError(f"llama-bench ended with {done.returncode}: {done.stderr[-1000:]}")
        rates = {test["n_gen"] > 0: test["avg_ts"] for test in json.loads(done.stdout)}
        return Rates(prompt=rates[False], decode=rates[True])

    @contextmanager
    def servers(self, count: int) -> Iterator[list[str]]:
        """Run ``count`` servers on loopback for the duration of the context; their addresses,
        host:port."""
        program = next((self.directory / name for name in _SERVERS if (self.directory / name).exists()), None)
        if program is None:
            raise RuntimeError(f"{self.directory} has no {_SERVERS[0]}: build llama.cpp with -DGGML_RPC=ON")
        with ExitStack() as stack:
            addresses = []
            for _ in range(count):
                port = _free_port()
                options = ["-H", "127.0.0.1", "-p", str(port), "-t", str(self.threads)]
                server = subprocess.Popen(
                    [program, *options],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_environment(),
                )
                stack.callback(server.wait)
                stack.callback(server.kill)
                _wait_for(port, server)
                addresses.append(f"127.0.0.1:{port}")
            yield addresses


def _environment() -> dict[str, str]:
    """The environment of this process without its settings of OpenMP, so that the yardstick runs as
    llama.cpp's users run it."""
    return {
        name: value for name, value in os.environ.items() if name not in {"GOMP_SPINCOUNT", "OMP_NUM_THREADS"}
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _READY_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError("a server of llama.cpp did not start")
