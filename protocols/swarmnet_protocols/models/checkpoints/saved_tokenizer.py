"""Reads the tokenizer in a model's folder, and keeps its class from opening any other file of this
machine."""

import json
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.checkpoints.checkpoint import CONFIG_FAULTS
from swarmnet_protocols.models.checkpoints.model_folder import MAX_CONFIG_BYTES, file_of, json_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files whose settings transformers passes to the tokenizer's class.

Some settings are paths that the class opens.
"""
_TEXT_SETTINGS = re.compile(
    r"\w+_tokens?|added_tokens_decoder|chat_template|tokenizer_class|(padding|truncation)_side|model_input_names"
)
"""Settings that are tokens, templates or names in transformers, which no class opens as files."""
_SENTENCEPIECE = threading.Lock()


def tokenizer_in(root: Path, names: Iterable[str]) -> "PreTrainedTokenizerBase":
    """Return the tokenizer in the files ``names``, as far as they are in ``root``.

    Raises ``ConfigError`` if transformers does not read it.
    """
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="swarmnet-tokenizer-") as folder:
        _lay_out(root, names, Path(folder))
        try:
            with _reading_sentencepiece():
                tokenizer = AutoTokenizer.from_pretrained(
                    folder, trust_remote_code=False, local_files_only=True
                )
        except (*CONFIG_FAULTS, OSError, ImportError) as error:
            raise ConfigError(
                f"{root} has a tokenizer that transformers does not read: {error}",
                hint="put its tokenizer.json there",
            ) from error
    tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = str(root)
    # saving the tokenizer copies this file
    if vocabulary := getattr(tokenizer, "vocab_file", None):
        tokenizer.vocab_file = str(root / Path(vocabulary).name)
    return tokenizer


def _lay_out(root: Path, names: Iterable[str], folder: Path) -> None:
    """Link the files into ``folder``.

    Settings are copied without anything that could name other files of this machine.
    """
    for name in names:
        path = file_of(root, name)
        if path is None:
            continue
        if name in _SETTINGS:
            settings = json_in(path, MAX_CONFIG_BYTES)
            kept = {key: value for key, value in settings.items() if _is_no_path(key, value)}
            (folder / name).write_text(json.dumps(kept))
        else:
            (folder / name).symlink_to(path.absolute())


def _is_no_path(key: str, value: object) -> bool:
    return value is None or isinstance(value, bool | int | float) or _TEXT_SETTINGS.fullmatch(key) is not None


@contextmanager
def _reading_sentencepiece() -> Iterator[None]:
    """Have transformers read a ``tokenizer.model`` without the package sentencepiece.

    transformers parses such a file with protobuf, and does not use the package that it asks for.
    The package would bring a second OpenMP library into this process.
    """
    # Until the module is loaded, ``from transformers import convert_slow_tokenizer`` gives the
    # function of that name, which the module has.
    convert_slow_tokenizer: Any = import_module("transformers.convert_slow_tokenizer")
    with _SENTENCEPIECE:
        asked = convert_slow_tokenizer.requires_backends
        convert_slow_tokenizer.requires_backends = lambda *_: None
        try:
            yield
        finally:
            convert_slow_tokenizer.requires_backends = asked
