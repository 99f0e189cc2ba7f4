"""Modules built from a toy tree with a real Makefile, and build roots made by a fake mmdebstrap."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest

from vringlab.cachedir import OnStep
from vringlab.errors import InfrastructureError, UserError
from vringlab.kernels import buildroot, module, patches, source
from vringlab.kernels.base import BaseKernel

TOY = Path(__file__).parent / "toy_module"
RELEASE = (TOY / "kernel" / "release").read_text().strip()
KERNEL = BaseKernel("debian:6.12", RELEASE, "6.12.118-1", "trixie")
MODULES = MappingProxyType(
    {"toy": source.ModuleSource("toy", "drivers/toy", ("toy_main",), ("toy.h",))}
)

HEADER = """\
Title: {title}
Module: toy
Side: guest
Serves: 6.12 <= version < 6.13

"""
SHIPPED = HEADER.replace("\n\n", "\nDiff: none\n\n").format(title="as shipped")
DIFF = """\
diff --git a/drivers/toy/toy_main.c b/drivers/toy/toy_main.c
--- a/drivers/toy/toy_main.c
+++ b/drivers/toy/toy_main.c
@@ -3,5 +3,5 @@
 /* Twice the value: what the arms of the tests disagree about. */
 int toy_scale(int value)
 {
-\treturn value * 2;
+\treturn value * 3;
 }
"""


def silent(_line: str) -> None:
    pass


class Lab:
    """A toy kernel, its source archive, an empty cache and a folder for arms."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.kernel_dir = folder / "kernel"
        shutil.copytree(TOY / "kernel", self.kernel_dir)
        archive = folder / "linux-source-6.12.tar.xz"
        with tarfile.open(archive, "w:xz") as tar:
            tar.add(TOY / "source", "linux-source-6.12")
        self.root = buildroot.BuildRoot(
            KERNEL, Path("/"), archive, "toy-gcc 14", str(self.kernel_dir)
        )

    def arm(self, name: str, diff: str = DIFF) -> patches.Arm:
        path = self.folder / "patches" / "toys" / "debian-6.12" / f"{name}.patch"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEADER.format(title=name) + diff if diff else SHIPPED)
        return patches.load_arm("toys", "debian:6.12", name, data=self.folder)

    def build(self, arm: patches.Arm, on_step: OnStep = silent) -> module.BuiltModule:
        return module.build_module(
            self.root, arm, on_step=on_step, modules=MODULES, cache=self.cache
        )

    def entries(self) -> list[str]:
        """What is in the cache of modules, without its lock files."""
        names = (path.name for path in (self.cache / "modules").iterdir())
        return sorted(name for name in names if not name.endswith(".lock"))


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


# --- a build -------------------------------------------------------------------------------


def test_an_arm_becomes_a_module_with_its_identity(lab: Lab) -> None:
    built = lab.build(lab.arm("triple"))
    assert built.path.name == "toy.ko"
    assert len(bytes.fromhex(built.build_id)) == 20
    assert built.vermagic == f"{RELEASE} SMP toy"
    assert built.patched_files == ("drivers/toy/toy_main.c",)
    assert (built.experiment, built.arm, built.side) == ("toys", "triple", "guest")
    assert not built.cached
    assert built.warnings == ()
    assert built.built_s > 0
    log = built.log_path.read_text()
    assert "triple.patch" in log
    assert "Applied patch" in log
    assert "LD [M]" in log
    metadata = json.loads((built.path.parent / "metadata.json").read_text())
    assert metadata["status"] == "built"
    assert metadata["seconds"] > 0
    assert metadata["module"]["build_id"] == built.build_id
    # Nothing but the module, its log and its metadata is kept.
    assert {path.name for path in built.path.parent.iterdir()} == {
        "toy.ko",
        "build.log",
        "metadata.json",
    }


def test_identical_inputs_are_built_once(lab: Lab) -> None:
    steps: list[str] = []
    first = lab.build(lab.arm("triple"), steps.append)
    assert [step for step in steps if step.startswith("building")]
    steps.clear()
    # Another header is no other input.
    text = DIFF.replace("diff --git", "Prose that nobody compiles.\n\ndiff --git")
    second = lab.build(lab.arm("triple", text), steps.append)
    assert steps == []
    assert second.cached
    assert second.provenance() == first.provenance()
    assert second.path == first.path


def test_each_input_has_its_own_entry(lab: Lab) -> None:
    built = [
        lab.build(lab.arm("triple")),
        lab.build(lab.arm("triple", DIFF.replace("* 3", "* 4"))),
        lab.build(lab.arm("shipped", "")),
        lab.build(lab.arm("again", "")),
    ]
    assert len({item.build_id for item in built}) == 4
    # The last two differ in nothing but their names, and their code says so.
    assert len({item.text_sha256 for item in built}) == 3
    assert built[2].text_sha256 == built[3].text_sha256
    lab.root = buildroot.BuildRoot(
        KERNEL, Path("/"), lab.root.archive, "toy-gcc 15", str(lab.kernel_dir)
    )
    assert not lab.build(lab.arm("triple")).cached


def test_compilers_warnings_are_kept(lab: Lab) -> None:
    built = lab.build(lab.arm("warns", DIFF.replace("return value * 3", "return &value")))
    assert any("toy_main.c:6:16: warning:" in line for line in built.warnings)
    assert lab.build(lab.arm("warns", DIFF.replace("return value * 3", "return &value"))).cached


def test_a_damaged_cache_entry_is_built_again(lab: Lab) -> None:
    arm = lab.arm("triple")
    first = lab.build(arm)
    first.path.write_bytes(first.path.read_bytes()[:-100])
    second = lab.build(arm)
    assert not second.cached
    assert second.sha256 == first.sha256
    (second.path.parent / "metadata.json").write_text('{"status": "bui')
    assert not lab.build(arm).cached
    assert lab.build(arm).cached


def test_two_who_want_the_same_build_it_once(lab: Lab) -> None:
    arm = lab.arm("triple")
    lab.build(lab.arm("other", ""))  # so that the source is there
    steps: list[str] = []
    threads = [threading.Thread(target=lab.build, args=(arm, steps.append)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([step for step in steps if step.startswith("building")]) == 1
    assert lab.build(arm).cached


# --- what goes wrong -----------------------------------------------------------------------


def test_a_compile_error_is_shown_and_poisons_nothing(lab: Lab) -> None:
    broken = DIFF.replace("return value * 3", "return valeu * 3")
    with pytest.raises(UserError, match="does not compile") as caught:
        lab.build(lab.arm("triple", broken))
    assert "drivers/toy/toy_main.c:6:16: error: 'valeu' undeclared" in caught.value.stderr
    assert "make" not in caught.value.stderr
    assert "triple.patch" in caught.value.remedy
    (kept,) = lab.entries()
    assert kept.startswith(".failed-toy-triple-")
    metadata = json.loads((lab.cache / "modules" / kept / "metadata.json").read_text())
    assert metadata["status"] == "failed"
    assert "valeu" in metadata["error"]
    assert str(lab.cache / "modules" / kept / "build.log") in caught.value.remedy
    assert "valeu" in (lab.cache / "modules" / kept / "tree/drivers/toy/toy_main.c").read_text()
    assert not lab.build(lab.arm("triple")).cached


def test_a_patch_that_does_not_fit_shows_hunk_and_file(lab: Lab) -> None:
    with pytest.raises(UserError) as caught:
        lab.build(lab.arm("triple", DIFF.replace("value * 2", "value << 1")))
    text = str(caught.value)
    assert "triple.patch does not apply to drivers/toy/toy_main.c of linux 6.12.118-1" in text
    assert "    -\treturn value << 1;" in text
    assert "    !     6 \treturn value * 2;" in text
    assert "         4 int toy_scale(int value)" in text


def test_a_patch_goes_in_where_its_context_moved_to(lab: Lab) -> None:
    built = lab.build(lab.arm("triple", DIFF.replace("@@ -3,5 +3,5 @@", "@@ -2,5 +2,5 @@")))
    assert "offset 1 line" in built.log_path.read_text()


def test_a_damaged_patch_is_the_users_to_mend(lab: Lab) -> None:
    with pytest.raises(UserError, match="cannot be applied") as caught:
        lab.build(lab.arm("triple", DIFF.replace(" }\n", "")))
    assert "corrupt patch" in caught.value.stderr


def test_a_patch_of_foreign_files_is_refused(lab: Lab) -> None:
    foreign = DIFF.replace("drivers/toy/toy_main.c", "drivers/toy/unrelated.c")
    with pytest.raises(UserError, match=r"changes drivers/toy/unrelated\.c"):
        lab.build(lab.arm("triple", foreign))
    # Headers that modules share are built with them, where the kernel has them.
    foreign = DIFF.replace("drivers/toy/toy_main.c", "include/linux/virtio.h")
    with pytest.raises(UserError, match=r"changes include/linux/virtio\.h, which linux"):
        lab.build(lab.arm("triple", foreign))


def test_git_settings_of_the_caller_do_not_matter(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As in a hook of another repository, whose owner has git refuse doubtful blanks.
    config = tmp_path / "gitconfig"
    config.write_text("[apply]\n\twhitespace = error\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    built = lab.build(lab.arm("triple", DIFF.replace("return value * 3;", "return value * 3; ")))
    assert built.text_sha256 == lab.build(lab.arm("three")).text_sha256
    assert built.text_sha256 != lab.build(lab.arm("shipped", "")).text_sha256


@pytest.mark.parametrize(
    ("fault", "said"),
    [("no-build-id", "has no build-id"), ("other-release", r"built for '5\.10\.0-other SMP toy'")],
)
def test_what_is_no_module_for_this_kernel_is_not_kept(lab: Lab, fault: str, said: str) -> None:
    (lab.kernel_dir / fault).touch()
    with pytest.raises(InfrastructureError, match=said):
        lab.build(lab.arm("triple"))
    (lab.kernel_dir / fault).unlink()
    assert not lab.build(lab.arm("triple")).cached


def test_an_arm_for_another_version_is_refused_before_anything_is_built(lab: Lab) -> None:
    arm = lab.arm("triple")
    path = arm.patches[0].path
    path.write_text(path.read_text().replace("< 6.13", "< 6.12.5"))
    with pytest.raises(UserError, match=r"serves 6\.12 <= version < 6\.12\.5"):
        lab.build(patches.load_arm("toys", "debian:6.12", "triple", data=lab.folder))
    assert not lab.cache.exists()


def test_kill_9_in_the_middle_leaves_no_entry_and_no_process(lab: Lab) -> None:
    arm = lab.arm("triple")
    (lab.kernel_dir / "slow").touch()
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_kernels as t; from pathlib "
        "import Path; lab = t.Lab.__new__(t.Lab); lab.folder = Path(sys.argv[2]); "
        "lab.cache = lab.folder / 'cache'; lab.kernel_dir = lab.folder / 'kernel'; "
        "lab.root = t.buildroot.BuildRoot(t.KERNEL, Path('/'), "
        "lab.folder / 'linux-source-6.12.tar.xz', 'toy-gcc 14', str(lab.kernel_dir)); "
        "lab.build(t.patches.load_arm('toys', 'debian:6.12', 'triple', data=lab.folder))"
    )
    victim = subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parent), str(lab.folder)]
    )
    modules = lab.cache / "modules"
    wait_for(lambda: any(modules.glob(".building-*/tree/drivers/toy/started")))
    (building,) = lab.entries()
    assert json.loads((modules / building / "metadata.json").read_text())["status"] == "building"
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    wait_for(lambda: not running(str(modules / building)))
    (lab.kernel_dir / "slow").unlink()
    # Whoever builds next, even something else, removes what was left.
    lab.build(lab.arm("shipped", ""))
    assert not [name for name in lab.entries() if name.startswith(".")]
    assert not lab.build(arm).cached
    assert lab.build(arm).cached


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


def running(argument: str) -> list[str]:
    """Processes with `argument` in their command line; our own children of bubblewrap do."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if argument in line:
            found.append(line)
    return found


# --- the source archive --------------------------------------------------------------------


def test_only_c_files_right_in_the_folders_are_taken(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in (
        "drivers/net/virtio_net.c",
        "drivers/net/Makefile",
        "drivers/net/ethernet/big.c",
        "drivers/vhost/vhost.h",
        "drivers/net2/x.c",
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tree, "linux-source-6.12")
        evil = tarfile.TarInfo("linux-source-6.12/../drivers/net/evil.c")
        tar.addfile(evil)
        link = tarfile.TarInfo("linux-source-6.12/drivers/net/link.c")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    target = tmp_path / "target"
    assert source.extract(archive, ["drivers/net", "drivers/vhost"], target) == 2
    files = sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file())
    assert files == ["drivers/net/virtio_net.c", "drivers/vhost/vhost.h"]


def test_a_damaged_archive_leaves_no_source(lab: Lab) -> None:
    archive = lab.root.archive
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InfrastructureError, match="is damaged"):
        lab.build(lab.arm("triple"))
    archive.write_bytes(b"nothing")
    with pytest.raises(InfrastructureError, match="is damaged"):
        lab.build(lab.arm("triple"))
    archive.write_bytes(whole)
    lab.build(lab.arm("triple"))


def test_an_archive_arranged_differently_is_named(lab: Lab) -> None:
    other = MappingProxyType({"toy": source.ModuleSource("toy", "drivers/moved", ("toy",))})
    with pytest.raises(InfrastructureError, match="has no drivers/moved"):
        source.ensure_source(
            lab.root.archive, "6.12", on_step=silent, modules=other, cache=lab.cache
        )
    other = MappingProxyType({"toy": source.ModuleSource("toy", "drivers/toy", ("moved",))})
    tree = source.ensure_source(
        lab.root.archive, "6.12", on_step=silent, modules=other, cache=lab.cache
    )
    with pytest.raises(InfrastructureError, match=r"has no drivers/toy/moved\.c"):
        tree.read(other["toy"])


# --- build roots ---------------------------------------------------------------------------


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of fake programs, found before the real ones."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def fake(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def leftovers(cache: Path) -> list[str]:
    return [p.name for p in (cache / "buildroots").iterdir() if not p.name.endswith(".lock")]


@pytest.mark.parametrize(
    ("printed", "said", "remedy"),
    [
        (
            "E: Failed to fetch SOMEWHERE/x.deb  Temporary failure resolving 'archive'",
            "cannot be reached",
            "network",
        ),
        ("dpkg: error: write failed: No space left on device", "disk is full", "VRINGLAB_CACHE"),
        (
            "E: Version '6.12.118-1' for 'linux-headers-6.12.118+deb13-amd64' was not found",
            "no longer has this kernel",
            "build the image again",
        ),
        ("W: GPG error: trixie InRelease: NO_PUBKEY 6ED0E7B8", "signature", "keyring"),
        ("E: something new", "mmdebstrap failed", "last lines"),
    ],
)
def test_mmdebstraps_failures_are_explained(
    tmp_path: Path, tools: Path, printed: str, said: str, remedy: str
) -> None:
    fake(tools / "mmdebstrap", f'echo "I: running apt-get"; echo "{printed}" >&2; exit 25')
    with pytest.raises(InfrastructureError, match=said) as caught:
        buildroot.ensure_buildroot(KERNEL, on_step=silent, cache=tmp_path)
    assert remedy in caught.value.remedy
    assert printed in str(caught.value)
    assert leftovers(tmp_path) == []


def test_a_missing_mmdebstrap_says_how_to_get_it(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(InfrastructureError, match="'mmdebstrap' is not installed") as caught:
        buildroot.ensure_buildroot(KERNEL, on_step=silent, cache=tmp_path)
    assert "apt install mmdebstrap" in caught.value.remedy
    assert leftovers(tmp_path) == []


def test_a_full_disk_is_found_before_anything_is_fetched(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tools / "mmdebstrap", "exit 99")
    usage = shutil._ntuple_diskusage(10**12, 10**12 - 10**8, 10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(InfrastructureError, match=r"0\.1 GB free, 1\.5 GB needed"):
        buildroot.ensure_buildroot(KERNEL, on_step=silent, cache=tmp_path)


def test_a_cache_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where the cache folder should be")
    with pytest.raises(InfrastructureError, match="file/cache/buildroots cannot be used") as caught:
        buildroot.ensure_buildroot(KERNEL, on_step=silent, cache=tmp_path / "file" / "cache")
    assert "VRINGLAB_CACHE" in caught.value.remedy


def test_what_a_killed_builder_left_is_removed(tmp_path: Path, tools: Path) -> None:
    fake(tools / "mmdebstrap", "exit 25")
    left = tmp_path / "buildroots" / ".building-6.12.1-old"
    (left / "root").mkdir(parents=True)
    with pytest.raises(InfrastructureError):
        buildroot.ensure_buildroot(KERNEL, on_step=silent, cache=tmp_path)
    assert leftovers(tmp_path) == []


def test_kill_9_ends_what_mmdebstrap_started(tmp_path: Path, tools: Path) -> None:
    fake(tools / "mmdebstrap", f"sleep 63.5 & touch {tmp_path / 'started'}; sleep 62.5")
    script = (
        "import sys; from pathlib import Path; from vringlab.kernels import base, buildroot; "
        f"buildroot.ensure_buildroot(base.BaseKernel('debian:6.12', '{RELEASE}', '6.12.118-1', "
        "'trixie'), on_step=print, cache=Path(sys.argv[1]))"
    )
    victim = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    wait_for((tmp_path / "started").exists)
    assert running("sleep\0" + "62.5")
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    wait_for(lambda: not running("sleep\0" + "62.5") and not running("sleep\0" + "63.5"))


# Unpacks the least that a build root must have; the machine's own root serves for the rest.
UNPACK = """\
for last; do :; done
case "$*" in *linux-headers-{release}=6.12.118-1,linux-source-6.12=6.12.118-1*) ;; *) exit 3;; esac
mkdir -p "$last/usr/src" "$last/usr/bin" "$last/dev/pts" "$last/run"
echo archive > "$last/usr/src/linux-source-6.12.tar.xz"
echo once >> {count}
"""

# Runs mmdebstrap, but answers itself for what is to be run in the root.
BWRAP = """\
case "$*" in
*mmdebstrap*) while [ "$1" != -- ]; do shift; done; shift; exec "$@" ;;
esac
echo 'toy-gcc (Toy 14) 14.2.0'
echo more
"""


def test_a_build_root_is_made_once_and_found_again(tmp_path: Path, tools: Path) -> None:
    count = tmp_path / "count"
    fake(tools / "mmdebstrap", UNPACK.format(release=RELEASE, count=count))
    fake(tools / "bwrap", BWRAP)
    made = buildroot.ensure_buildroot(KERNEL, on_step=silent, cache=tmp_path)
    assert made.compiler == "toy-gcc (Toy 14) 14.2.0"
    assert made.archive.read_text() == "archive\n"
    assert made.kernel_dir == f"/lib/modules/{RELEASE}/build"
    assert list((made.path / "dev").iterdir()) == []
    assert (made.path / "usr/bin/awk").is_symlink()
    assert buildroot.ensure_buildroot(KERNEL, on_step=silent, cache=tmp_path) == made
    assert count.read_text() == "once\n"
    other = BaseKernel("debian:6.12", RELEASE, "6.12.118-2", "trixie")
    with pytest.raises(InfrastructureError):
        buildroot.ensure_buildroot(other, on_step=silent, cache=tmp_path)


def test_forbidden_namespaces_are_explained(tmp_path: Path, tools: Path) -> None:
    fake(tools / "mmdebstrap", f"echo once >> {tmp_path / 'count'}")
    fake(tools / "bwrap", "echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1")
    with pytest.raises(InfrastructureError, match="cannot make a sandbox") as caught:
        buildroot.ensure_buildroot(KERNEL, on_step=silent, cache=tmp_path)
    assert "unprivileged_userns" in caught.value.remedy
    assert leftovers(tmp_path) == []
    # Said before anything is fetched.
    assert not (tmp_path / "count").exists()


def test_a_missing_bubblewrap_says_how_to_get_it(
    lab: Lab, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.build(lab.arm("shipped", ""))
    git = shutil.which("git")
    assert git is not None
    (tools / "git").symlink_to(git)
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(InfrastructureError, match="'bwrap' is not installed") as caught:
        lab.build(lab.arm("triple"))
    assert "apt install bubblewrap" in caught.value.remedy
