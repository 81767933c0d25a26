"""The ways in which tokenizers of gguf files split a text into words, by llama.cpp's names.

The expressions are llama.cpp's (llama-vocab.cpp, ``llm_tokenizer_bpe``), in the syntax of
Oniguruma. Each expression splits the rest that the expressions before it have left. Matches are not
split again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_S = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
"""English endings after an apostrophe."""
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_S}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS_AND_SPACES}"
_QWEN2 = rf"{_S}|{_WORD}|\p{{N}}|{_MARKS_AND_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str, upper: str = _UPPER, lower: str = _LOWER) -> str:
    """Return an expression that splits words where a capital letter follows a small one."""
    return rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{ending}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ending}"


_GPT4O = rf"{_cased(_S + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = rf"{_cased('')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_YOUTU = rf"{_cased(_S + '?')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_NO_HAN = r"&&[^\p{Han}]]"
_HAN_ASIDE = _cased(_S + "?", _UPPER[:-1] + _NO_HAN, _LOWER[:-1] + _NO_HAN)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)
_CHINESE_JAPANESE = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_LATIN_GREEK_CYRILLIC = (
    r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}"
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}"
    r"\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}"
    r"\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}"
    r"\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}"
    r"\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-"
    r"\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}"
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}"
    r"\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}"
    r"\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}"
    r"\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}"
    r"\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}"
    r"\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}"
    r"\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-"
    r"\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+"
)
_KOREAN_CHINESE = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}"
    r"\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]"
    r"+|[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
)
_MARKS = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"
_CJK = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_UP_TO_MARKS = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"


@dataclass(frozen=True)
class WordSplitting:
    """One way to split a text into words."""

    expressions: tuple[str, ...]
    ignores_merges: bool = False
    """True if a word that is a token becomes that token, even if the merges would give others."""
    adds_bos: bool = False
    """True if prompts begin with the BOS token in files that do not say so."""


def _named(
    names: str, *expressions: str, ignores_merges: bool = False, adds_bos: bool = False
) -> dict[str, WordSplitting]:
    return dict.fromkeys(names.split(), WordSplitting(expressions, ignores_merges, adds_bos))


SPLITTINGS: Mapping[str, WordSplitting] = {
    **_named("default", r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **_named(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _LLAMA3,
        ignores_merges=True,
        adds_bos=True,
    ),
    **_named("dbrx smaug-bpe chatglm-bpe", _LLAMA3),
    **_named("glm4 glm5", _LLAMA3, ignores_merges=True),
    **_named("minicpm5", r"\p{N}{1,3}", rf"{_S}|{_WORD}|\p{{N}}+|{_MARKS_AND_SPACES}", ignores_merges=True),
    **_named("deepseek-llm", r"[\r\n]", _LATIN_GREEK_CYRILLIC, _MARKS, r"\s+$", _CJK, r"\p{N}+"),
    **_named("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    **_named("deepseek-v3 hunyuan-dense joyai-llm hy_v4", r"\p{N}{1,3}", _CHINESE_JAPANESE, _DEEPSEEK3),
    **_named("youtu", _KOREAN_CHINESE, _YOUTU, ignores_merges=True),
    **_named("falcon", r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    **_named("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", r"\p{N}", _GPT2),
    **_named("gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling", _GPT2),
    **_named("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _QWEN2),
    **_named("laguna", r"[^\n]+|[\n]+", _QWEN2),
    **_named("ufakzeka", rf"{_WORD}|\p{{N}}|{_MARKS_AND_SPACES}"),
    **_named(
        "qwen35",
        rf"{_S}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    **_named("poro-chat bloom gpt3-finnish", _UP_TO_MARKS),
    **_named("viking", _UP_TO_MARKS, r"\p{N}"),
    **_named("tekken", _TEKKEN, ignores_merges=True, adds_bos=True),
    **_named("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    **_named("kimi-k2", rf"\p{{Han}}+|{_HAN_ASIDE}|\p{{N}}{{1,3}}|{_MARKS_AND_SPACES}"),
    **_named(
        "bailingmoe bailingmoe2 llada-moe",
        r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    **_named("seed-coder", rf"{_S}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"),
    **_named(
        "exaone-moe",
        rf"{_S}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
}
"""By the value of ``tokenizer.ggml.pre``. Not listed: ways of embedding models, and ways that
regular expressions cannot describe."""
