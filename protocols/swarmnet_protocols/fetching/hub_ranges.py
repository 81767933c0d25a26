"""Read ranges of files on the hub over HTTP. Callers verify the bytes."""

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

from swarmnet_protocols.errors import ConfigError, IntegrityError, Unreachable
from swarmnet_protocols.fetching.pieces import ModelFile

TIMEOUT_S = 20.0
"""Seconds without a byte from the hub until a read is given up."""
MIN_BYTES_PER_S = 20_000
"""Least mean rate of an answer in bytes per second. A slower answer ends after ``TIMEOUT_S``."""


def no_answer() -> tuple[type[Exception], ...]:
    """Return the errors for a hub that cannot be reached or does not answer.

    They belong to the HTTP library that huggingface_hub uses.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)


def commit_of(repository: str, revision: str | None, kind: Literal["model", "dataset"]) -> str:
    """Return the present commit of a repository of the hub: 40 hexadecimal digits.

    ``revision`` is a branch or a tag; None is the main branch. Raises ``ConfigError`` if the hub
    has no such repository or revision, and ``Unreachable`` if it does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    shown = repository if revision is None else f"{repository}@{revision}"
    try:
        about = HfApi().repo_info(repository, revision=revision or "main", repo_type=kind, timeout=TIMEOUT_S)
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ConfigError(
            f"the hub has no {kind} {shown}", hint=f"check the name; a gated {kind} needs `hf auth login`"
        ) from error
    except no_answer() as error:
        raise Unreachable(f"the hub does not answer for {shown}: {error}", hint="try again later") from error
    if not re.fullmatch("[0-9a-f]{40}", commit := str(about.sha)):
        raise IntegrityError(f"the hub names no commit of {shown}", hint="try again later")
    return commit


@dataclass
class HubRanges:
    """The files of one commit of a repository, as a source of their bytes."""

    repository: str
    commit: str
    name: str = "the hub"
    is_last: bool = True
    connections: int = 4
    max_bytes: int = 16 << 20

    async def prepare(self) -> None:
        """Do nothing, since the hub is always ready."""

    def has(self, file: ModelFile, piece: int) -> bool:
        """Return True, since the hub has whole files."""
        return True

    async def read(self, file: ModelFile, start: int, end: int) -> bytes:
        """Return the bytes [start, end), or a prefix if the connection breaks.

        Raises ``Unreachable`` if no byte arrives, and ``IntegrityError`` for an answer with another
        part of the file.
        """
        stopped = threading.Event()
        try:
            return await asyncio.to_thread(self.read_now, file, start, end, stopped.is_set)
        finally:
            stopped.set()

    def read_now(
        self, file: ModelFile, start: int, end: int, is_stopped: Callable[[], bool] = lambda: False
    ) -> bytes:
        """Read as ``read`` does, on a thread without an event loop.

        ``is_stopped`` is called between chunks and ends the read.
        """
        from huggingface_hub.errors import OfflineModeIsEnabled

        found = bytearray()
        failures: tuple[type[Exception], ...] = (*no_answer(), OfflineModeIsEnabled, OSError)
        begun = time.monotonic()
        try:
            with self._answer(file, start, end) as answer:
                _check_range(answer, file, start, end)
                # In chunks: if the answer breaks off, the bytes before that are kept.
                for chunk in answer.iter_raw():
                    found += chunk[: end - start - len(found)]
                    late = time.monotonic() - begun - TIMEOUT_S
                    if len(found) == end - start or is_stopped() or late * MIN_BYTES_PER_S > len(found):
                        break
        except failures as error:
            if not found:
                raise Unreachable(f"{file.name} of {self.repository} cannot be read: {error}") from error
        if not found:
            raise Unreachable(f"nothing of {file.name} of {self.repository} was sent")
        return bytes(found)

    @contextlib.contextmanager
    def _answer(self, file: ModelFile, start: int, end: int) -> Iterator[Any]:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import get_session

        url = hf_hub_url(self.repository, file.name, revision=self.commit)
        # Each request asks the hub again, because the addresses to which it redirects expire.
        headers = build_hf_headers() | {"range": f"bytes={start}-{end - 1}", "accept-encoding": "identity"}
        with get_session().stream(
            "GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True
        ) as answer:
            _check_secure(answer)
            yield answer


def _check_secure(answer: Any) -> None:
    """Raise ``IntegrityError`` if a request over TLS was redirected to an address without TLS.

    Some bytes have no other proof than TLS.
    """
    addresses = [str(each.url) for each in (*answer.history, answer)]
    if addresses[0].startswith("https:") and not all(each.startswith("https:") for each in addresses):
        raise IntegrityError(f"the hub redirects to {addresses[-1][:200]}, which is not encrypted")


def _check_range(answer: Any, file: ModelFile, start: int, end: int) -> None:
    """Raise an error unless the answer is the stored bytes [start, end) of a file of the expected
    size.
    """
    if answer.status_code == 200 and (start, end) == (0, file.size):
        return
    if answer.status_code != 206:
        raise Unreachable(
            f"the answer to a request for a part of {file.name} has status {answer.status_code}"
        )
    sent = answer.headers.get("content-range", "")
    if sent != f"bytes {start}-{end - 1}/{file.size}" or "content-encoding" in answer.headers:
        raise IntegrityError(
            f"another part of {file.name} was sent than bytes {start} to {end}: {sent[:100]!r}"
        )
