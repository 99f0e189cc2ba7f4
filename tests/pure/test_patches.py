"""Arms and their patch files, base kernels' names, and what a module file says of itself."""

from __future__ import annotations

import difflib
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vringlab.errors import InfrastructureError, UserError
from vringlab.kernels import base, elf, patches, source
from vringlab.settings import settings

DIFF = """\
diff --git a/drivers/toy/toy.c b/drivers/toy/toy.c
--- a/drivers/toy/toy.c
+++ b/drivers/toy/toy.c
@@ -2,3 +2,4 @@ int first(void)
 two
-three
+THREE
+more
 four
@@ -20 +21 @@
-twenty
+TWENTY
"""

HEADER = """\
Title: it counts in capitals
Module: toy
Side: guest
Serves: 6.12.107 <= version < 6.13
From-Message-Id: <1-2@example.org>
Upstream: 0123456789ab
Note: a note
 of two lines

Prose for the reader:
it may have colons.

"""

KERNEL = base.BaseKernel("debian:6.12", "6.12.118+deb13-amd64", "6.12.118-1", "trixie")


def parse(text: str) -> patches.Patch:
    return patches.parse_patch(text, Path("toy.patch"))


# --- base kernels --------------------------------------------------------------------------


def test_a_base_kernel_is_the_one_that_the_image_holds() -> None:
    kernel = base.resolve(
        "debian:6.12", suite="trixie", release="6.12.118+deb13-amd64", version="6.12.118-1"
    )
    assert kernel == KERNEL
    assert (kernel.name, kernel.series, kernel.number) == ("debian-6.12", "6.12", (6, 12, 118))


@pytest.mark.parametrize("spec", ["debian:6.13", "debian:7.0", "debian:trixie"])
def test_other_series_are_refused_and_those_there_are_named(spec: str) -> None:
    with pytest.raises(UserError, match="not supported") as caught:
        base.check_spec(spec)
    assert "debian:6.1, debian:6.12, debian:7.x" in caught.value.remedy


def test_base_kernels_have_names_fit_for_folders() -> None:
    assert base.folder_name("debian:6.1") == "debian-6.1"
    assert base.folder_name("debian:7.x") == "debian-7.x"
    names = [
        base.folder_name(spec)
        for spec in (
            "git:https://git.example/linux.git@v6.12-rc1",
            "git:https://other.example/linux.git@v6.12-rc1",
            "tarball:/tmp/linux 6.12.tar.xz",
            "tree:/home/me/linux",
        )
    ]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+-[A-Za-z0-9.-]+-[0-9a-f]{8}", name) for name in names)
    with pytest.raises(UserError, match="which revision"):
        base.check_spec("git:https://git.example/linux.git")


def test_kernels_of_every_suite_are_resolved() -> None:
    old = base.resolve(
        "debian:6.1", suite="bookworm", release="6.1.0-57-amd64", version="6.1.192-3"
    )
    assert (old.series, old.number) == ("6.1", (6, 1, 192))
    new = base.resolve(
        "debian:7.x",
        suite="trixie-backports",
        release="7.3.4+deb13-amd64",
        version="7.3.4-1~bpo13+1",
    )
    assert (new.name, new.series, new.number) == ("debian-7.x", "7.3", (7, 3, 4))
    assert base.is_held("debian:6.12", "6.12.118+deb13-amd64")
    assert not base.is_held("debian:6.1", "6.12.118+deb13-amd64")
    assert not base.is_held("tree:/linux", "6.12.118+deb13-amd64")


@pytest.mark.parametrize("spec", ["", "6.12", "debian", "debian:", "fedora:6.12"])
def test_what_is_no_base_kernel_says_what_is_one(spec: str) -> None:
    with pytest.raises(UserError, match="does not name a base kernel") as caught:
        base.check_spec(spec)
    assert "git:URL@REF" in caught.value.remedy


@pytest.mark.parametrize(
    ("suite", "release", "version"),
    [
        ("bookworm", "6.1.0-37-amd64", "6.1.140-1"),
        ("trixie", "6.16.3+deb13-amd64", "6.16.3-1"),
        ("trixie", "6.12.117+deb13-amd64", "6.12.118-1"),
        ("trixie", "6.12.11+deb13-amd64", "6.12.1-1"),
    ],
)
def test_an_image_with_another_kernel_is_refused(suite: str, release: str, version: str) -> None:
    with pytest.raises(UserError):
        base.resolve("debian:6.12", suite=suite, release=release, version=version)


# --- headers -------------------------------------------------------------------------------


def test_a_header_is_read_with_its_continued_lines() -> None:
    patch = parse(HEADER + DIFF)
    assert patch.title == "it counts in capitals"
    assert (patch.module, patch.side) == ("toy", "guest")
    assert patch.message_id == "1-2@example.org"
    assert patch.note == "a note of two lines"
    assert patch.diff == DIFF
    assert patch.files == ("drivers/toy/toy.c",)


@pytest.mark.parametrize("name", ["Title", "Module", "Side", "Serves"])
def test_a_header_without_a_required_line_is_refused(name: str) -> None:
    text = "".join(
        line for line in HEADER.splitlines(keepends=True) if not line.startswith(f"{name}:")
    )
    with pytest.raises(UserError, match=f"lacks {name}"):
        parse(text + DIFF)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Side: guest", "Side: both", "Side is 'both'"),
        ("Upstream:", "Upsteam:", "not understood: 'Upsteam"),
        ("Module: toy", "Module: toy\nModule: other", "not understood: 'Module: other"),
        ("6.12.107 <= version < 6.13", "6.12", "Serves is '6.12'"),
        ("6.12.107 <= version < 6.13", "6.12 <= version <= 6.13", "Serves is"),
        ("Note: a note", "Diff: none\nNote: a note", "says `Diff: none` but has one"),
    ],
)
def test_a_malformed_header_names_the_line(old: str, new: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(HEADER.replace(old, new) + DIFF)
    assert said in str(caught.value)
    assert "toy.patch" in str(caught.value)


def test_a_patch_that_lost_its_diff_is_not_taken_for_the_driver_as_shipped() -> None:
    with pytest.raises(UserError, match="has no diff"):
        parse(HEADER)
    with pytest.raises(UserError, match="no hunk"):
        parse(HEADER + "".join(DIFF.splitlines(keepends=True)[:3]))
    shipped = parse(HEADER.replace("Note:", "Diff: none\nNote:"))
    assert shipped.diff == ""
    assert shipped.files == ()


# --- version ranges ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "served"),
    [
        ("6.12.106-1", False),
        ("6.12.107-1", True),
        ("6.12.118-1", True),
        ("6.12.1070-1", True),
        ("6.13-1", False),
        ("6.13.1-1", False),
        ("6.2.200-1", False),
    ],
)
def test_versions_are_compared_as_numbers(version: str, served: bool) -> None:
    assert (base.version_number(version) in parse(HEADER + DIFF).serves) is served


def arm_of(text: str) -> patches.Arm:
    return patches.Arm("toys", "debian-6.12", "capitals", "toy", "guest", (parse(text),))


def test_an_arm_is_refused_for_a_version_that_it_does_not_serve() -> None:
    arm = arm_of(HEADER.replace("6.12.107", "6.12.119") + DIFF)
    with pytest.raises(UserError, match=r"serves 6\.12\.119 <= version < 6\.13.*6\.12\.118-1"):
        arm.check_serves(KERNEL)
    arm_of(HEADER + DIFF).check_serves(KERNEL)


def test_an_arms_digest_is_that_of_its_diff() -> None:
    one = arm_of(HEADER + DIFF)
    assert one.digest == arm_of(HEADER.replace("a note", "another note") + DIFF).digest
    assert one.digest != arm_of(HEADER + DIFF.replace("THREE", "DREI")).digest


# --- hunks ---------------------------------------------------------------------------------


def test_hunks_are_read_with_their_places() -> None:
    first, second = parse(HEADER + DIFF).hunks
    assert (first.file, first.start) == ("drivers/toy/toy.c", 2)
    assert first.before == ["two", "three", "four"]
    assert (second.start, second.before) == (20, ["twenty"])


LINES = st.lists(st.sampled_from(["a", "b", "", "--- a/x", "+++ b/x", "@@ -1 +1 @@"]), max_size=30)


@given(LINES, LINES)
def test_hunks_of_any_diff_expect_what_the_file_has(old: list[str], new: list[str]) -> None:
    diff = "\n".join(difflib.unified_diff(old, new, "a/f.c", "b/f.c", lineterm="", n=2))
    hunks = list(patches._hunks(diff))
    assert bool(hunks) == (old != new)
    rebuilt, position = [], 0
    for hunk in hunks:
        # A hunk without old lines states the line that it follows.
        start = hunk.start - 1 if hunk.before else hunk.start
        assert hunk.before == old[start : start + len(hunk.before)]
        rebuilt += old[position:start] + [ln[1:] for ln in hunk.lines if ln[:1] in (" ", "+")]
        position = start + len(hunk.before)
    assert rebuilt + old[position:] == new


def test_a_misfit_shows_the_hunk_and_the_nearest_lines_of_the_file() -> None:
    patch = parse(HEADER + DIFF)
    content = [f"line {number}" for number in range(1, 60)]
    # Further down than stated, and with one line that the hunk does not expect.
    content[39:42] = ["two", "thirty", "four"]
    text = patches.describe_misfit(patch.hunks[0], "\n".join(content), patch, "linux 6.12.118-1")
    assert "toy.patch does not apply to drivers/toy/toy.c of linux 6.12.118-1" in text
    assert "    -three" in text
    assert "    +THREE" in text
    assert "         40 two" in text
    assert "    !    41 thirty" in text
    assert "         42 four" in text


def test_a_misfit_without_any_likeness_shows_the_stated_lines() -> None:
    patch = parse(HEADER + DIFF)
    content = "\n".join(f"line {number}" for number in range(1, 60))
    text = patches.describe_misfit(patch.hunks[1], content, patch, "linux 6.12.118-1")
    assert "    !    20 line 20" in text


def test_a_misfit_in_a_file_shorter_than_the_hunk_is_described() -> None:
    patch = parse(HEADER + DIFF)
    assert "does not apply" in patches.describe_misfit(patch.hunks[0], "", patch, "linux")
    assert "1 four" in patches.describe_misfit(patch.hunks[0], "four", patch, "linux")


# --- arms on disk --------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "patches" / "toys" / "debian-6.12"
    folder.mkdir(parents=True)
    (folder / "capitals.patch").write_text(HEADER + DIFF)
    (folder / "rfc-v1.2.patch").write_text(HEADER + DIFF)
    (folder / "README").write_text("not an arm\n")
    (folder / "series").mkdir()
    (folder / "series" / "0002-b.patch").write_text(HEADER.replace("capitals", "b") + DIFF)
    (folder / "series" / "0001-a.patch").write_text(HEADER.replace("capitals", "a") + DIFF)
    return tmp_path


def test_arms_are_files_or_folders(data: Path) -> None:
    assert patches.arm_names("toys", "debian:6.12", data=data) == (
        "capitals",
        "rfc-v1.2",
        "series",
    )
    assert patches.load_arm("toys", "debian:6.12", "rfc-v1.2", data=data).name == "rfc-v1.2"
    series = patches.load_arm("toys", "debian:6.12", "series", data=data)
    assert [patch.title for patch in series.patches] == ["it counts in a", "it counts in b"]


def test_a_twin_is_the_arm_itself(data: Path) -> None:
    arm = patches.load_arm("toys", "debian:6.12", "capitals", data=data)
    assert patches.load_arm("toys", "debian:6.12", "capitals.aa", data=data) == arm


@pytest.mark.parametrize(
    ("experiment", "spec", "arm", "known"),
    [
        ("toys", "debian:6.12", "capital", "capitals, rfc-v1.2, series"),
        ("toy", "debian:6.12", "capitals", "toys"),
        ("toys", "debian:6.1", "capitals", "debian-6.12"),
        ("empty", "debian:6.12", "capitals", "debian-6.1"),
    ],
)
def test_what_does_not_exist_lists_what_does(
    data: Path, experiment: str, spec: str, arm: str, known: str
) -> None:
    (data / "patches" / "empty" / "debian-6.1").mkdir(parents=True)
    with pytest.raises(UserError) as caught:
        patches.load_arm(experiment, spec, arm, data=data)
    assert known in caught.value.remedy


def test_patches_of_one_arm_must_agree_on_the_module(data: Path) -> None:
    path = data / "patches" / "toys" / "debian-6.12" / "series" / "0002-b.patch"
    path.write_text(path.read_text().replace("Module: toy", "Module: other"))
    with pytest.raises(UserError, match="do not agree"):
        patches.load_arm("toys", "debian:6.12", "series", data=data)


EXPECTED_ARMS = {
    "vsock-direct-enqueue": {"queued", "rfc-v1", "direct"},
    "virtio-net-napi-tx": {"stock", "rfc", "merged"},
    "vhost-net-rx-poll": {"always-polling", "shipped", "2014"},
    "vsock-skb-merge": {"no-merge", "merge"},
}
SHIPPED = {"direct", "stock", "shipped", "no-merge"}


@pytest.mark.parametrize("experiment", sorted(EXPECTED_ARMS))
def test_the_collections_arms_are_whole(experiment: str) -> None:
    names = patches.arm_names(experiment, "debian:6.12", data=settings().data)
    assert set(names) >= EXPECTED_ARMS[experiment]
    arms = [patches.load_arm(experiment, "debian:6.12", name) for name in names]
    assert {arm.name for arm in arms if arm.shipped} & EXPECTED_ARMS[experiment] <= SHIPPED
    for arm in arms:
        module = source.find_module(arm.module)
        for patch in arm.patches:
            assert set(patch.files) <= set(module.files)
            if not arm.shipped:
                assert patch.message_id
    digests = [arm.digest for arm in arms]
    assert len(set(digests)) == len(digests)


def test_an_unknown_module_lists_the_known_ones() -> None:
    with pytest.raises(UserError) as caught:
        source.find_module("e1000")
    assert "vmw_vsock_virtio_transport" in caught.value.remedy


# --- kbuild --------------------------------------------------------------------------------


def test_a_module_of_one_source_of_its_name_does_not_list_itself() -> None:
    assert source.MODULES["virtio_net"].kbuild == "obj-m := virtio_net.o\n"
    assert source.MODULES["vhost_net"].kbuild == "obj-m := vhost_net.o\nvhost_net-y := net.o\n"


# --- module files --------------------------------------------------------------------------


def elf_file(sections: dict[str, tuple[int, bytes]]) -> bytes:
    """A minimal ELF-64 file: header, contents, section table."""
    names = b"\0" + b"".join(f"{name}\0".encode() for name in (*sections, ".shstrtab"))
    table = [(0, 0, 0, b"")]
    table += [
        (names.index(f"{name}\0".encode()), 1, flags, data)
        for name, (flags, data) in sections.items()
    ]
    table.append((names.index(b".shstrtab\0"), 3, 0, names))
    body, headers = b"", b""
    for name_at, kind, flags, data in table:
        headers += struct.pack(
            "<IIQQQQIIQQ", name_at, kind, flags, 0, 64 + len(body), len(data), 0, 0, 1, 0
        )
        body += data
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        *(b"\x7fELF\x02\x01\x01", 1, 62, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64),
        *(len(table), len(table) - 1),
    )
    return header + body + headers


NOTE_OTHER = struct.pack("<III", 6, 3, 0x100) + b"Linux\0\0\0" + b"\1\2\3\0"
NOTE_ID = struct.pack("<III", 4, 20, 3) + b"GNU\0" + bytes(range(20))


def test_build_id_and_modinfo_are_read() -> None:
    file = elf.ModuleFile.parse(
        elf_file(
            {
                ".note.gnu.build-id": (2, NOTE_OTHER + NOTE_ID),
                ".modinfo": (2, b"license=GPL\0vermagic=6.12.1 SMP \0\0parm=a=b\0"),
                ".text": (6, b"\xc3"),
            }
        ),
        "toy.ko",
    )
    assert file.build_id == bytes(range(20)).hex()
    assert file.modinfo == {"license": "GPL", "vermagic": "6.12.1 SMP ", "parm": "a=b"}


def test_the_codes_digest_ignores_all_but_code() -> None:
    def digest(text: bytes, data: bytes) -> str:
        content = {".text": (6, text), ".data": (3, data), ".init.text": (6, b"\x90")}
        return elf.ModuleFile.parse(elf_file(content), "toy.ko").text_sha256

    assert digest(b"\xc3", b"a") == digest(b"\xc3", b"b")
    assert digest(b"\xc3", b"a") != digest(b"\xcc", b"a")


def test_a_file_without_a_build_id_has_an_empty_one() -> None:
    file = elf.ModuleFile.parse(elf_file({".note.gnu.build-id": (2, NOTE_OTHER)}), "toy.ko")
    assert file.build_id == ""
    assert elf.ModuleFile.parse(elf_file({}), "toy.ko").build_id == ""


@pytest.mark.parametrize("keep", [0, 3, 63, 70, -1])
def test_a_cut_or_foreign_file_is_no_module(keep: int) -> None:
    whole = elf_file({".text": (6, b"\xc3" * 100)})
    with pytest.raises(InfrastructureError, match=r"toy\.ko is not a whole ELF file"):
        elf.ModuleFile.parse(whole[:keep], "toy.ko")
    with pytest.raises(InfrastructureError):
        elf.ModuleFile.parse(b"#!/bin/sh\n" * 20, "toy.ko")
