"""Makes text of other peers safe to print: control characters could steer the terminal."""

_PICTURES = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}
_SHOWN = (
    _PICTURES
    | dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)
    | {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}
)
"""The control characters of C0 and C1, DEL, and the characters that change the direction of
text."""


def shown(text: str) -> str:
    """Return ``text`` without sequences that move the cursor, set the title or fill the clipboard
    of a terminal.

    Line feeds and tabs stay, carriage returns go, and every other control character becomes a
    visible symbol.
    """
    return text.translate(_SHOWN)
