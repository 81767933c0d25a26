"""Where in a TOML file a key stands, for messages about its value."""

import re


def line_of(text: str, section: str, key: str) -> int:
    """The line of ``key`` or of the table of that name, else that of its section's header, else 1."""
    current, found = "", 1
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+\s*([^\]]*?)\s*\]", line):
            current = header[1].strip("\"'")
            if key and current == f"{section}.{key}".lstrip("."):
                return number
            if current == section:
                found = number
        elif key and current == section and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line):
            return number
    return found
