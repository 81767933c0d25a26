"""Finds the line of a key in a TOML file, for error messages."""

import re


def line_of(text: str, section: str, key: str, index: int = 0) -> int:
    """Return the line of ``key`` in ``section``, or of the table with that name.

    Without such a key, returns the line of the section's header. Without a section, returns 1.
    ``index`` selects one table of an array of tables.
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
