"""JSON merge patches, applied as readers of the dashboard apply them."""

from typing import Any


def merged(target: Any, patch: Any) -> Any:
    """``MergePatch`` of RFC 7386, section 2."""
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
    """``value`` without its null members, for readers to whom null and missing mean the same."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return value
