"""Tokenizers in gguf files, as llama.cpp reads them: the same ids for the same text, or a refusal."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.checkpoints.checkpoint import CONFIG_FAULTS
from swarmnet_protocols.models.checkpoints.gguf_words import SPLITTINGS, WordSplitting

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Types of tokens in ``tokenizer.ggml.token_type`` that are matched in a text before it is split.
"""
_HINT = "use the model in Hugging Face layout"
_SPACE = "\u2581"
"""What sentencepiece writes for a space."""


def read_tokenizer(path: Path, name: str) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a gguf file, whose header is known to be sound.

    ``name``: the model's name in the header.

    Raises ``ConfigError`` if the file has none, or one whose ids would not be those of llama.cpp.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import get_gguf_tokenizer

    try:
        architecture, fields, settings = get_gguf_tokenizer(str(path))
        return _built(architecture, fields, settings, name.lower())
    except CONFIG_FAULTS as error:
        raise ConfigError(f"{path} has no tokenizer that is read from gguf: {error}", hint=_HINT) from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", hint=_HINT) from error


def _built(
    architecture: str, fields: dict[str, Any], settings: dict[str, Any], name: str
) -> "PreTrainedTokenizerBase":
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    kind, tokens = fields.get("tokenizer_type"), fields["tokens"]
    splitting = WordSplitting((), adds_bos=True)
    if kind == "gpt2":
        splitting = _splitting(str(fields.get("pre_tokenizer_type", "default")))
        backend = _byte_level(fields, splitting)
    elif kind == "llama":
        backend = _sentencepiece(architecture, fields)
    else:
        raise ConfigError(f"tokenizers of the kind {kind!r} are not read")
    _add_special(backend, fields, name)
    ends = {
        side: settings[f"{side}_token"] if settings.get(f"add_{side}_token", default) else None
        for side, default in (("bos", splitting.adds_bos), ("eos", False))
    }
    added = [token for token in ends.values() if token is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=[*([ends["bos"]] if ends["bos"] else []), "$A", *([ends["eos"]] if ends["eos"] else [])],
        special_tokens=[(token, tokens.index(token)) for token in added],
    )
    if max(backend.get_vocab(with_added_tokens=True).values()) >= len(tokens):
        raise ConfigError("the tokenizer has ids beyond its vocabulary")
    own = {
        key: settings[key]
        for key in ("bos_token", "eos_token", "unk_token", "pad_token")
        if settings.get(key)
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **own,
    )
    tokenizer.chat_template = settings.get("chat_template")
    found: PreTrainedTokenizerBase = tokenizer
    return found


def _splitting(name: str) -> WordSplitting:
    if name not in SPLITTINGS:
        raise ConfigError(
            f"its tokenizer splits words in a way that is not read: tokenizer.ggml.pre is {name[:100]!r}"
        )
    return SPLITTINGS[name]


def _byte_level(fields: Mapping[str, Any], splitting: WordSplitting) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: id for id, token in enumerate(fields["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields.get("merges", ())]
    known = [pair for pair in merges if len(pair) == 2 and {*pair, "".join(pair)} <= vocabulary.keys()]
    tokenizer = Tokenizer(models.BPE(vocabulary, known, ignore_merges=splitting.ignores_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(each), "isolated") for each in splitting.expressions),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(architecture: str, fields: Mapping[str, Any]) -> "Tokenizer":
    """The merges are derived from the vocabulary. Spaces are part of the text."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers.tokenization_utils_base import generate_merges

    tokens = fields["tokens"]
    if architecture.startswith("gemma"):  # its tokens of several spaces are written with spaces
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    # The scores of Gemma do not tell the order of its merges: its vocabulary has that order.
    order = [-id for id in range(len(tokens))] if architecture.startswith("gemma") else fields["scores"]
    model = models.BPE(
        vocabulary,
        generate_merges(vocabulary, dict(zip(tokens, order, strict=True))),
        unk_token=tokens[fields.get("unk_token_id", 0)],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    has_prefix = bool(fields.get("add_prefix_space", True))
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    stripped = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    return tokenizer


def _add_special(backend: "Tokenizer", fields: Mapping[str, Any], name: str) -> None:
    """Have the tokens that the file marks found in a text as they are written.

    ``name``: the model's, in lower case.
    """
    from tokenizers import AddedToken

    types = fields.get("token_type") or ()
    is_phi3 = "phi-3" in name or "phi3" in name
    vocabulary = backend.get_vocab()
    entries: dict[bool, list[AddedToken]] = {True: [], False: []}
    for token, kind in zip(fields["tokens"], types, strict=False):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token in vocabulary:
            # llama.cpp drops spaces after these tokens in models of this name.
            strips = is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
            is_special = kind != _USER_DEFINED
            entries[is_special].append(AddedToken(token, rstrip=strips, normalized=False, special=is_special))
    backend.add_special_tokens(entries[True])
    backend.add_tokens(entries[False])
