"""JSON Merge Patches as readers of the dashboard apply them."""

from typing import Any


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386, as it is written there."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def without_nulls(value: Any) -> Any:
    """``value`` as it is read where null and missing mean the same."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return value
