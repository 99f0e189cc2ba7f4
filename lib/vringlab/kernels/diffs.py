"""Unified diffs, file by file: what a patch changes, without applying it.

Written for what mails carry: prose around the diff, a signature after it, lines that a mail
program broke. Formats are those of `git diff` (git: Documentation/diff-generate-patch.txt).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from vringlab.errors import UserError

_START = re.compile(r"^diff --git |^--- \S", re.MULTILINE)
_GIT = re.compile(r"diff --git (\S+) (\S+)$")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@ ?(.*)")
_NOTHING = "/dev/null"
#: Folders at the kernel's top. A path that begins with one has no prefix (git's diff.noprefix);
#: of any other the first part is one: `a/`, `b/`, `w/`, `linux-6.12.orig/`.
_TOP = re.compile(
    "(?:arch|block|certs|crypto|Documentation|drivers|fs|include|init|io_uring|ipc|kernel|lib|"
    "LICENSES|mm|net|rust|samples|scripts|security|sound|tools|usr|virt)/"
)


@dataclass(frozen=True)
class HunkLines:
    """One hunk.

    Attributes:
        start: First line in the file as it was, from 1.
        new_start: First line in the file as it becomes, from 1.
        context: What git prints after the second `@@`: the function above the hunk, mostly.
        lines: Its lines with their leading blank, `-` or `+`.
    """

    start: int
    new_start: int
    context: str
    lines: tuple[str, ...]

    def changed(self) -> list[int]:
        """Lines of the new file that are added, or before which something was taken away."""
        found, number = [], self.new_start
        for line in self.lines:
            if line[:1] in "+-":
                found.append(number)
            number += line[:1] in "+ "
        return list(dict.fromkeys(found))


@dataclass(frozen=True)
class FileDiff:
    """What a diff does to one file.

    Attributes:
        old: Its path before, from the kernel's top folder; empty for a new file.
        new: Its path after; empty for a removed one.
        hunks: The hunks.
        text: The part of the diff, as `git apply` takes it.
        binary: Whether the change cannot be read as text.
    """

    old: str
    new: str
    hunks: tuple[HunkLines, ...] = field(repr=False)
    text: str = field(repr=False)
    binary: bool = False

    @property
    def path(self) -> str:
        """Its path, after the change where it has one."""
        return self.new or self.old


def body(text: str) -> str:
    """The diff in a mail's text, from its first line on; empty when there is none."""
    for match in _START.finditer(text):
        rest = text[match.start() :]
        # A `--- ` line alone may be a signature or a rule; a diff's is followed by `+++ `.
        if rest.startswith("diff --git ") or re.match(r"--- \S.*\n\+\+\+ \S", rest):
            return rest
    return ""


def _path(name: str) -> str:
    """A path as a diff has it, from the kernel's top folder; empty for no file."""
    if name == _NOTHING:
        return ""
    return name if _TOP.match(name) else name.partition("/")[2] or name


def _head(line: str, prefix: str) -> tuple[str, str]:
    """The path in a `--- ` or `+++ ` line, and the line with the prefix that git is used to."""
    name, tab, rest = line[4:].partition("\t")
    path = _path(name.strip())
    return path, f"{line[:4]}{prefix}{path}{tab}{rest}" if path else line


def split(diff: str, where: str = "the patch") -> tuple[FileDiff, ...]:
    """Take a diff apart.

    Args:
        diff: The diff; what stands around its parts (a signature) is left out.
        where: What to call it in an error.

    Raises:
        UserError: a hunk ends early, so the patch was damaged on its way.
    """
    return tuple(_split(diff.replace("\r\n", "\n").split("\n"), where))


def _split(lines: list[str], where: str) -> Iterator[FileDiff]:
    at = 0
    while at < len(lines):
        line = lines[at]
        plain = line.startswith("--- ") and lines[at + 1 : at + 2] and "+++ " in lines[at + 1][:4]
        if not line.startswith("diff --git ") and not plain:
            at += 1
            continue
        start = at
        match = _GIT.match(line)
        old, new = (_path(match.group(1)), _path(match.group(2))) if match else ("", "")
        binary = False
        hunks: list[HunkLines] = []
        kept = []
        at += 0 if plain else 1
        if not plain:
            kept.append(f"diff --git a/{old} b/{new}" if match else line)
        while at < len(lines):
            line = lines[at]
            if line.startswith("diff --git ") or (hunks and line.startswith("--- ") and at > start):
                break
            if line.startswith("--- "):
                old, line = _head(line, "a/")
            elif line.startswith("+++ "):
                new, line = _head(line, "b/")
            elif line.startswith("new file mode"):
                old = ""
            elif line.startswith("deleted file mode"):
                new = ""
            elif line.startswith(("GIT binary patch", "Binary files ")):
                binary = True
            elif hunk := _HUNK.match(line):
                found, end = _hunk(lines, at, hunk, new or old, where)
                hunks.append(found)
                kept += [line, *(text or " " for text in lines[at + 1 : end])]
                at = end
                continue
            elif hunks and not line.startswith("\\"):
                # Past the last hunk: a signature, or the next mail's prose.
                at += 1
                continue
            kept.append(line)
            at += 1
        yield FileDiff(old, new, tuple(hunks), "\n".join(kept) + "\n", binary)


def _hunk(
    lines: list[str], at: int, head: re.Match[str], file: str, where: str
) -> tuple[HunkLines, int]:
    old, new = (int(head.group(n)) if head.group(n) else 1 for n in (2, 4))
    taken: list[str] = []
    end = at + 1
    while old > 0 or new > 0:
        line = lines[end] if end < len(lines) else None
        # Mail programs take the blank off an empty line of context.
        kind = (line[:1] or " ") if line is not None else "?"
        if kind not in " +-\\" or line is None:
            raise UserError(
                f"{where} is damaged: the hunk {lines[at]!r} of {file} ends early"
                + (f", at {line!r}" if line else ""),
                remedy="a mail program may have broken its lines: take the raw mail "
                "(the archive's mbox), or make it anew with `git format-patch`",
            )
        old -= kind in " -"
        new -= kind in " +"
        taken.append(line or " ")
        end += 1
    if end < len(lines) and lines[end].startswith("\\ "):
        taken.append(lines[end])
        end += 1
    found = HunkLines(int(head.group(1)), int(head.group(3)), head.group(5).strip(), tuple(taken))
    return found, end


#: A line at the left edge that begins a function or names one, in the kernel's style.
_FUNCTION = re.compile(
    r"^(?!typedef\b|else\b|struct \w+ \w+ =)(?:[A-Za-z_][\w\s*,]*?[\s*])?([A-Za-z_]\w*)\s*\("
)
_NOT_FUNCTIONS = frozenset({"if", "for", "while", "switch", "return", "sizeof", "__attribute__"})


def _is_other(line: str) -> bool:
    """Whether a line after a function's head belongs to something else."""
    return bool(line.strip()) and line[0] not in " \t" and not line.startswith(("{", "/*", "__"))


def functions(source: str) -> list[tuple[str, int, int]]:
    """Functions that a C file of the kernel defines: (name, first line, last line), from 1.

    By the kernel's coding style, which puts a definition's head and its braces at the left edge;
    macros that define functions are not seen.
    """
    lines = source.splitlines()
    found: list[tuple[str, int, int]] = []
    name, first = "", 0
    for number, line in enumerate(lines, start=1):
        if line.startswith("{") and name:
            end = next(
                (n for n in range(number, len(lines)) if lines[n].startswith("}")), len(lines) - 1
            )
            found.append((name, first, end + 1))
            name = ""
        elif match := _FUNCTION.match(line):
            name = "" if match.group(1) in _NOT_FUNCTIONS else match.group(1)
            first = number
            # A declaration, or a macro that is called.
            if line.rstrip().endswith(";"):
                name = ""
        elif name and (line.rstrip().endswith(");") or _is_other(line)):
            name = ""
    return found


def changed_functions(source: str, hunks: tuple[HunkLines, ...]) -> list[str]:
    """Functions of a C file that hunks change, in the file's order.

    Args:
        source: The file with the change.
        hunks: Its hunks; the line numbers must be those of `source`.
    """
    spans = functions(source)
    found: dict[str, None] = {}
    for hunk in hunks:
        for number in hunk.changed():
            for name, first, last in spans:
                if first <= number <= last:
                    found[name] = None
    return list(found)


def callers(source: str, name: str) -> list[str]:
    """Functions of a C file that call `name` or take its address."""
    lines = source.splitlines()
    word = re.compile(rf"\b{re.escape(name)}\b")
    return [
        caller
        for caller, first, last in functions(source)
        if caller != name and any(word.search(line) for line in lines[first:last])
    ]
