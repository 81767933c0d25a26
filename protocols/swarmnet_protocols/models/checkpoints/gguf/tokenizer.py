"""Tokenizers in gguf files, as llama.cpp reads them: the same ids for the same text, or a
refusal."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.checkpoints.checkpoint import CONFIG_FAULTS
from swarmnet_protocols.models.checkpoints.gguf.header import read_header
from swarmnet_protocols.models.checkpoints.gguf.words import SPLITTINGS, WordSplitting

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>",
    "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
})  # fmt: skip
"""Tokens that end turns, messages, texts or filled-in middles, as in llama.cpp.

See llama-vocab.cpp, ``special_eog_ids``.
"""
_CONTROL_NAMES = (ENDS - {"</s>"}) | {
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "<|code_prefix|>", "<|prefix|>",
    "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "<|code_suffix|>", "<|suffix|>",
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "<|code_middle|>", "<|middle|>",
}  # fmt: skip
"""Tokens that are control tokens even if the file gives them another type, because ordinary text
does not contain them. ``</s>`` is not listed: with another type it may be the end of an HTML
element."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Types of tokens in ``tokenizer.ggml.token_type``. All but normal ones are matched in a text
before it is split."""
_PREFIX = "tokenizer.ggml."
_ARRAYS = frozenset({f"{_PREFIX}{each}" for each in ("tokens", "scores", "token_type", "merges")})
_HINT = "use the model's Hugging Face layout"
_SPACE = "\u2581"
"""The character that sentencepiece writes for a space."""
_NEVER_IN_UTF8 = frozenset(map(chr, (0xC0, 0xC1, *range(0xF5, 0x100))))
"""Letters that byte-level vocabularies use for bytes that occur in no text. In DeepSeek's
vocabularies they are ordinary tokens."""


def check_tokenizer(fields: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if a file with these keys has no tokenizer, or an unsupported one."""
    kind, splitting = (fields.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind is None:
        raise ConfigError("it has no tokenizer", hint=_HINT)
    if kind not in _KINDS:
        raise ConfigError(f"tokenizers of kind {str(kind)[:100]!r} are not read", hint=_HINT)
    if kind == "gpt2" and (splitting or "default") not in SPLITTINGS:
        raise ConfigError(
            f"its tokenizer splits words in an unknown way: tokenizer.ggml.pre is {str(splitting)[:100]!r}",
            hint=_HINT,
        )


def read_tokenizer(path: Path, rows: int | None) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a gguf file.

    ``rows``: number of tokens with embeddings; None if unknown. Raises ``ConfigError`` if the file
    has no tokenizer, or if ids would differ from llama.cpp's, and ``IntegrityError`` if the file is
    damaged.
    """
    try:
        header, _ = read_header(path, _ARRAYS)
        check_tokenizer(header)
        fields: dict[str, Any] = {key.removeprefix(_PREFIX): value for key, value in header.items()}
        fields["tokens"] = _distinct(fields["tokens"], rows)
        return _built(fields)
    except CONFIG_FAULTS as error:
        raise ConfigError(f"{path} has no tokenizer that gguf support reads: {error}", hint=_HINT) from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", hint=_HINT) from error


def _built(fields: Mapping[str, Any]) -> "PreTrainedTokenizerBase":
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    kind, tokens, splitting = fields["model"], fields["tokens"], _splitting(fields)
    backend = _KINDS[kind](fields)
    # llama.cpp has these defaults for sentencepiece files that do not name such a token.
    ids = {"bos": 1, "eos": 2} if kind == "llama" else {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        ids[name] = fields.get(f"{key}_token_id", ids.get(name))
    named = {f"{name}_token": None if id is None else tokens[id] for name, id in ids.items()}
    _add_special(backend, fields)
    ends = [
        named[f"{side}_token"] if fields.get(f"add_{side}_token", default) else ""
        for side, default in (("bos", splitting.adds_bos), ("eos", False))
    ]
    if kind == "gemma4":  # whatever the file says, as llama.cpp does
        ends[0] = named["bos_token"]
    if None in ends:
        raise ConfigError("prompts begin or end with a token that it does not name")
    first, last = ([end] if end else [] for end in ends)
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys(first + last)],
    )
    types = _types(fields)
    # Some files name an ordinary token here. It must stay part of the text.
    own = {
        key: token
        for key, token in named.items()
        if token and (types[token] != _NORMAL or token in first or key == "eos_token")
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **own,
    )
    _check_ids(tokenizer, len(tokens))
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    found: PreTrainedTokenizerBase = tokenizer
    return found


def _distinct(tokens: Sequence[str], rows: int | None) -> list[str]:
    """Return the tokens, with made-up names for tokens without a name of their own."""
    named = [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]
    if len(set(named)) < len(named):
        raise ConfigError("its tokenizer has a token twice")
    if rows is not None and len(named) > rows:
        raise ConfigError(f"its tokenizer has {len(named)} tokens, of which {rows} have embeddings")
    return named


def _check_ids(tokenizer: Any, count: int) -> None:
    """Raise ``ConfigError`` if the tokenizer has ids beyond the ``count`` tokens of the file."""
    if max(tokenizer.get_vocab().values()) >= count:
        raise ConfigError("its tokenizer has ids beyond its vocabulary")


def _types(fields: Mapping[str, Any]) -> dict[str, int]:
    tokens = fields["tokens"]
    stated = fields.get("token_type") or [_NORMAL] * len(tokens)
    return {
        token: _CONTROL if token in _CONTROL_NAMES else kind
        for token, kind in zip(tokens, stated, strict=True)
    }


def _merges(fields: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    parts = ((merge[:1], merge[1:].partition(" ")) for merge in fields.get("merges", ()))
    pairs = [(letter + first, second) for letter, (first, _, second) in parts]
    if not all({first, second, first + second} <= vocabulary.keys() for first, second in pairs):
        raise ConfigError("its tokenizer merges tokens that its vocabulary lacks")
    return pairs


def _splitting(fields: Mapping[str, Any]) -> WordSplitting:
    if fields["model"] != "gpt2":
        return WordSplitting((), adds_bos=True)
    return SPLITTINGS[fields.get("pre") or "default"]


def _byte_level(fields: Mapping[str, Any]) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {token: id for id, token in enumerate(fields["tokens"])}
    splitting, merges = _splitting(fields), _merges(fields, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=splitting.ignores_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(each), "isolated") for each in splitting.expressions),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    spelling = bytes_to_unicode()
    types = _types(fields)
    letters = [each for each in sorted(_NEVER_IN_UTF8 & types.keys()) if types[each] != _NORMAL]
    themselves = [
        decoders.Replace(each, "".join(spelling[byte] for byte in each.encode())) for each in letters
    ]
    tokenizer.decoder = decoders.Sequence([*themselves, decoders.ByteLevel()])
    return tokenizer


def _sentencepiece(fields: Mapping[str, Any]) -> "Tokenizer":
    """Return a tokenizer whose merges are derived from the vocabulary."""
    from transformers.tokenization_utils_base import generate_merges

    tokens, is_gemma = fields["tokens"], fields["general.architecture"].startswith("gemma")
    if is_gemma:  # in this vocabulary, tokens of several spaces contain real spaces
        tokens = [_SPACE * len(token) if not token.strip(" ") else token for token in tokens]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    # Gemma's scores do not give the order of its merges. The order of the vocabulary does.
    order = [-id for id in range(len(tokens))] if is_gemma else fields["scores"]
    merges = generate_merges(vocabulary, dict(zip(tokens, order, strict=True)))
    return _with_spaces(fields, vocabulary, merges, has_prefix=bool(fields.get("add_space_prefix", True)))


def _gemma4(fields: Mapping[str, Any]) -> "Tokenizer":
    """Return a tokenizer as ``_sentencepiece`` does, but with two differences: it has the merges of
    the file, and first splits a text into lines."""
    from tokenizers import Regex, pre_tokenizers

    vocabulary = {token: id for id, token in enumerate(fields["tokens"])}
    tokenizer = _with_spaces(fields, vocabulary, _merges(fields, vocabulary), has_prefix=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    return tokenizer


def _with_spaces(
    fields: Mapping[str, Any],
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    has_prefix: bool,
) -> "Tokenizer":
    """Return a tokenizer that treats spaces as part of the text.

    ``has_prefix``: a space precedes each text.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = fields["tokens"][fields.get("unknown_token_id", 0)]
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    stripped = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    return tokenizer


_KINDS: Mapping[str, Callable[[Mapping[str, Any]], "Tokenizer"]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _gemma4,
}
"""Functions that build a tokenizer from the fields of a file, by ``tokenizer.ggml.model``."""


def _add_special(backend: "Tokenizer", fields: Mapping[str, Any]) -> None:
    """Have the tokens that the file marks match in a text as they are written, before the text is
    split."""
    from tokenizers import AddedToken

    # Marked tokens of Phi-3 include the spaces after them. llama.cpp recognises Phi-3 only by the
    # name of the model, and the hub has several spellings.
    name, is_sentencepiece = str(fields.get("general.name", "")).lower(), fields["model"] == "llama"
    strips = (
        "phi-3" in name or "phi3" in name or (fields["general.architecture"] == "phi3" and is_sentencepiece)
    )
    vocabulary = backend.get_vocab()
    entries: dict[bool, list[AddedToken]] = {True: [], False: []}
    for token, kind in _types(fields).items():
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token in vocabulary:
            takes_spaces = strips and token not in ("<unk>", "<s>", "<|endoftext|>")
            is_special = kind != _USER_DEFINED
            entries[is_special].append(
                AddedToken(token, rstrip=takes_spaces, normalized=False, special=is_special)
            )
    backend.add_special_tokens(entries[True])
    backend.add_tokens(entries[False])
