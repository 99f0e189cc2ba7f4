"""The image's recipe and its small initrd, read back by other hands."""

from __future__ import annotations

import dataclasses
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vringlab.image import build, initrd, recipe
from vringlab.image.initrd import Entry
from vringlab.image.recipe import Recipe
from vringlab.lab import accel

# --- the digest ----------------------------------------------------------------------------


def test_equal_recipes_have_one_digest() -> None:
    assert Recipe().digest() == Recipe().digest()
    assert len(bytes.fromhex(Recipe().digest())) == 8


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Recipe)])
def test_every_ingredient_changes_the_digest(field: str) -> None:
    value = getattr(Recipe(), field)
    other: Any = f"{value}-other" if isinstance(value, str) else (*value, "other")
    assert dataclasses.replace(Recipe(), **{field: other}).digest() != Recipe().digest()


def test_the_order_of_modules_changes_the_digest() -> None:
    turned = tuple(reversed(Recipe().initrd_modules))
    assert Recipe(initrd_modules=turned).digest() != Recipe().digest()


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe's own files, where they may be changed."""
    for name in ("FILES", "SOURCES"):
        folder = tmp_path / name
        shutil.copytree(getattr(recipe, name), folder)
        monkeypatch.setattr(recipe, name, folder)
    return tmp_path


def test_files_and_sources_change_the_digest(copied: Path) -> None:
    assert Recipe().digest() == Recipe().digest()
    for path in (copied / "FILES" / "setup", copied / "SOURCES" / "vringlab-pingpong.c"):
        before = Recipe().digest()
        path.write_text(path.read_text() + "\n")
        assert Recipe().digest() != before


def test_a_new_file_and_a_new_name_change_the_digest(copied: Path) -> None:
    before = Recipe().digest()
    (copied / "FILES" / "setup").rename(copied / "FILES" / "set-up")
    renamed = Recipe().digest()
    (copied / "FILES" / "more").touch()
    assert len({before, renamed, Recipe().digest()}) == 3


def test_a_folder_among_the_files_is_no_reason_to_fail(copied: Path) -> None:
    before = Recipe().digest()
    (copied / "FILES" / "__pycache__").mkdir()
    assert Recipe().digest() == before


# --- the archive ---------------------------------------------------------------------------

needs_cpio = pytest.mark.skipif(shutil.which("cpio") is None, reason="needs cpio")


def listed(archive: bytes) -> dict[str, tuple[str, int]]:
    """Name -> (mode as `ls` prints it, size) as cpio sees them."""
    done = subprocess.run(["cpio", "-itv", "--quiet"], input=archive, capture_output=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.decode().splitlines()]
    return {row[-1]: (row[0], int(row[4])) for row in rows}


@needs_cpio
def test_cpio_reads_the_archive(tmp_path: Path) -> None:
    archive = initrd.cpio(
        [
            Entry("bin", None, 0o755),
            Entry("bin/odd", b"abc", 0o755),
            Entry("empty", b"", 0o600),
            Entry("four", b"abcd", 0o644),
        ]
    )
    assert listed(archive) == {
        "bin": ("drwxr-xr-x", 0),
        "bin/odd": ("-rwxr-xr-x", 3),
        "empty": ("-rw-------", 0),
        "four": ("-rw-r--r--", 4),
    }
    subprocess.run(["cpio", "-id", "--quiet"], input=archive, cwd=tmp_path, check=True)
    assert (tmp_path / "bin" / "odd").read_bytes() == b"abc"
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o600


@needs_cpio
@given(
    st.dictionaries(
        st.text("abcdefghijklmnop-_.", min_size=1, max_size=30).filter(
            lambda name: name.strip(".") and not name.startswith("-")
        ),
        st.binary(max_size=70),
        max_size=4,
    )
)
def test_any_content_keeps_its_size(files: dict[str, bytes]) -> None:
    archive = initrd.cpio(Entry(name, content, 0o644) for name, content in files.items())
    assert len(archive) % 4 == 0
    assert {name: size for name, (_, size) in listed(archive).items()} == {
        name: len(content) for name, content in files.items()
    }


def test_equal_entries_give_equal_bytes() -> None:
    modules = {"b.ko": b"2", "a.ko": b"1"}
    assert initrd.build(b"box", b"script", modules) == initrd.build(b"box", b"script", modules)


@needs_cpio
def test_the_initrd_has_what_its_script_wants() -> None:
    modules = {"failover.ko": b"one", "virtio_net.ko": b"two"}
    packed = initrd.build(b"busybox", (recipe.FILES / "initrd-init").read_bytes(), modules)
    archive = packed
    found = listed(archive)
    assert found["init"][0] == found["bin/busybox"][0] == "-rwxr-xr-x"
    assert set(found) >= {"bin", "dev", "modules", *(f"modules/{name}" for name in modules)}
    # The kernel unpacks in order: a folder must come before what is in it.
    names = list(found)
    assert names.index("modules") < names.index("modules/failover.ko")
    assert b"failover.ko\nvirtio_net.ko\n" in archive


# --- order of modules ----------------------------------------------------------------------

DEPENDENCIES = """\
kernel/drivers/block/virtio_blk.ko:
kernel/drivers/net/virtio_net.ko: kernel/drivers/net/net_failover.ko kernel/net/core/failover.ko
kernel/drivers/net/net_failover.ko: kernel/net/core/failover.ko
kernel/net/core/failover.ko:
kernel/net/vmw_vsock/vmw-vsock-transport.ko.xz: kernel/net/vmw_vsock/vsock.ko.xz
kernel/net/vmw_vsock/vsock.ko.xz:
"""


def names(*wanted: str) -> list[str]:
    return [path.rpartition("/")[2] for path in initrd.module_order(DEPENDENCIES, wanted)]


def test_each_module_comes_after_what_it_needs() -> None:
    assert names("virtio_net") == ["failover.ko", "net_failover.ko", "virtio_net.ko"]


def test_what_two_modules_need_is_loaded_once() -> None:
    assert names("virtio_net", "net_failover", "virtio_blk") == [
        *("failover.ko", "net_failover.ko", "virtio_net.ko", "virtio_blk.ko")
    ]


def test_hyphens_and_packed_files_are_found_by_the_modules_name() -> None:
    assert names("vmw_vsock_transport") == ["vsock.ko.xz", "vmw-vsock-transport.ko.xz"]


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(KeyError, match="virtio_gpu"):
        names("virtio_gpu")


# --- hooks ---------------------------------------------------------------------------------


def test_hooks_are_shell_that_parses(tmp_path: Path) -> None:
    hooks = build._hooks(Recipe(), tmp_path / "it's work")
    assert len(hooks) > 5
    for hook in hooks:
        if hook.startswith("sync-in "):  # mmdebstrap's own
            continue
        done = subprocess.run(["sh", "-n", "-c", hook], capture_output=True, text=True)
        assert done.returncode == 0, (hook, done.stderr)


@pytest.mark.parametrize("path", sorted(recipe.FILES.iterdir()), ids=lambda path: path.name)
def test_scripts_of_the_image_parse(path: Path) -> None:
    if path.read_text().startswith("#!"):
        done = subprocess.run(["sh", "-n", str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        assert path.name in ("inittab", "sshd_config")


def test_the_probes_word_is_the_one_waited_for() -> None:
    script = (recipe.FILES / "initrd-init").read_text()
    assert "probe booted" in script
    assert "probe booted" in Path(accel.__file__).read_text()
