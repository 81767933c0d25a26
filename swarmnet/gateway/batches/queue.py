"""The batches that callers have sent, and the tasks that answer them.

Each key has a task while it has unfinished batches, and answers one of them after another. The file
of answers is the record of a batch, so a restarted gateway continues.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from swarmnet.gateway.accounts import Account, KeyAccounts
from swarmnet.gateway.batches.answering import LineAnswerer, answer_lines
from swarmnet.gateway.batches.journal import Journal
from swarmnet.gateway.batches.lines import checked_ids, read_lines
from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.parsing import BodyParser
from swarmnet.paths import DataDirInUse, locked_data_dir
from swarmnet_protocols.errors import ConfigError, SwarmnetError
from swarmnet_protocols.machine.aio import News, cancel, persist, race

AT_ONCE = 16
"""Lines of all keys that are answered at a time. With fewer, hosts compute small forwards. With
more, a batch that ends early wastes more answers."""
MAX_LINES = 50_000
"""Most lines of a batch, as OpenAI has it. With more, the ids of short lines take more memory."""
RETRY_S = 30.0
"""Seconds until a batch is tried again after the swarm did not answer."""


@dataclass
class BatchQueue:
    """Answers the batches of all accounts.

    ``answerer`` returns the answerer of an account's lines. ``clock``: seconds since the epoch.
    """

    folder: Path
    accounts: KeyAccounts
    answerer: Callable[[Account], LineAnswerer]
    parser: BodyParser
    clock: Callable[[], float]
    cancelled: News = field(default_factory=News)
    """Tells tasks that a batch was cancelled."""
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer batches while the context is open, unless another process has the folder. Then
        requests about batches are refused. Raises ``ConfigError`` if the folder cannot be used."""
        with ExitStack() as stack:
            with suppress(DataDirInUse):
                stack.enter_context(locked_data_dir(self.folder))
                self.accounts.keep_files(self.folder)
                for account in self.accounts.values():
                    self.start(account)
            try:
                yield
            finally:
                await cancel(*self._tasks.values())

    def start(self, account: Account) -> None:
        """Answer the batches of an account, if no task does so yet."""
        task = self._tasks.get(account.name)
        if task is None or task.done():
            loop = persist("the batches", partial(self._answer_all, account))
            self._tasks[account.name] = asyncio.create_task(loop)

    async def _answer_all(self, account: Account) -> None:
        failures = 0
        while left := account.files.unfinished():
            try:
                await self._answer(account, left[failures % len(left)])
            except SwarmnetError:  # batches of other models may go on
                failures += 1
                await asyncio.sleep(RETRY_S)

    async def _answer(self, account: Account, batch: dict[str, Any]) -> None:
        """Answer one batch to its end. Raises ``Unreachable`` if the swarm does not answer."""
        files, counts = account.files, batch["request_counts"]
        source = files.content(batch["input_file_id"])
        lines = partial(read_lines, source, "", self.parser)

        async def answered() -> str:
            ids = await asyncio.to_thread(lambda: checked_ids(lines(), MAX_LINES))
            counts["total"] = len(ids)
            if batch["output_file_id"] is None:
                made = await files.add_file(f"{batch['id']}_output.jsonl", "batch_output", b"")
                batch["output_file_id"] = made["id"]
            output = files.find(batch["output_file_id"], "file")
            if batch["status"] == "validating":
                files.set_status(batch, "in_progress")
            with Journal.open(files.content(output["id"]), ids) as journal:

                def count() -> None:
                    counts.update(completed=journal.completed, failed=journal.failed)
                    output["bytes"] = journal.bytes
                    files.check_room()

                count()
                await answer_lines(lines, journal, self.answerer(account), AT_ONCE, count)
            return "completed"

        async def cancelled() -> str:
            await self.cancelled.until(lambda: batch["status"] == "cancelled")
            return "cancelled"

        async def expired() -> str:
            await asyncio.sleep(max(0.0, batch["expires_at"] - self.clock()))
            return "expired"

        try:
            status = await race(cancelled(), expired(), answered())
        except (ApiError, ConfigError) as error:
            code, message = "invalid_line", str(error).replace(str(source), "the file")
            if isinstance(error, ApiError):
                code, message = error.code, error.message
            batch["errors"] = {"object": "list", "data": [{"code": code, "message": message}]}
            status = "failed"
        files.set_status(batch, status)
