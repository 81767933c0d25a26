"""Keeping a node small on a machine that is not ours."""

import sys


def import_transformers() -> None:
    """Import transformers' model code without scipy, which it takes only for losses of object detectors.

    Measured with transformers 5.23: 36 MB and 0.4 s less. A process that needs scipy as well imports it afterwards.
    """
    hidden = "scipy" not in sys.modules
    if hidden:
        sys.modules["scipy"] = None  # type: ignore[assignment]  # Python's way to say: not installed
    try:
        import transformers.modeling_utils  # noqa: F401
        from transformers.loss import loss_utils  # noqa: F401
    finally:
        if hidden:
            del sys.modules["scipy"]
