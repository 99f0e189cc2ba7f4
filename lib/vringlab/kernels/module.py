"""Kernel modules: an arm built against its base kernel, once for identical inputs."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from vringlab.cachedir import OnStep, Store
from vringlab.errors import InfrastructureError, UserError, VringlabError
from vringlab.kernels import makefiles
from vringlab.kernels.buildroot import WORK, BuildRoot
from vringlab.kernels.elf import ModuleFile
from vringlab.kernels.patches import Arm, Patch, apply_patch
from vringlab.kernels.source import (
    MODULES,
    TABLE_OF,
    ModuleSource,
    ensure_folders,
    find_module,
)
from vringlab.settings import settings
from vringlab.transport import local

#: Raise it when the way of building changes, so that older results are not used.
_RECIPE = 1
_BUILD_SECONDS = 900.0
_SPACE_GB = 0.2
_STAMP = "vringlab-arm.h"

_ERROR = re.compile(
    r":\d+:\d+: (?:fatal )?error: |^ERROR: modpost: |\bld: .*(?:error|undefined)", re.M
)
_WARNING = re.compile(r"\bwarning: ", re.I)
# Debian's headers say that on every machine whose compiler has another patch level; the build
# root's compiler is part of the cache key and of the metadata instead.
_EXPECTED = re.compile(r"the compiler differs from the one used to build the kernel")
_OUT_OF_RESOURCES = re.compile(
    r"No space left on device|Cannot allocate memory|virtual memory exhausted|Killed signal"
)


@dataclass(frozen=True)
class BuiltModule:
    """A module of an arm, ready to be loaded.

    Attributes:
        path: The module file, without debug data, with symbols.
        module: Its name.
        experiment: The arm's experiment.
        arm: The arm's name.
        side: Whose module: `guest` or `host`.
        release: Kernel release that it loads into.
        build_id: The linker's build-id in hex; a loaded module shows it in
            `/sys/module/NAME/notes/.note.gnu.build-id`.
        srcversion: The kernel's digest of its sources; empty where the kernel's configuration
            asks for none (Debian's does not).
        vermagic: Release and options that the kernel compares before it loads it.
        sha256: Digest of the file.
        text_sha256: Digest of the machine code alone, see `ModuleFile.text_sha256`.
        log_path: What patching and building printed.
        patched_files: Files changed, from the kernel's top folder.
        warnings: The compiler's warnings.
        compiler: First line of the compiler's version.
        built_s: Seconds that the build took when it was made.
        cached: Whether it was found rather than built just now.
        before: Further modules of the arm that are loaded before it, in that order.
        after: Further modules of the arm that are loaded after it.
    """

    path: Path
    module: str
    experiment: str
    arm: str
    side: str
    release: str
    build_id: str
    srcversion: str
    vermagic: str
    sha256: str
    text_sha256: str
    log_path: Path
    patched_files: tuple[str, ...]
    warnings: tuple[str, ...]
    compiler: str
    built_s: float
    cached: bool
    before: tuple[BuiltModule, ...] = ()
    after: tuple[BuiltModule, ...] = ()

    @property
    def loading(self) -> tuple[BuiltModule, ...]:
        """All modules of the arm in the order of loading."""
        return (*self.before, self, *self.after)

    @property
    def identity(self) -> str:
        """What tells the arm from others: the build-ids of all its modules."""
        return "+".join(item.build_id for item in self.loading)

    def provenance(self) -> dict[str, Any]:
        """What a run keeps of it: everything but where it was."""
        kept = asdict(self)
        for name in ("path", "log_path", "cached", "before", "after"):
            del kept[name]
        for name, items in (("before", self.before), ("after", self.after)):
            if items:
                kept[name] = [item.provenance() for item in items]
        return kept


def _stamp(arm: Arm) -> str:
    """A tag in the module's modinfo, so that two arms never share a build-id.

    The build-id is a digest of the linked file, so without it an arm whose patch changes no
    code would load under another arm's identity. Not MODULE_INFO(): this is read before the
    source's own `#define pr_fmt`, which linux/module.h would forestall.
    """
    return (
        "static const char vringlab_arm[]\n"
        '\t__attribute__((used, section(".modinfo"), aligned(1))) =\n'
        f'\t"vringlab_arm={arm.experiment}/{arm.name}";\n'
    )


def _kbuild(module: ModuleSource) -> str:
    return f"{module.kbuild}ccflags-y += -include {WORK}/{_STAMP}\n"


@dataclass(frozen=True)
class _Layout:
    """What is built together, and how it lies below the build's folder.

    Attributes:
        modules: The modules, the arm's first one first.
        headers: Headers below `include/` that the arm changes, which shadow the base's.
    """

    modules: tuple[ModuleSource, ...]
    headers: tuple[str, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether it is one module, built in its own folder."""
        return len(self.modules) == 1 and not self.headers

    @property
    def shared(self) -> ModuleSource:
        """The headers, as if they were a module's."""
        return ModuleSource("headers", "include", (), tuple(h[8:] for h in self.headers))

    @property
    def files(self) -> tuple[str, ...]:
        """All files of the base that are laid out."""
        items = (*self.modules, self.shared)
        return tuple(dict.fromkeys(name for item in items for name in item.files))

    @property
    def folder(self) -> str:
        """Folder that make is told to build, from the top of the tree."""
        return self.modules[0].directory if self.alone else ""

    def kbuilds(self) -> dict[str, str]:
        """Kbuild files by folder."""
        if self.alone:
            return {self.folder: _kbuild(self.modules[0])}
        found: dict[str, str] = {}
        for module in self.modules:
            # One list for all modules of a folder, so that modpost sees what they export.
            text = module.kbuild.replace("obj-m :=", "obj-m +=", 1)
            found[module.directory] = found.get(module.directory, "") + text
        for folder in found:
            found[folder] += f"ccflags-y += -include {WORK}/{_STAMP}\n"
            if self.headers:
                roots = f"-I{WORK}/include -I{WORK}/include/uapi"
                found[folder] += f"LINUXINCLUDE := {roots} $(LINUXINCLUDE)\n"
        return {"": f"obj-m := {' '.join(f'{name}/' for name in sorted(found))}\n", **found}


def _layout(
    root: BuildRoot,
    arm: Arm,
    modules: Mapping[str, ModuleSource],
    on_step: OnStep,
    cache: Path,
) -> _Layout:
    """The modules of an arm by the table, or by the base's own Makefiles where that has none."""
    headers = tuple(name for name in arm.files if name.startswith("include/"))
    known = [modules.get(name) for name in arm.modules]
    if all(known) and (root.kernel.number[:2] == TABLE_OF or modules is not MODULES):
        return _Layout(tuple(item for item in known if item is not None), headers)
    version = root.kernel.version
    index = makefiles.ensure_index(root.archive, version, on_step=on_step, cache=cache)
    config = makefiles.read_config(root.config)
    found = []
    for name in arm.modules:
        place = makefiles.find_place(name, index, config)
        if place is None:
            return _Layout((find_module(name, modules),), headers)
        folders = makefiles.folders_of(place, index, config)
        tree = ensure_folders(root.archive, version, folders, on_step=on_step, cache=cache)
        texts = makefiles.texts(tree.folder, folders)
        found.append(makefiles.module_at(place, index, config, texts))
    return _Layout(tuple(found), headers)


def _key(root: BuildRoot, arm: Arm, layout: _Layout, files: Mapping[str, bytes]) -> str:
    state = hashlib.sha256()
    inputs = (
        *(str(_RECIPE), root.kernel.release, root.kernel.version, root.compiler, root.kernel_dir),
        *(arm.digest, _stamp(arm), *layout.kbuilds().values()),
    )
    for part in inputs:
        state.update(hashlib.sha256(part.encode()).digest())
    for name, content in sorted(files.items()):
        state.update(hashlib.sha256(name.encode()).digest() + hashlib.sha256(content).digest())
    return f"{arm.module}-{arm.name}-{state.hexdigest()[:16]}"


def _load(entry: Path) -> BuiltModule | None:
    """The module in a cache entry; None when there is none or it is not what was put there."""
    try:
        made = json.loads((entry / "metadata.json").read_text())
        return _read(entry, made["module"])
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, KeyError, TypeError):
        return None


def _read(entry: Path, record: Mapping[str, Any]) -> BuiltModule | None:
    kept: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
    }
    for name in ("before", "after"):
        items = tuple(_read(entry, item) for item in kept.get(name, ()))
        if None in items:
            return None
        kept[name] = items
    path = entry / f"{record['module']}.ko"
    if hashlib.sha256(path.read_bytes()).hexdigest() != record["sha256"]:
        return None
    return BuiltModule(path=path, log_path=entry / "build.log", cached=True, **kept)


def _files(
    root: BuildRoot, arm: Arm, layout: _Layout, on_step: OnStep, cache: Path
) -> dict[str, bytes]:
    """The base's own files that the arm's build needs, by path."""
    folders = {posixpath.dirname(name) for name in layout.files}
    version = root.kernel.version
    try:
        tree = ensure_folders(root.archive, version, folders, on_step=on_step, cache=cache)
        return tree.read_files(layout.files, arm.module)
    except InfrastructureError as error:
        # What the table names is the source package's fault; what the patch names is its own.
        absent = next(
            (name for name in layout.headers if posixpath.dirname(name) in str(error)), ""
        )
        if not absent:
            raise
        raise UserError(
            f"arm {arm.name} changes {absent}, which linux {version} does not have",
            remedy="it is for another kernel: port the patch to this one",
        ) from None


def build_module(
    root: BuildRoot,
    arm: Arm,
    *,
    on_step: OnStep,
    modules: Mapping[str, ModuleSource] = MODULES,
    cache: Path | None = None,
) -> BuiltModule:
    """The module of an arm; built when the cache does not have it.

    An arm of several modules has the others with it, see `BuiltModule.loading`.

    Args:
        root: Build root of the base kernel.
        arm: The arm.
        on_step: Receives a line before each step that takes time.
        modules: How modules are built; those that it lacks are looked up in the base's Makefiles.
        cache: Cache folder; the settings' when None.

    Raises:
        UserError: the arm does not serve this kernel, a patch does not apply, or the patched
            source does not compile (shows the compiler's lines).
        InfrastructureError: a tool is missing, the disk is full, or what came out is not a
            module for this kernel.
    """
    arm.check_serves(root.kernel)
    cache = cache or settings().cache
    layout = _layout(root, arm, modules, on_step, cache)
    files = _files(root, arm, layout, on_step, cache)
    store = Store(cache / "modules")
    key = _key(root, arm, layout, files)

    fresh: list[Path] = []

    def build(folder: Path) -> None:
        fresh.append(folder)
        what = ", ".join(arm.modules)
        on_step(f"building {what}, arm {arm.name}, for {root.kernel.release}")
        _Build(root, arm, layout, folder, kept=store.failed(key)).run(files)

    found = store.ensure(key, _load, build, on_step=on_step, space_gb=_SPACE_GB, keep_failed=True)
    return replace(found, cached=not fresh)


class _Build:
    """One build in a fresh folder, with its log and its metadata."""

    def __init__(
        self, root: BuildRoot, arm: Arm, layout: _Layout, folder: Path, *, kept: Path
    ) -> None:
        self.root = root
        self.arm = arm
        self.layout = layout
        self.folder = folder
        self.tree = folder / "tree"
        self.kept = kept
        self.log = ""
        self.started = time.monotonic()
        self.metadata: dict[str, Any] = {
            "status": "building",
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "release": root.kernel.release,
            "version": root.kernel.version,
            "compiler": root.compiler,
            "experiment": arm.experiment,
            "arm": arm.name,
            "patches": [patch.path.name for patch in arm.patches],
            "file": f"{arm.module}.ko",
        }

    def run(self, files: Mapping[str, bytes]) -> BuiltModule:
        """Patch, build and examine; the folder then holds the module, its log and metadata."""
        self._write_metadata()
        try:
            self._lay_out(files)
            built = self._compile()
            self.metadata["status"] = "built"
            self.metadata["module"] = built.provenance()
            shutil.rmtree(self.tree)
            return built
        except VringlabError as error:
            self.metadata.update(status="failed", error=str(error))
            raise
        except BaseException as error:
            self.metadata.update(status="interrupted", error=repr(error))
            raise
        finally:
            self.metadata["seconds"] = self._seconds()
            (self.folder / "build.log").write_text(self.log)
            self._write_metadata()

    def _seconds(self) -> float:
        return round(time.monotonic() - self.started, 3)

    def _write_metadata(self) -> None:
        path = self.folder / "metadata.json"
        path.with_suffix(".new").write_text(json.dumps(self.metadata, indent=2) + "\n")
        path.with_suffix(".new").replace(path)

    def _lay_out(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            path = self.tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for patch in self.arm.patches:
            self._apply(patch)
        (self.tree / _STAMP).write_text(_stamp(self.arm))
        for folder, text in self.layout.kbuilds().items():
            (self.tree / folder / "Kbuild").write_text(text)

    def _apply(self, patch: Patch) -> None:
        version = f"linux {self.root.kernel.version}"
        first, *others = self.layout.modules
        self.log += apply_patch(patch, self.tree, first, version, *others, self.layout.shared)

    def _compile(self) -> BuiltModule:
        where = f"{WORK}/{self.layout.folder}".rstrip("/")
        argv = ["make", "-j2", "-C", self.root.kernel_dir, f"M={where}", "modules"]
        done = self.root.run(argv, self.tree, timeout=_BUILD_SECONDS, check=False)
        stderr = done.stderr.replace(f"{WORK}/", "")
        self.log += f"$ {' '.join(argv)}\n{done.stdout}{stderr}"
        if done.returncode != 0:
            raise self._make_failure(argv, done, stderr)
        found: dict[str, BuiltModule] = {}
        needs: dict[str, set[str]] = {}
        for module in self.layout.modules:
            name = f"{module.name}.ko"
            place = f"{module.directory}/{name}"
            self.root.run(["strip", "--strip-debug", f"{WORK}/{place}"], self.tree)
            target = self.folder / name
            (self.tree / place).replace(target)
            elf = ModuleFile.read(target)
            found[module.name] = self._examine(elf, target, module, stderr)
            needs[module.name] = set(elf.modinfo.get("depends", "").split(","))
        # In the arm's own order, as far as what one needs of another lets it be.
        order = {name: needs[name] & set(found) - {name} for name in found}
        loading = [found[name] for name in TopologicalSorter(order).static_order()]
        main = found[self.layout.modules[0].name]
        at = loading.index(main)
        return replace(main, before=tuple(loading[:at]), after=tuple(loading[at + 1 :]))

    def _make_failure(
        self, argv: list[str], done: local.Completed, stderr: str
    ) -> UserError | InfrastructureError:
        if _OUT_OF_RESOURCES.search(stderr) or not _ERROR.search(stderr):
            return InfrastructureError(
                f"building {', '.join(self.arm.modules)} for arm {self.arm.name} failed",
                remedy="free memory or disk space if the lines above say so; the whole log is "
                f"{self.kept / 'build.log'}",
                command=argv,
                host="local",
                stdout=done.stdout,
                stderr=stderr,
                returncode=done.returncode,
            )
        said = [line for line in stderr.splitlines() if not line.startswith("make")]
        return UserError(
            f"arm {self.arm.name} of {self.arm.experiment} does not compile",
            remedy=f"mend {', '.join(str(patch.path) for patch in self.arm.patches)}; the patched "
            f"source is in {self.kept / 'tree'}, the whole log is {self.kept / 'build.log'}",
            command=argv,
            host="local",
            stderr="\n".join(said),
            returncode=done.returncode,
        )

    def _examine(
        self, elf: ModuleFile, path: Path, module: ModuleSource, stderr: str
    ) -> BuiltModule:
        vermagic = elf.modinfo.get("vermagic", "")
        release = self.root.kernel.release
        if not elf.build_id:
            raise InfrastructureError(
                f"{path.name} has no build-id, so that it could not be told from other arms",
                remedy="the linker must be called with --build-id: look for LDFLAGS in "
                f"{self.kept / 'build.log'}",
                host="local",
            )
        if vermagic.partition(" ")[0] != release:
            raise InfrastructureError(
                f"{path.name} was built for {vermagic!r}, not for {release}",
                remedy=f"remove the build root {self.root.path.parent}, so that it is made again",
                host="local",
            )
        warnings = tuple(
            line
            for line in stderr.splitlines()
            if _WARNING.search(line) and not _EXPECTED.search(line)
        )
        changed = dict.fromkeys(name for patch in self.arm.patches for name in patch.files)
        return BuiltModule(
            path=path,
            module=module.name,
            experiment=self.arm.experiment,
            arm=self.arm.name,
            side=self.arm.side,
            release=release,
            build_id=elf.build_id,
            srcversion=elf.modinfo.get("srcversion", ""),
            vermagic=vermagic,
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            text_sha256=elf.text_sha256,
            log_path=self.folder / "build.log",
            patched_files=tuple(changed),
            warnings=warnings,
            compiler=self.root.compiler,
            built_s=self._seconds(),
            cached=False,
        )
