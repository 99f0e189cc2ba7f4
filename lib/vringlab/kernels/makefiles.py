"""Which module a source file is built into, by the kernel's own Makefiles and configuration.

Only what Kbuild files of drivers use is understood: assignments to `obj-`, `X-y` and `X-objs`
lists, conditions on the configuration, and compiler flags (kernel:
Documentation/kbuild/makefiles.rst).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import posixpath
import re
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from vringlab.cachedir import OnStep, Store
from vringlab.errors import InfrastructureError
from vringlab.kernels.source import MODULES, ModuleSource
from vringlab.settings import settings

State = Literal["y", "m", ""]

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]+[<"]([^>"\n]+)[>"]', re.MULTILINE)
_CONFIG = re.compile(r"^CONFIG_(\w+)=(.*)$", re.MULTILINE)
_ASSIGNMENT = re.compile(r"^([\w$(){}./,+ -]+?)\s*(\+=|:=|\?=|=)\s*(.*)$")
_VARIABLE = re.compile(r"\$[({]([\w.-]+)[)}]")
_SUBST = re.compile(r"\$\(subst ([^,()]*),([^,()]*),([^()]*)\)")
_TEST = re.compile(r"^(ifn?eq)\s*\((.*),(.*)\)$")
_FLAGS = re.compile(
    r"^(?:(?:subdir-)?(?:cc|asflags|cpp)flags-y|C?FLAGS_(?:REMOVE_)?[\w./-]+\.o)$", re.I
)

#: A header that more files include than these is everybody's: changing it changes the kernel.
_CROWD = 200
#: Raise it when the content of an index changes.
_FORMAT = 1
_INDEX = "index.json.gz"


@dataclass(frozen=True)
class SourceIndex:
    """What a kernel's tree says of its own build.

    Attributes:
        makefiles: Text of the Makefile (or Kbuild) by folder.
        includers: Files by what they include, as written (`linux/virtio_net.h`); of a header
            that more than some hundred include, nothing is kept but an empty tuple.
    """

    makefiles: Mapping[str, str]
    includers: Mapping[str, tuple[str, ...]] = field(repr=False)


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Files of a source archive that an index needs, without the folder at the top."""
    with tarfile.open(archive, "r|*") as tar:
        for member in tar:
            name = PurePosixPath(*PurePosixPath(member.name).parts[1:]).as_posix()
            if member.isfile() and _indexed(name):
                stream = tar.extractfile(member)
                yield name, b"" if stream is None else stream.read()


def _files(tree: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(tree.rglob("*")):
        name = path.relative_to(tree).as_posix()
        if _indexed(name) and path.is_file() and not name.startswith(("tools/", "samples/")):
            yield name, path.read_bytes()


def _indexed(name: str) -> bool:
    return posixpath.basename(name) in ("Makefile", "Kbuild") or name.endswith((".c", ".h"))


def index(files: Iterator[tuple[str, bytes]]) -> SourceIndex:
    """Index the files of a kernel's tree, given as (path, content)."""
    makefiles: dict[str, str] = {}
    includers: dict[str, list[str]] = defaultdict(list)
    for name, content in files:
        folder, base = posixpath.split(name)
        if base in ("Makefile", "Kbuild"):
            # Where both are there, kbuild takes the Kbuild file.
            if base == "Kbuild" or folder not in makefiles:
                makefiles[folder] = content.decode("utf-8", "replace")
            continue
        for included in dict.fromkeys(_INCLUDE.findall(content)):
            includers[included.decode("utf-8", "replace")].append(name)
    return SourceIndex(
        makefiles,
        {name: tuple(found) if len(found) <= _CROWD else () for name, found in includers.items()},
    )


def ensure_index(
    source: Path, version: str, *, on_step: OnStep, cache: Path | None = None
) -> SourceIndex:
    """The index of a source archive or tree; read once per archive, a tree each time.

    Args:
        source: Archive of the source package, or the folder of a tree.
        version: Version of the source package.
        on_step: Receives a line before an archive is read (about a minute).
        cache: Cache folder; the settings' when None.

    Raises:
        InfrastructureError: the archive is damaged.
    """
    if source.is_dir():
        return index(_files(source))
    stat = source.stat()
    state = repr((_FORMAT, version, source.name, stat.st_size)).encode()
    key = f"{version}-{hashlib.sha256(state).hexdigest()[:12]}"
    store = Store((cache or settings().cache) / "indexes")

    def build(target: Path) -> None:
        on_step(f"reading the Makefiles of linux {version} (once)")
        _write(source, target / _INDEX)

    def load(folder: Path) -> bytes | None:
        return (folder / _INDEX).read_bytes() if (folder / _INDEX).is_file() else None

    packed = store.ensure(key, load, build, on_step=on_step)
    document = json.loads(gzip.decompress(packed))
    return SourceIndex(
        document["makefiles"],
        {name: tuple(found) for name, found in document["includers"].items()},
    )


def _write(source: Path, target: Path) -> None:
    try:
        found = index(_members(source))
        if not found.makefiles:
            raise EOFError("it holds no Makefile")
    # lzma and zlib have errors of their own; all mean that the archive cannot be read.
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise InfrastructureError(
            f"the kernel's source archive {source} is damaged: {error}",
            remedy="remove its folder, so that it is fetched again",
            host="local",
        ) from None
    document = {"makefiles": dict(found.makefiles), "includers": dict(found.includers)}
    target.write_bytes(gzip.compress(json.dumps(document).encode(), compresslevel=4, mtime=0))


def read_config(text: str) -> dict[str, str]:
    """A kernel configuration as values by name, without `CONFIG_`; what is off is missing."""
    return {name: value.strip('"') for name, value in _CONFIG.findall(text)}


@dataclass(frozen=True)
class Kbuild:
    """One Makefile, evaluated for a configuration.

    Attributes:
        objects: State of each object and folder in the `obj-` lists.
        parts: Objects by the name of what is linked from them.
        flags: Compiler flags that it sets, as lines.
    """

    objects: Mapping[str, State]
    parts: Mapping[str, tuple[str, ...]]
    flags: tuple[str, ...]


def evaluate(text: str, config: Mapping[str, str]) -> Kbuild:
    """Evaluate a Makefile of the kernel.

    Args:
        text: Its content.
        config: As from `read_config`.
    """
    variables: dict[str, list[str]] = defaultdict(list)
    flags: list[str] = []

    def expand(value: str) -> str:
        def known(match: re.Match[str]) -> str:
            name = match.group(1)
            if name.startswith("CONFIG_"):
                return config.get(name.removeprefix("CONFIG_"), "")
            return " ".join(variables[name]) if name in variables else match.group(0)

        value = _VARIABLE.sub(known, value)
        return _SUBST.sub(lambda m: m.group(3).replace(m.group(1), m.group(2)), value)

    taken: list[bool] = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if line.startswith("\t"):
            continue
        plain = re.sub(r"(?<!\\)#.*", "", line).strip()
        word = plain.split(" ", 1)[0].split("(", 1)[0]
        if word in ("ifeq", "ifneq", "ifdef", "ifndef"):
            taken.append(_holds(plain, expand, variables, config))
        elif word == "else" and taken:
            taken[-1] = not taken[-1]
        elif word == "endif" and taken:
            taken.pop()
        elif all(taken) and (match := _ASSIGNMENT.match(plain)):
            name, how, value = expand(match.group(1)).strip(), match.group(2), match.group(3)
            if _FLAGS.match(name):
                flags.append(f"{name} {'+=' if how == '+=' else ':='} {value}")
                continue
            words = expand(value).split()
            if how == "+=":
                variables[name] += words
            elif how != "?=" or name not in variables:
                variables[name] = words
    objects: dict[str, State] = {}
    for state in ("m", "y"):
        for item in variables.get(f"obj-{state}", ()):
            objects[item] = state
    parts: dict[str, list[str]] = defaultdict(list)
    for name, words in variables.items():
        match = re.fullmatch(r"(.+)-(?:y|m|objs)", name)
        if match and match.group(1) not in ("obj", "lib", "subdir", "always"):
            parts[match.group(1)] += [item for item in words if item.endswith(".o")]
    return Kbuild(
        objects, {name: tuple(dict.fromkeys(items)) for name, items in parts.items()}, tuple(flags)
    )


def _holds(
    line: str,
    expand: object,
    variables: Mapping[str, Sequence[str]],
    config: Mapping[str, str],
) -> bool:
    assert callable(expand)
    word, _, rest = line.partition(" ")
    if word in ("ifdef", "ifndef"):
        name = rest.strip()
        there = name.removeprefix("CONFIG_") in config or bool(variables.get(name))
        return there == (word == "ifdef")
    match = _TEST.match(line)
    if match is None:
        return True
    left, right = (expand(match.group(n)).strip() for n in (2, 3))
    return bool((left == right) == (match.group(1) == "ifeq"))


@dataclass(frozen=True)
class Place:
    """Where a source file ends up.

    Attributes:
        file: The file.
        folder: Folder of the Makefile that names it.
        name: What it is linked into, without suffix, as that Makefile has it; empty when no
            Makefile names the file.
        state: `m` in a module, `y` in the kernel itself, empty where this configuration leaves
            it out.
        option: Configuration option that decides, where one is named; for messages.
    """

    file: str
    folder: str
    name: str
    state: State
    option: str = ""


def place_of(path: str, found: SourceIndex, config: Mapping[str, str]) -> Place:
    """Where a C or assembly file is built into.

    Args:
        path: The file, from the kernel's top folder.
        found: The tree's index.
        config: The configuration.
    """
    stem = posixpath.splitext(path)[0]
    folder = posixpath.dirname(path)
    while folder:
        text = found.makefiles.get(folder)
        if text is not None:
            kbuild = evaluate(text, config)
            item = posixpath.relpath(f"{stem}.o", folder)
            owner = _owner(kbuild, item)
            if owner:
                state = kbuild.objects.get(f"{owner}.o", "")
                if state and not _reached(folder, found, config):
                    state = ""
                return Place(path, folder, owner, state, _option(text, owner))
            # The configuration may have taken it off the lists; the text still names it.
            if re.search(rf"(?<![\w./-]){re.escape(item)}(?![\w])", text):
                return Place(path, folder, posixpath.splitext(item)[0], "", _option(text, item))
        folder = posixpath.dirname(folder)
    return Place(path, "", "", "")


def _owner(kbuild: Kbuild, item: str) -> str:
    for name, parts in kbuild.parts.items():
        if item in parts and f"{name}.o" in kbuild.objects:
            return name
    own = posixpath.splitext(item)[0]
    # With a list of parts of its own name it is linked from those alone.
    return own if item in kbuild.objects and not kbuild.parts.get(own) else ""


def _option(text: str, item: str) -> str:
    name = re.escape(posixpath.splitext(item)[0])
    match = re.search(rf"\$\((CONFIG_\w+)\)\s*[+:]?=[^\n]*(?<![\w/-]){name}\.o", text)
    return match.group(1) if match else ""


def _reached(folder: str, found: SourceIndex, config: Mapping[str, str]) -> bool:
    """Whether every Makefile above descends into the folder."""
    below = folder
    above = posixpath.dirname(folder)
    while above:
        text = found.makefiles.get(above)
        if text is not None:
            objects = evaluate(text, config).objects
            if not objects.get(f"{posixpath.relpath(below, above)}/"):
                return False
            below = above
        above = posixpath.dirname(above)
    return True


def module_source(
    place: Place, found: SourceIndex, config: Mapping[str, str], read: Mapping[str, str]
) -> ModuleSource:
    """The module that a file is built into, with all that its own build needs.

    Args:
        place: A place in a module.
        found: The tree's index.
        config: The configuration.
        read: Text by path of the C files of the folders concerned, to find private headers.
    """
    kbuild = evaluate(found.makefiles[place.folder], config)
    parts = kbuild.parts.get(place.name) or (f"{place.name}.o",)
    objects = tuple(posixpath.splitext(item)[0] for item in parts)
    headers: dict[str, None] = {}
    todo = [f"{place.folder}/{item}.c" for item in objects]
    while todo:
        path = todo.pop(0)
        for included in _INCLUDE.findall(read.get(path, "").encode()):
            beside = posixpath.normpath(
                posixpath.join(posixpath.dirname(path), included.decode("utf-8", "replace"))
            )
            name = posixpath.relpath(beside, place.folder)
            if beside in read and name not in headers:
                headers[name] = None
                todo.append(beside)
    return ModuleSource(
        # The kernel writes a module's name with underscores, whatever its file is called.
        name=place.name.replace("-", "_"),
        directory=place.folder,
        objects=objects,
        headers=tuple(headers),
        flags=kbuild.flags,
    )


def users_of(header: str, found: SourceIndex) -> tuple[str, ...] | None:
    """C files that include a header, also through other headers; None when it is everybody's.

    Args:
        header: The header, from the kernel's top folder.
        found: The tree's index.
    """
    users: dict[str, None] = {}
    todo, seen = [header], {header}
    while todo:
        path = todo.pop()
        for name, only in _spellings(path):
            includers = found.includers.get(name)
            if includers is None:
                continue
            if not includers and not only:
                return None
            for user in includers:
                # A quoted name without a folder is the file beside the one that includes it.
                if only and posixpath.dirname(user) != only:
                    continue
                if user.endswith(".h"):
                    if user not in seen:
                        seen.add(user)
                        todo.append(user)
                else:
                    users[user] = None
        if len(users) > _CROWD:
            return None
    return tuple(users)


def _spellings(header: str) -> Iterator[tuple[str, str]]:
    """How files name a header, each with the folder that they must be in, if any."""
    for root in ("include/uapi/", "include/", "arch/x86/include/uapi/", "arch/x86/include/"):
        if header.startswith(root):
            yield header.removeprefix(root), ""
            break
    folder, name = posixpath.split(header)
    yield name, folder


def module_at(
    place: Place, found: SourceIndex, config: Mapping[str, str], read: Mapping[str, str]
) -> ModuleSource:
    """As `module_source`, but as the collection knows the module where the base builds it so.

    Its arms are then built as those of all experiments are, and found in the cache.
    """
    derived = module_source(place, found, config, read)
    table = MODULES.get(derived.name)
    same = table is not None and (table.directory, table.objects) == (
        derived.directory,
        derived.objects,
    )
    return table if table is not None and same else derived


def find_place(name: str, found: SourceIndex, config: Mapping[str, str]) -> Place | None:
    """Where a module is linked, by its name; None when this base builds no such module."""
    spelled = re.compile(rf"(?<![\w/-]){name.replace('_', '[-_]')}\.o\b")
    for folder, text in found.makefiles.items():
        for word in dict.fromkeys(spelled.findall(text)):
            item = posixpath.splitext(word)[0]
            kbuild = evaluate(text, config)
            if kbuild.objects.get(word) == "m" and _reached(folder, found, config):
                parts = kbuild.parts.get(item) or (word,)
                return Place(f"{folder}/{posixpath.splitext(parts[0])[0]}.c", folder, item, "m")
    return None


def folders_of(place: Place, found: SourceIndex, config: Mapping[str, str]) -> tuple[str, ...]:
    """Folders that hold the sources of the module that a place is in."""
    folders = {place.folder, posixpath.dirname(place.file)}
    for item in evaluate(found.makefiles[place.folder], config).parts.get(place.name, ()):
        folders.add(posixpath.normpath(posixpath.join(place.folder, posixpath.dirname(item))))
    return tuple(sorted(folders))


def texts(tree: Path, folders: Sequence[str]) -> dict[str, str]:
    """Text by path of the C and assembly files directly in some folders of a tree."""
    return {
        f"{folder}/{path.name}": path.read_text(encoding="utf-8", errors="surrogateescape")
        for folder in folders
        for path in sorted((tree / folder).glob("*.[chS]"))
    }
