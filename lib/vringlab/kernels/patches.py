"""Arms as files: patches with a header that says what they are and what they serve.

An arm is one file, `data/patches/EXPERIMENT/BASE/ARM.patch`, or a folder `ARM/` of several,
applied in the order of their names. Each file begins with a header of `Name: value` lines
(continued by indented ones), ended by a blank line; then text for the reader; then a unified
diff from the kernel's top folder. An arm that is the driver as shipped has `Diff: none`.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from vringlab.errors import UserError
from vringlab.kernels.base import BaseKernel, folder_name, version_number
from vringlab.kernels.source import ModuleSource
from vringlab.settings import settings
from vringlab.transport import local

Side = Literal["guest", "host"]

#: Suffix of the name under which an experiment runs its reference arm a second time.
TWIN_SUFFIX = ".aa"

_REQUIRED = ("Title", "Module", "Side", "Serves")
_OPTIONAL = ("From-Message-Id", "Upstream", "Note", "Diff")
_RANGE = re.compile(r"(\d+(?:\.\d+)*) <= version < (\d+(?:\.\d+)*)")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_SHOWN_LINES = 40


@dataclass(frozen=True)
class VersionRange:
    """Kernel versions from `low` to, not including, `high`; each as numbers."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    @classmethod
    def parse(cls, text: str, where: object) -> VersionRange:
        """Read what a `Serves:` line says.

        Args:
            text: Its value.
            where: Where it stands, for messages.

        Raises:
            UserError: it is no range.
        """
        limits = _RANGE.fullmatch(text)
        if limits is None:
            raise UserError(
                f"{where}: Serves is {text!r}",
                remedy="write the versions as `Serves: 6.12.100 <= version < 6.13`",
            )
        return cls(version_number(limits.group(1)), version_number(limits.group(2)))

    def __contains__(self, number: tuple[int, ...]) -> bool:
        return self.low <= number < self.high

    def __str__(self) -> str:
        low, high = (".".join(map(str, number)) for number in (self.low, self.high))
        return f"{low} <= version < {high}"


@dataclass(frozen=True)
class Hunk:
    """One hunk of a diff.

    Attributes:
        file: The file it changes, from the kernel's top folder.
        start: Line where it begins in the file before the change, from 1.
        lines: Its lines with their leading blank, `-` or `+`; the `@@` line is not among them.
    """

    file: str
    start: int
    lines: tuple[str, ...]

    @property
    def before(self) -> list[str]:
        """The lines that it expects to find."""
        return [line[1:] for line in self.lines if line[:1] in (" ", "-")]


@dataclass(frozen=True)
class Patch:
    """One patch file.

    Attributes:
        path: The file.
        title: What it does, one line.
        module: The module it changes; several with commas, the one that matters most first.
        side: Whose module: the guest's or the host's.
        serves: Base kernel versions that it was written for.
        message_id: Message-id of the mail that it follows; empty when there is none.
        upstream: Commits that it stands for; empty when there is none.
        note: What a reader of its results has to know.
        diff: The unified diff; empty for the driver as shipped.
    """

    path: Path
    title: str
    module: str
    side: Side
    serves: VersionRange
    message_id: str
    upstream: str
    note: str
    diff: str

    @property
    def hunks(self) -> tuple[Hunk, ...]:
        """The hunks of the diff in order."""
        return tuple(_hunks(self.diff))

    @property
    def files(self) -> tuple[str, ...]:
        """The files it changes, in order, each once."""
        return tuple(dict.fromkeys(_changed_files(self.diff)))


@dataclass(frozen=True)
class Arm:
    """One state of a driver that an experiment compares with others.

    Attributes:
        experiment: Name of the experiment.
        base: Base kernel as a folder name, e.g. `debian-6.12`.
        name: Name of the arm.
        module: The module it changes; the first where there are several.
        side: Whose module: the guest's or the host's.
        patches: Its patch files in order; those without a diff only describe.
        others: Further modules that it changes.
    """

    experiment: str
    base: str
    name: str
    module: str
    side: Side
    patches: tuple[Patch, ...]
    others: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules that it changes."""
        return (self.module, *self.others)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that its patches change, each once."""
        return tuple(dict.fromkeys(name for patch in self.patches for name in patch.files))

    @property
    def shipped(self) -> bool:
        """Whether it is the driver as the base kernel has it."""
        return not any(patch.diff for patch in self.patches)

    @property
    def title(self) -> str:
        """What it is, one line."""
        return "; ".join(patch.title for patch in self.patches)

    @property
    def digest(self) -> str:
        """Digest of all its diffs in hex; headers and prose do not count."""
        state = hashlib.sha256()
        for patch in self.patches:
            state.update(hashlib.sha256(patch.diff.encode()).digest())
        return state.hexdigest()

    def check_serves(self, kernel: BaseKernel) -> None:
        """Check that the arm was written for that kernel.

        Raises:
            UserError: for another series, or another version of it.
        """
        if kernel.name != self.base:
            raise UserError(
                f"arm {self.name} of {self.experiment} is a port to {self.base}, not to "
                f"{kernel.name}",
                remedy=f"port it: data/patches/{self.experiment}/{kernel.name}/{self.name}.patch",
            )
        for patch in self.patches:
            if kernel.number not in patch.serves:
                raise UserError(
                    f"{patch.path.name} serves {patch.serves}, but the base kernel is "
                    f"{kernel.version}",
                    remedy="check the patch against that version's source and widen `Serves:` "
                    f"in {patch.path}, or use an image with a kernel in that range",
                )


def parse_patch(text: str, path: Path) -> Patch:
    """Read a patch file.

    Args:
        text: Its content.
        path: Where it is, for messages.

    Raises:
        UserError: a header line is missing, unknown or malformed, or the diff is missing.
    """
    fields, rest = _split_header(text, path)
    if missing := [name for name in _REQUIRED if not fields.get(name)]:
        raise UserError(
            f"{path}: the header lacks {', '.join(missing)}",
            remedy=f"each patch file begins with {', '.join(_REQUIRED)} lines; optional are "
            f"{', '.join(_OPTIONAL)}",
        )
    if fields["Side"] not in ("guest", "host"):
        raise UserError(
            f"{path}: Side is {fields['Side']!r}", remedy="write `Side: guest` or `Side: host`"
        )
    start = re.search(r"^(?:diff --git |--- )", rest, re.MULTILINE)
    diff = rest[start.start() :] if start else ""
    declared_none = fields.get("Diff") == "none"
    if declared_none == bool(diff):
        raise UserError(
            f"{path} " + ("says `Diff: none` but has one" if diff else "has no diff"),
            remedy="only an arm that is the driver as shipped has `Diff: none`, and no diff",
        )
    if diff and not any(_HUNK.match(line) for line in diff.splitlines()):
        raise UserError(f"{path}: the diff has no hunk", remedy="make it anew with `git diff`")
    return Patch(
        path=path,
        title=fields["Title"],
        module=fields["Module"],
        side=cast(Side, fields["Side"]),
        serves=VersionRange.parse(fields["Serves"], path),
        message_id=fields.get("From-Message-Id", "").strip("<>"),
        upstream=fields.get("Upstream", ""),
        note=fields.get("Note", ""),
        diff=diff,
    )


def _split_header(text: str, path: Path) -> tuple[dict[str, str], str]:
    header, _, rest = text.partition("\n\n")
    fields: dict[str, str] = {}
    name = ""
    for line in header.splitlines():
        if line[:1] in (" ", "\t") and name:
            fields[name] = f"{fields[name]} {line.strip()}".strip()
            continue
        name, colon, value = line.partition(":")
        if not colon or name not in (*_REQUIRED, *_OPTIONAL) or name in fields:
            raise UserError(
                f"{path}: header line not understood: {line!r}",
                remedy=f"known are {', '.join((*_REQUIRED, *_OPTIONAL))}, each once; a blank "
                "line ends the header",
            )
        fields[name] = value.strip()
    return fields, rest


def _changed_files(diff: str) -> Iterator[str]:
    for line in diff.splitlines():
        if line.startswith(("--- a/", "+++ b/")):
            yield line[6:].split("\t")[0]


def _created(diff: str) -> Iterator[str]:
    """Files that the diff makes."""
    before = ""
    for line in diff.splitlines():
        if before.startswith("--- /dev/null") and line.startswith("+++ b/"):
            yield line[6:].split("\t")[0]
        before = line


def _hunks(diff: str) -> Iterator[Hunk]:
    file, start = "", 0
    old = new = 0
    lines: list[str] = []
    for line in diff.splitlines():
        if old > 0 or new > 0:
            lines.append(line or " ")
            old -= line[:1] in (" ", "-", "")
            new -= line[:1] in (" ", "+", "")
            if old <= 0 and new <= 0:
                yield Hunk(file, start, tuple(lines))
        elif line.startswith("--- a/"):
            file = line[6:].split("\t")[0]
        elif match := _HUNK.match(line):
            start, lines = int(match.group(1)), []
            old, new = (int(match.group(n)) if match.group(n) else 1 for n in (2, 4))


def _names(folder: Path) -> list[str]:
    """Names of the folders and patch files in a folder, sorted; of anything else, nothing."""
    if not folder.is_dir():
        return []
    items = list(folder.iterdir())
    patches = [item.stem for item in items if item.suffix == ".patch" and item.is_file()]
    return sorted(patches + [item.name for item in items if item.is_dir()])


def arm_names(experiment: str, base: str, *, data: Path | None = None) -> tuple[str, ...]:
    """Names of an experiment's arms for a base kernel, sorted.

    Args:
        experiment: Name of the experiment.
        base: Base kernel, e.g. `debian:6.12`.
        data: Folder `data`; the settings' when None.

    Raises:
        UserError: no such experiment, or no port of it to that base kernel; lists what there is.
    """
    patches = (data or settings().data) / "patches"
    if experiment not in _names(patches):
        raise UserError(
            f"no patches for an experiment {experiment!r}",
            remedy=f"there are patches for: {', '.join(_names(patches))}",
        )
    folder = patches / experiment / folder_name(base)
    if not folder.is_dir():
        raise UserError(
            f"{experiment} has no port to {base}",
            remedy=f"it is ported to: {', '.join(_names(patches / experiment))}",
        )
    return tuple(_names(folder))


def load_arm(experiment: str, base: str, arm: str, *, data: Path | None = None) -> Arm:
    """Read an arm.

    Args:
        experiment: Name of the experiment.
        base: Base kernel, e.g. `debian:6.12`.
        arm: Name of the arm; an A/A twin (`NAME.aa`) is the arm itself.
        data: Folder `data`; the settings' when None.

    Raises:
        UserError: it does not exist (lists those that do) or one of its files is malformed.
    """
    name = arm.removesuffix(TWIN_SUFFIX)
    known = arm_names(experiment, base, data=data)
    if name not in known:
        raise UserError(
            f"{experiment} has no arm {name!r} for {base}", remedy=f"arms: {', '.join(known)}"
        )
    folder = (data or settings().data) / "patches" / experiment / folder_name(base)
    single = folder / f"{name}.patch"
    files = [single] if single.is_file() else sorted((folder / name).glob("*.patch"))
    if not files:
        raise UserError(
            f"arm {name} of {experiment} has no patch files",
            remedy=f"put them into {folder / name}, or write {single}",
        )
    patches = tuple(parse_patch(file.read_text(), file) for file in files)
    if len({(patch.module, patch.side) for patch in patches}) > 1:
        raise UserError(
            f"the patches of arm {name} of {experiment} do not agree on Module and Side",
            remedy="an arm's patches are built into the same modules, on one side",
        )
    first = patches[0]
    module, *others = (item.strip() for item in first.module.split(","))
    base_name = folder_name(base)
    return Arm(experiment, base_name, name, module, first.side, patches, tuple(others))


def apply_patch(
    patch: Patch, tree: Path, module: ModuleSource, version: str, *others: ModuleSource
) -> str:
    """Apply a patch to a module's files.

    Args:
        patch: The patch; one without a diff changes nothing.
        tree: Folder with the kernel's layout that has the module's files.
        module: The module.
        others: Further modules that are built with it, and the headers that they share.
        version: Version of the source, for messages.

    Returns:
        What git said, e.g. that a hunk went in some lines further down.

    Raises:
        UserError: it does not apply (shows the hunk and the file's lines), or it changes files
            that are not the module's.
        InfrastructureError: git is not installed.
    """
    if not patch.diff:
        return f"{patch.path.name}: as shipped\n"
    known = {file for item in (module, *others) for file in item.files}
    # A file that the patch itself makes is nobody's yet.
    if foreign := sorted(set(patch.files) - known - set(_created(patch.diff))):
        raise UserError(
            f"{patch.path.name} changes {', '.join(foreign)}, which is not built into "
            f"{module.name}",
            remedy="name the other modules too (`Module: A, B`); a patch that reaches beyond "
            "modules takes a build of the whole kernel",
        )
    done = local.run(
        ["git", "apply", "--verbose", "--whitespace=nowarn", "-"],
        timeout=60,
        input=patch.diff,
        cwd=tree,
        check=False,
        # Inside a repository git would skip, silently, what it takes to be outside of it.
        env={
            "GIT_DIR": str(tree / ".no-repository"),
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_NOSYSTEM": "1",
            "LC_ALL": "C",
        },
        remedy_missing="run `make setup`, or install it: apt install git",
    )
    if done.returncode != 0:
        raise _failure(patch, tree, version, done.stderr)
    return f"{patch.path.name}:\n{done.stderr}"


def _failure(patch: Patch, tree: Path, version: str, said: str) -> UserError:
    remedy = "port the patch to this version, or use a base kernel that it serves"
    place = re.search(r"^error: patch failed: (.+):(\d+)$", said, re.MULTILINE)
    hunk = None
    if place is not None:
        where = (place.group(1), int(place.group(2)))
        hunk = next((item for item in patch.hunks if (item.file, item.start) == where), None)
    if hunk is None:
        return UserError(
            f"{patch.path.name} cannot be applied to {version}",
            remedy=f"{remedy}; if it is damaged, make it anew with `git diff`",
            host="local",
            stderr=said,
        )
    return UserError(describe_misfit(hunk, (tree / hunk.file).read_text(), patch, version), remedy)


def describe_misfit(hunk: Hunk, content: str, patch: Patch, version: str) -> str:
    """A message that shows a hunk that does not fit and the lines of the file nearest to it.

    Args:
        hunk: The hunk.
        content: Content of the file it is for.
        patch: The patch it is from.
        version: Version of the source.
    """
    return misfit_text(hunk, content, patch.path.name, version)


def misfit_text(hunk: Hunk, content: str, name: str, version: str) -> str:
    """As `describe_misfit`, of a patch called `name`."""
    lines = content.splitlines()
    expected = hunk.before
    position = _nearest(expected, lines, hunk.start - 1)
    window = lines[position : position + len(expected)]
    matcher = difflib.SequenceMatcher(None, expected, window, autojunk=False)
    same = {b + i for _, b, size in matcher.get_matching_blocks() for i in range(size)}
    shown = [
        f"    {'  ' if number in same else '! '}{position + number + 1:5d} {line}".rstrip()
        for number, line in enumerate(window)
    ]
    return "\n".join(
        [
            f"{name} does not apply to {hunk.file} of {version}",
            f"  the hunk, written for line {hunk.start}:",
            *(f"    {line}".rstrip() for line in hunk.lines[:_SHOWN_LINES]),
            *(["    ..."] if len(hunk.lines) > _SHOWN_LINES else []),
            "  the file's lines nearest to it (`!` marks what the hunk does not expect):",
            *shown[:_SHOWN_LINES],
        ]
    )


def _nearest(expected: list[str], lines: list[str], stated: int) -> int:
    """Index in `lines` where most of `expected` is found in place; the stated one at a draw.

    A hunk that misfits by one changed line still has the rest of its context in the right
    place; one whose surroundings are gone is best shown where it says it belongs.
    """
    last = max(len(lines) - len(expected), 0)
    stated = min(stated, last)

    def score(position: int) -> tuple[int, int]:
        hits = sum(a == b for a, b in zip(expected, lines[position:], strict=False) if a.strip())
        return hits, -abs(position - stated)

    best = max(range(last + 1), key=score)
    return best if score(best)[0] * 4 >= len(expected) else stated
