"""Where in a TOML file a key stands, for messages about its value."""

import re


def line_of(text: str, section: str, key: str, index: int = 0) -> int:
    """The line of ``key`` or of the table of that name, else that of its section's header, else 1.

    Of an array of tables, ``index`` says which.
    """
    here, found = ("", 0), 1
    tables: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+\s*([^\]]*?)\s*\]", line):
            name = header[1].strip("\"'")
            here = (name, tables.get(name, 0))
            tables[name] = here[1] + 1
            if key and name == f"{section}.{key}".lstrip("."):
                return number
            if here == (section, index):
                found = number
        elif key and here == (section, index) and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line):
            return number
    return found
