"""Options beyond typer's own types: dataclasses whose fields are options, and values parsed from
text."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo


@dataclass(frozen=True)
class From:
    """Marks an ``Annotated`` option whose value ``read`` returns.

    Typer calls ``read`` with a value of type ``typed``, which is not a list. ``read`` may raise
    ``ValueError``. ``default`` is written as users type it. Without a default, an option that
    nobody gives is None.
    """

    typed: type
    read: Callable[[Any], Any]
    default: Any = None

    def __call__(self, value: Any) -> Any:
        try:
            return None if value is None else self.read(value)
        except ValueError as error:
            raise typer.BadParameter(f"{value!r} is not possible: {error}") from error


def command_for_typer(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``command`` with a signature that typer reads.

    A parameter whose type is a dataclass is replaced by one option for each field, in place and in
    order. Fields may be such dataclasses, too.
    """
    taken = inspect.signature(command).parameters.values()

    @wraps(command)
    def run(**given: Any) -> Any:
        return command(**{each.name: _value(each.name, each.annotation, given) for each in taken})

    run.__signature__ = Signature([flat for each in taken for flat in _flattened(each)])  # type: ignore[attr-defined]
    return run


def _value(name: str, annotation: Any, given: Mapping[str, Any]) -> Any:
    if not (isinstance(annotation, type) and is_dataclass(annotation)):
        return given[name]
    types = get_type_hints(annotation, include_extras=True)
    return annotation(**{each: _value(each, kind, given) for each, kind in types.items()})


def _flattened(parameter: Parameter) -> Iterator[Parameter]:
    if is_dataclass(parameter.annotation):
        types = get_type_hints(parameter.annotation, include_extras=True)
        for each in fields(parameter.annotation):
            default = Parameter.empty if each.default is MISSING else each.default
            default = default if each.default_factory is MISSING else each.default_factory()
            annotation = types[each.name]
            yield from _flattened(
                Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
        return
    extras = get_args(parameter.annotation) if get_origin(parameter.annotation) is Annotated else ()
    reads = next((each for each in extras if isinstance(each, From)), None)
    if reads is not None:
        option = copy(next(each for each in extras if isinstance(each, ParameterInfo)))
        option.callback = reads.__call__
        kind = reads.typed | None if reads.default is None else reads.typed
        parameter = parameter.replace(default=reads.default, annotation=Annotated[kind, option])
    yield parameter
