"""Canonical JSON: one byte sequence for equal content, for hashes and signatures."""

import json
from collections.abc import Mapping


def canonical_json(fields: Mapping[str, object]) -> bytes:
    """Return ``fields`` as JSON: ASCII with sorted keys and no spaces. Raises ``ValueError`` for
    NaN and infinity."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode()
