"""The chat page of the gateway: its files, and the paths that need no key."""

from pathlib import Path

from swarmnet.web.pages import page_paths

STATIC = Path(__file__).parent / "static"
PUBLIC_PATHS = ("/health", *page_paths(STATIC))
"""Paths that need no key. The page asks for the key itself."""
