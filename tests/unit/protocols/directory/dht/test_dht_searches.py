"""Searches of the directory whose callers leave."""

import asyncio
import gc
from typing import Any

from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind


def test_a_search_that_fails_after_its_caller_left_is_not_logged() -> None:
    prepare_hivemind()
    from swarmnet_protocols.directory.dht.node import _Node

    logged: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        node, may_fail = object.__new__(_Node), asyncio.Event()
        node._searches = set()

        async def search() -> None:
            await may_fail.wait()
            raise AssertionError

        caller = asyncio.create_task(node._to_the_end(search()))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait([caller])
        may_fail.set()
        await asyncio.wait(node._searches)
        gc.collect()

    asyncio.run(main())
    assert logged == []
