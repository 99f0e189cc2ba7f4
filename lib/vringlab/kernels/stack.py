"""A series fitted to a base kernel: the modules it reaches, its diffs as they apply, its functions.

The base's own Makefiles and configuration say which modules a file belongs to. The patches are
applied one after another to those modules' sources, in a scratch repository; where a hunk fits
only with less context, what comes out is written as a new diff and said so.
"""

from __future__ import annotations

import posixpath
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vringlab.cachedir import OnStep
from vringlab.errors import UserError
from vringlab.kernels import diffs, makefiles
from vringlab.kernels.buildroot import BuildRoot
from vringlab.kernels.diffs import FileDiff, HunkLines
from vringlab.kernels.elf import ModuleFile
from vringlab.kernels.makefiles import Place, SourceIndex
from vringlab.kernels.patches import Hunk, Side, misfit_text
from vringlab.kernels.series import MailPatch, Series
from vringlab.kernels.source import ModuleSource, ensure_folders
from vringlab.transport import local

#: Where modules run, by the beginning of their names; the first that fits counts.
_SIDES: tuple[tuple[str, Side], ...] = (
    ("vhost", "host"),
    ("tun", "host"),
    ("tap", "host"),
    ("macvtap", "host"),
    ("kvm", "host"),
    ("virtio", "guest"),
    ("vmw_vsock_virtio", "guest"),
    ("vsock_loopback", "guest"),
)

#: Lines of context that must fit, in this order: git's own number, then less.
_CONTEXTS: tuple[str, ...] = ("", "-C2", "-C1")
_GIT_S = 60.0
_LEVELS = 3

_ISOLATED = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "LC_ALL": "C",
}


class NeedsKernel(UserError):  # noqa: N818 - the words that its reader sees
    """A patch that reaches beyond modules: it takes a build of the whole kernel."""


@dataclass(frozen=True)
class Watched:
    """A function whose calls show that the changed code runs.

    Attributes:
        function: The function.
        module: The module that holds it; empty for the kernel itself.
        changed: Functions that the series changes and that are in it: itself, or those that the
            compiler put inside it.
    """

    function: str
    module: str
    changed: tuple[str, ...]


@dataclass(frozen=True)
class FittedPatch:
    """One patch of a series as it applies to the base.

    Attributes:
        patch: The patch.
        diff: What applies, of the files that are built; empty when none of its files is.
        said: How it went in, in git's words where it was not exact.
        left_out: Files of it that are not built.
    """

    patch: MailPatch
    diff: str = field(repr=False)
    said: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Stack:
    """A series fitted to a base kernel.

    Attributes:
        series: The series.
        modules: The modules that it reaches, the one with most changed lines first.
        headers: Headers below `include/` that it changes.
        patches: Its patches as they apply.
        watched: Functions whose calls show that the changed code runs.
        unseen: Changed functions that cannot be counted, with the reason.
    """

    series: Series
    modules: tuple[ModuleSource, ...]
    headers: tuple[str, ...]
    patches: tuple[FittedPatch, ...]
    watched: tuple[Watched, ...]
    unseen: Mapping[str, str]

    @property
    def fuzz(self) -> tuple[str, ...]:
        """What a reader should know of how the patches went in, one sentence each."""
        return tuple(
            f"patch {item.patch.number}: {line}" for item in self.patches for line in item.said
        )


def side_of(module: str) -> Side | None:
    """Where a module runs; None when its name does not say."""
    return next((side for begin, side in _SIDES if module.startswith(begin)), None)


def choose_side(modules: Iterable[str], asked: Side | None) -> Side:
    """The side on which modules are replaced.

    Args:
        modules: Their names.
        asked: What the user said.

    Raises:
        UserError: it is not known, or the modules run on both.
    """
    if asked is not None:
        return asked
    known = {name: side_of(name) for name in modules}
    sides = {side for side in known.values() if side is not None}
    if len(sides) == 1:
        return sides.pop()
    shown = ", ".join(f"{name} ({side or 'unknown'})" for name, side in known.items())
    raise UserError(
        f"the patch reaches modules of both sides: {shown}"
        if sides
        else f"whether {shown} runs in the guest or on the KVM host is not known",
        remedy="say which is measured: --side guest, or --side host",
    )


def fit(
    series: Series,
    root: BuildRoot,
    *,
    side: Side | None = None,
    on_step: OnStep = lambda _: None,
    cache: Path | None = None,
) -> Stack:
    """Fit a series to a base kernel.

    Args:
        series: The series.
        root: Build root of the base.
        side: Only modules of that side; of all that are known when None.
        on_step: Told what takes time.
        cache: Cache folder; the settings' when None.

    Raises:
        NeedsKernel: it reaches beyond modules.
        UserError: it touches no file that is built, or it does not apply (names the hunk and
            shows the lines that it met).
    """
    version = root.kernel.version
    found = makefiles.ensure_index(root.archive, version, on_step=on_step, cache=cache)
    config = makefiles.read_config(root.config)
    sorted_ = _classify(series, found, config)
    places = _of_side(sorted_.places, frozenset(series.files), side)
    folders = sorted(
        {posixpath.dirname(path) for path in sorted_.headers}
        | {name for place in places for name in makefiles.folders_of(place, found, config)}
    )
    source = ensure_folders(root.archive, version, folders, on_step=on_step, cache=cache)
    before = makefiles.texts(source.folder, folders)
    after, patches, changes = _apply(series, before, sorted_.built, f"linux {version}")
    modules = _modules(places, series, found, config, {**before, **after})
    watched, unseen = _watch(modules, before, after, changes, root.shipped)
    return Stack(series, modules, sorted_.headers, patches, watched, unseen)


@dataclass(frozen=True)
class _Sorted:
    """Files of a series by what they mean for the build."""

    places: tuple[Place, ...]
    headers: tuple[str, ...]
    built: frozenset[str]


def _classify(series: Series, found: SourceIndex, config: Mapping[str, str]) -> _Sorted:
    places: dict[str, Place] = {}
    headers: list[str] = []
    built: set[str] = set()
    beyond: dict[str, str] = {}
    off: dict[str, str] = {}
    strange: list[str] = []
    created = {item.new for p in series.patches for item in p.files if not item.old}
    for path in series.files:
        base = posixpath.basename(path)
        if base in ("Makefile", "Kbuild") or base.startswith("Kconfig"):
            beyond[path] = "it changes how the kernel is built"
        elif path.startswith(("Documentation/", "tools/", "samples/")):
            continue
        elif path.endswith((".c", ".S")):
            place = makefiles.place_of(path, found, config)
            _sort(place, places, beyond, off, built)
            if not place.name and path not in created:
                strange.append(path)
        elif path.endswith(".h"):
            public = path.startswith(("include/", "arch/"))
            users = makefiles.users_of(path, found)
            if users is None:
                beyond[path] = "most of the kernel includes it"
                continue
            if not users and path in created and not public:
                built.add(path)
                continue
            for user in users:
                if user.startswith(("tools/", "samples/")):
                    continue
                place = makefiles.place_of(user, found, config)
                if place.state == "m":
                    places[user] = place
                    built.add(path)
                elif place.state == "y":
                    beyond[path] = f"{user}, which is built into the kernel, includes it"
            if public and path in built:
                headers.append(path)
    if beyond:
        listed = "; ".join(f"{path}: {why}" for path, why in beyond.items())
        raise NeedsKernel(
            f"the patch reaches beyond modules: {listed}",
            remedy="this takes builds of the whole kernel, stock and patched: --build full",
        )
    if not built and strange:
        raise UserError(
            f"no Makefile of this base names {', '.join(strange)}",
            remedy="the patch is for another tree, or another version of this one; port it, or use "
            "a base that takes it (--base)",
        )
    if not built:
        why = "; ".join(off.values())
        raise UserError(
            "the patch touches no file that this base builds: " + ", ".join(series.files),
            remedy=why or "name a patch that changes code of a module",
        )
    return _Sorted(tuple(places.values()), tuple(headers), frozenset(built))


def _sort(
    place: Place,
    places: dict[str, Place],
    beyond: dict[str, str],
    off: dict[str, str],
    built: set[str],
) -> None:
    if place.state == "m":
        places[place.file] = place
        built.add(place.file)
    elif place.state == "y":
        beyond[place.file] = f"{place.name} is built into the kernel"
    else:
        option = f" ({place.option})" if place.option else ""
        off[place.file] = f"this base's configuration does not build {place.file}{option}"


def _of_side(
    places: Sequence[Place], touched: frozenset[str], side: Side | None
) -> tuple[Place, ...]:
    """Places of modules that the arms replace.

    A module that only includes a changed header, and of which nobody knows what it is for, is
    none of them: it is not loaded in a guest of ours.
    """

    def module(place: Place) -> str:
        return place.name.replace("-", "_")

    direct = {module(place) for place in places if place.file in touched}
    near = [p for p in places if module(p) in direct or side_of(module(p)) is not None]
    places = near or places
    if side is None:
        return tuple(places)
    other = {"guest": "host", "host": "guest"}[side]
    kept = tuple(place for place in places if side_of(module(place)) != other)
    # What somebody asks for by name is taken, whatever its name suggests.
    return kept or tuple(places)


def _modules(
    places: Sequence[Place],
    series: Series,
    found: SourceIndex,
    config: Mapping[str, str],
    read: Mapping[str, str],
) -> tuple[ModuleSource, ...]:
    """The modules, the one with most changed lines first."""
    changes = Counter(
        {
            item.path: sum(len(hunk.changed()) for hunk in item.hunks)
            for patch in series.patches
            for item in patch.files
        }
    )
    weights: dict[tuple[str, str], int] = {}
    chosen: dict[tuple[str, str], Place] = {}
    for place in places:
        key = (place.folder, place.name)
        chosen.setdefault(key, place)
        weights[key] = weights.get(key, 0) + changes[place.file]
    ordered = sorted(chosen, key=lambda key: (-weights[key], key))
    return tuple(makefiles.module_at(chosen[key], found, config, read) for key in ordered)


def _git(folder: Path, *arguments: str, input: str = "") -> local.Completed:
    return local.run(
        ["git", "-C", str(folder), *arguments],
        timeout=_GIT_S,
        input=input,
        check=False,
        env={**_ISOLATED, "GIT_DIR": str(folder / ".git"), "GIT_WORK_TREE": str(folder)},
        remedy_missing="run `make setup`, or install it: apt install git",
    )


def _apply(
    series: Series, before: Mapping[str, str], built: frozenset[str], version: str
) -> tuple[dict[str, str], tuple[FittedPatch, ...], dict[str, tuple[HunkLines, ...]]]:
    """Apply the patches one after another.

    Returns:
        Text of each file that is changed, how each patch went in, and the hunks, without
        context, that all patches together come to.
    """
    fitted = []
    with tempfile.TemporaryDirectory(prefix="vringlab-stack-") as name:
        folder = Path(name)
        touched = [path for path in series.files if path in before]
        for path in touched:
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(before[path], encoding="utf-8", errors="surrogateescape")
        _git(folder, "init", "-q")
        begin = tree = _snapshot(folder)
        for patch in series.patches:
            kept = [item for item in patch.files if item.path in built]
            left_out = tuple(item.path for item in patch.files if item.path not in built)
            if not kept:
                fitted.append(FittedPatch(patch, "", (), left_out))
                continue
            diff, said = _apply_one(folder, patch, kept, version)
            after = _snapshot(folder)
            if any("context" in line for line in said):
                diff = _git(folder, "diff-tree", "-p", "--no-color", tree, after).stdout
            tree = after
            fitted.append(FittedPatch(patch, diff, said, left_out))
        texts = {
            path.relative_to(folder).as_posix(): path.read_text(
                encoding="utf-8", errors="surrogateescape"
            )
            for path in folder.rglob("*.[chS]")
        }
        whole = _git(folder, "diff-tree", "-p", "-U0", "--no-color", begin, tree).stdout
    return texts, tuple(fitted), {item.path: item.hunks for item in diffs.split(whole)}


def _snapshot(folder: Path) -> str:
    _git(folder, "add", "-A")
    return _git(folder, "write-tree").stdout.strip()


def _apply_one(
    folder: Path, patch: MailPatch, kept: Sequence[FileDiff], version: str
) -> tuple[str, tuple[str, ...]]:
    diff = "".join(item.text for item in kept)
    first: local.Completed | None = None
    for context in _CONTEXTS:
        flags = [context] if context else []
        done = _git(folder, "apply", "--verbose", "--whitespace=nowarn", *flags, "-", input=diff)
        if done.returncode == 0:
            lines = [
                line.strip()
                for line in done.stderr.splitlines()
                if re.search(r"offset|[Cc]ontext reduced|fuzz", line)
            ]
            if context:
                count = "one line" if context == "-C1" else f"{context[2:]} lines"
                lines.insert(0, f"it fits only with {count} of context, where three are usual")
            return diff, tuple(lines)
        first = first or done
    assert first is not None
    raise _misfit(folder, patch, kept, version, first.stderr)


def _misfit(
    folder: Path, patch: MailPatch, kept: Sequence[FileDiff], version: str, said: str
) -> UserError:
    remedy = "port the patch to this base, or use one that takes it (--base)"
    diff = "".join(item.text for item in kept)
    back = _git(folder, "apply", "--check", "--reverse", "--whitespace=nowarn", "-", input=diff)
    if back.returncode == 0:
        return UserError(
            f"{version} has patch {patch.number} ({patch.subject}) already",
            remedy="nothing is left to try on this base: name an older one (--base)",
        )
    place = re.search(r"^error: patch failed: (.+):(\d+)$", said, re.MULTILINE)
    absent = re.search(r"^error: (.+): No such file or directory$", said, re.MULTILINE)
    name = f"patch {patch.number} ({patch.subject})"
    if absent is not None:
        return UserError(
            f"{name} changes {absent.group(1)}, which {version} does not have",
            remedy=f"it is for another tree; {remedy}",
        )
    for item in kept if place is not None else ():
        assert place is not None
        for hunk in item.hunks:
            if (item.path, hunk.start) == (place.group(1), int(place.group(2))):
                content = (folder / item.path).read_text(errors="replace")
                shown = Hunk(item.path, hunk.start, hunk.lines)
                return UserError(misfit_text(shown, content, name, version), remedy=remedy)
    return UserError(
        f"{name} cannot be applied to {version}",
        remedy=f"{remedy}; if it is damaged, take the raw mail",
        host="local",
        stderr=said,
    )


def watch_tree(series: Series, tree: Path) -> tuple[Watched, ...]:
    """Functions of a patched tree that a series changed, to be counted in a whole kernel of it.

    They are taken for the kernel's own, not a module's; nothing is known of what the compiler does
    with them. What cannot be found in the running kernel is said to be not counted.

    Args:
        series: The series.
        tree: The tree, with the series applied.
    """
    found: dict[str, None] = {}
    for patch in series.patches:
        for item in patch.files:
            file = tree / item.path
            if item.path.endswith(".c") and file.is_file():
                text = file.read_text(encoding="utf-8", errors="surrogateescape")
                found.update(dict.fromkeys(diffs.changed_functions(text, item.hunks)))
    return tuple(Watched(name, "", (name,)) for name in found)


def takes(series: Series, root: BuildRoot, cache: Path | None = None) -> bool:
    """Whether a base takes a series; nothing is fetched that is not there.

    Args:
        series: The series.
        root: Build root of the base, with its source.
        cache: Cache folder; the settings' when None.
    """
    try:
        fit(series, root, cache=cache)
    except NeedsKernel:
        return True
    except UserError:
        return False
    return True


def _watch(
    modules: Sequence[ModuleSource],
    before: Mapping[str, str],
    after: Mapping[str, str],
    changes: Mapping[str, tuple[HunkLines, ...]],
    shipped: Callable[[ModuleSource], bytes | None],
) -> tuple[tuple[Watched, ...], dict[str, str]]:
    """Functions to count: those changed, or the nearest callers that the compiler left whole."""
    watched: dict[tuple[str, str], list[str]] = {}
    unseen: dict[str, str] = {}
    for module in modules:
        data = shipped(module)
        symbols = ModuleFile.parse(data, module.name).functions if data else None
        for path in module.files:
            text = after.get(path, "")
            if not path.endswith(".c"):
                continue
            for name in diffs.changed_functions(text, changes.get(path, ())):
                held = _held_by(name, text, before.get(path, ""), symbols)
                for function in held:
                    watched.setdefault((function, module.name), []).append(name)
                if not held:
                    unseen[name] = (
                        f"the compiler puts {name} inside its callers, of which none is left whole"
                    )
    return (
        tuple(
            Watched(function, module, tuple(dict.fromkeys(names)))
            for (function, module), names in watched.items()
        ),
        unseen,
    )


def _held_by(name: str, after: str, before: str, symbols: frozenset[str] | None) -> tuple[str, ...]:
    """The function itself if it is one of its own, else what it is put inside of."""
    level: tuple[str, ...] = (name,)
    known = {function for function, _, _ in diffs.functions(before)}
    for _ in range(_LEVELS):
        # A new function may be put anywhere; what calls it runs whenever it does.
        found = tuple(
            item for item in level if symbols is None or item in symbols or item not in known
        )
        sure = tuple(item for item in found if item in known)
        if sure:
            return sure
        level = tuple(dict.fromkeys(c for item in level for c in diffs.callers(after, item)))
    return ()
