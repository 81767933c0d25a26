"""``swarmnet serve`` in its own process."""

import subprocess
from typing import Any

from tests.support.processes.commands import RunningCommand
from tests.support.processes.nodes import Swarm


class GatewayProcess(RunningCommand):
    """A gateway of the swarm of a lab."""

    def __init__(self, lab: Swarm, *options: str, all_models: bool = False) -> None:
        where = ("--swarm", str(lab.file), "--cache-dir", str(lab.cache_dir), *lab.bootstrap_options)
        model = () if all_models else ("--model", lab.model)
        arguments = ("serve", *model, "--port", "0", *where, *options)
        super().__init__(arguments, lab.directory / "serve.log", stdin=subprocess.DEVNULL)

    @property
    def url(self) -> str:
        url: str = self.wait("ready")["url"]
        return url

    def openai(self, **options: Any) -> Any:
        """OpenAI's client for this gateway, without retries."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options})
