"""Dialling p2pd's control socket."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import uvloop

from swarmnet_protocols.net.p2pd.daemon import P2pd


@pytest.mark.parametrize("cancelled_after", range(6))
def test_a_call_that_is_cancelled_while_it_dials_leaves_nothing_open(
    cancelled_after: int, tmp_path: Path
) -> None:
    process: Any = None

    async def main() -> None:
        server = await asyncio.start_unix_server(lambda _, writer: writer.close(), tmp_path / "s")
        dialling = asyncio.create_task(P2pd(tmp_path / "s", process)._dial())
        for _ in range(cancelled_after):
            await asyncio.sleep(0)
        dialling.cancel()
        [outcome] = await asyncio.gather(dialling, return_exceptions=True)
        if not isinstance(outcome, BaseException):
            outcome.writer.close()
        server.close()

    uvloop.run(main())
    gc.collect()  # a writer that was not closed warns
