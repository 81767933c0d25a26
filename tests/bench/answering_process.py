"""A process of a bench that answers requests: each is a JSON object in a line of its stdin, each
answer one in a line of its stdout."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

Fields = dict[str, Any]


class AnsweringProcess:
    """``python -m MODULE ARGUMENTS`` with default OpenMP settings. It calls ``answer_all``."""

    def __init__(self, module: str, *arguments: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def wait_until_ready(self) -> None:
        """To be called once, before the first ``ask``."""
        self._answer()

    def ask(self, **question: object) -> Fields:
        """Ask a question and return the answer. Raises ``RuntimeError`` if the process has
        ended."""
        if self._process.stdin is None:
            raise RuntimeError("started without a pipe")
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Close its stdin, which ends the process, and wait for its end."""
        self._process.communicate()

    def _answer(self) -> Fields:
        if self._process.stdout is None:
            raise RuntimeError("started without a pipe")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of a bench ended with {self._process.wait()}")
        answer: Fields = json.loads(line)
        return answer


def answer_all(answer: Callable[..., Fields]) -> None:
    """Say that this process is ready, then ``answer`` every question, its fields by name, until
    stdin ends."""
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)
