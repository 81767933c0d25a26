"""Training methods: rules that turn an exchanged average into new parameters.

There is one module per method. ``base.py`` defines the interface. ``get_method`` creates a method
from a job's settings, also one from ``outside``.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.training.methods.allreduce import AllReduce, AllReduceSettings
from swarmnet_protocols.training.methods.base import OWN, Average, Kind, Method, Settings
from swarmnet_protocols.training.methods.co2 import CO2, CO2Settings
from swarmnet_protocols.training.methods.diloco import DiLoCo, DiLoCoSettings
from swarmnet_protocols.training.methods.eager import Eager, EagerSettings
from swarmnet_protocols.training.methods.noloco import NoLoCo, NoLoCoSettings
from swarmnet_protocols.training.methods.outside import find_outside, try_method
from swarmnet_protocols.training.methods.sparseloco import SparseLoCo, SparseLoCoSettings
from swarmnet_protocols.training.methods.streaming import Streaming, StreamingSettings
from swarmnet_protocols.training.methods.zo import ZeroOrder, ZeroOrderSettings

__all__ = ["METHODS", "OWN", "Average", "Kind", "Method", "ZeroOrder", "code_of", "get_method"]

_METHODS: Mapping[str, tuple[Callable[[Any], Method], type[Settings]]] = MappingProxyType(
    {
        "allreduce": (AllReduce, AllReduceSettings),
        "diloco": (DiLoCo, DiLoCoSettings),
        "streaming": (Streaming, StreamingSettings),
        "eager": (Eager, EagerSettings),
        "noloco": (NoLoCo, NoLoCoSettings),
        "sparseloco": (SparseLoCo, SparseLoCoSettings),
        "co2": (CO2, CO2Settings),
        "zo": (ZeroOrder, ZeroOrderSettings),
    }
)

METHODS = tuple(_METHODS)
"""The names of all methods."""


def get_method(name: str, settings: Mapping[str, float | int | str], code: str | None = None) -> Method:
    """Create the method with this name. ``code``: the SHA-256 of the file of a method from outside;
    None allows any.

    Raises ``ConfigError`` that names a wrong method or setting.
    """
    if name in _METHODS and code is None:
        return _made(name, settings, *_METHODS[name])
    outside = None if name in _METHODS else find_outside(name, code)
    if outside is None:
        raise ConfigError(
            f"unknown method {name!r}" + (f" with the code {code}" if code else ""),
            hint=f"one of: {', '.join(_METHODS)}; a method from outside needs --method-file FILE.py",
        )
    make = partial(_made, name, settings, outside.make, outside.settings)
    try_method(name, make)
    return make()


def code_of(name: str) -> str | None:
    """Return the SHA-256 of the file of a method from outside, or None for a built-in method."""
    outside = None if name in _METHODS else find_outside(name)
    return None if outside is None else outside.code


def _made(
    name: str,
    settings: Mapping[str, float | int | str],
    make: Callable[[Any], Method],
    model: type[Settings],
) -> Method:
    try:
        checked = model.model_validate(dict(settings))
    except ValidationError as error:
        raise ConfigError(
            f"{name}: {'; '.join(_explain(details) for details in error.errors())}",
            hint=f"its settings: {', '.join(model.model_fields) or 'none'}",
        ) from error
    return make(checked)


def _explain(details: Any) -> str:
    if details["type"] == "extra_forbidden":
        return f"no setting {details['loc'][0]!r}"
    if details["loc"]:
        message = details["msg"]
        return f"{details['loc'][0]} = {details['input']!r}: {message[0].lower()}{message[1:]}"
    return str(details["ctx"]["error"])
