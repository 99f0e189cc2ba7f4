"""Shell scripts that do several steps in one exchange, and their output taken apart.

Each SSH command costs a tenth of a second in a nested guest, and so does each program that is
started there.
"""

from __future__ import annotations

import re

#: Defines `show FILE`, which prints a file without starting a program.
SHOW = """show() { while IFS= read -r line; do printf '%s\\n' "$line"; done < "$1"; }"""


_HEADING = re.compile(r"^@@ ", re.MULTILINE)


def sections(text: str) -> dict[str, str]:
    """The parts of a script's output by name; each begins with a line `@@ NAME`."""
    found: dict[str, str] = {}
    for part in _HEADING.split(text)[1:]:
        name, _, body = part.partition("\n")
        found[name] = body
    return found
