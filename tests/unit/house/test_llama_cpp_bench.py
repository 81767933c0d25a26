"""How the bench of decoding runs llama.cpp's programs, with stand-ins for them."""

import json
import socket
import sys
from pathlib import Path

import pytest

from tests.bench.llama_cpp import LlamaCpp, Rates

BENCH = """
import json, sys
if "broken.gguf" in sys.argv:
    sys.exit("no such model")
slower = 1 + sys.argv.count("--rpc")
rates = [{"n_prompt": 512, "n_gen": 0, "avg_ts": 300 / slower}, {"n_prompt": 0, "n_gen": 64, "avg_ts": 100 / slower}]
print(json.dumps(rates), file=sys.stdout)
open(__file__ + ".called", "w").write(json.dumps(sys.argv[1:]))
"""
SERVER = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("-p") + 1]))) as server:
    while True:
        server.accept()[0].close()
"""


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


def test_rates_are_those_that_llama_bench_prints(tmp_path: Path) -> None:
    bench = program(tmp_path / "llama-bench", BENCH)
    llama_cpp = LlamaCpp(tmp_path, threads=2)
    assert llama_cpp.measure(Path("m.gguf"), prompt=512, tokens=64) == Rates(prompt=300, decode=100)
    servers = ["127.0.0.1:1", "127.0.0.1:2"]
    rates = llama_cpp.measure(Path("m.gguf"), prompt=512, tokens=64, servers=servers)
    assert rates == Rates(prompt=150, decode=50)
    called = json.loads(Path(f"{bench}.called").read_text())
    assert called[called.index("--rpc") + 1] == "127.0.0.1:1,127.0.0.1:2"
    assert called[called.index("-ts") + 1] == "1/1"
    with pytest.raises(RuntimeError, match="no such model"):
        llama_cpp.measure(Path("broken.gguf"), prompt=512, tokens=64)


def test_servers_run_until_the_end_and_their_absence_is_explained(tmp_path: Path) -> None:
    llama_cpp = LlamaCpp(tmp_path, threads=2)
    with pytest.raises(RuntimeError, match="GGML_RPC=ON"), llama_cpp.servers(1):
        pass
    program(tmp_path / "ggml-rpc-server", SERVER)
    with llama_cpp.servers(2) as addresses:
        ports = [int(address.rpartition(":")[2]) for address in addresses]
        for port in ports:
            socket.create_connection(("127.0.0.1", port)).close()
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
