"""Models on the meta device, made without the values that nobody will see."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

_META = torch.device("meta")
_INITIALISERS = {init.constant_, init.kaiming_uniform_, init.normal_, init.uniform_}
"""Those that modes are asked about; others are made of them, or seldom."""


class blank(TorchFunctionMode):  # noqa: N801 - a context manager
    """While it is open, in this thread, ``torch.nn.init`` leaves alone what is on the meta device, and ranges are made elsewhere.

    Both, torch does in Python there, with a computer algebra system to watch the shapes: 35 MB, and a second for thirty blocks.
    Ranges are the short ones that rotary embeddings begin with.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in _INITIALISERS and given["tensor"].is_meta:
            return given["tensor"]
        if func is torch.arange and torch.device(given.get("device") or _META) == _META:
            given = {**given, "device": "cpu"}
        return func(*args, **given)
