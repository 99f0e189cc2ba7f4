"""Series of patches: read whole and in one version, or refused with the reason."""

from __future__ import annotations

import gzip
import subprocess
import sys
from email.message import EmailMessage
from pathlib import Path

import pytest

from vringlab.errors import InfrastructureError, TransientError, UserError
from vringlab.kernels import diffs
from vringlab.kernels.base import BaseKernel
from vringlab.kernels.series import read_series

DIFF = """\
diff --git a/drivers/net/virtio_net.c b/drivers/net/virtio_net.c
index 1111111..2222222 100644
--- a/drivers/net/virtio_net.c
+++ b/drivers/net/virtio_net.c
@@ -10,4 +10,5 @@ static int probe(struct virtio_device *vdev)
 \tone();

-\ttwo();
+\tthree();
+\tfour();
 \tfive();
"""
SIGNATURE = "-- \n2.47.1\n"
ENVELOPE = "From mboxrd@z Thu Jan  1 00:00:00 1970\n"


def mail(
    subject: str,
    message_id: str,
    text: str = DIFF + SIGNATURE,
    date: str = "Wed, 22 Jan 2025 14:16:00 +0800",
) -> str:
    return (
        f"{ENVELOPE}From: Some Body <some@body.example>\nDate: {date}\nSubject: {subject}\n"
        f"Message-ID: <{message_id}>\n\nWhy.\n---\n one file changed\n\n{text}\n"
    )


def series(total: int, version: int = 1, prefix: str = "PATCH net-next") -> list[str]:
    tag = f"{prefix} v{version}" if version > 1 else prefix
    cover = mail(f"[{tag} 0/{total}] faster", f"{version}-0@x", "What it is all about.\n")
    return [cover] + [
        mail(
            f"[{tag} {number}/{total}] part {number}",
            f"{version}-{number}@x",
            DIFF.replace("three", f"three_v{version}_{number}") + SIGNATURE,
        )
        for number in range(1, total + 1)
    ]


def write(folder: Path, mails: list[str], name: str = "thread.mbox") -> str:
    path = folder / name
    path.write_text("".join(mails))
    return str(path)


def refused(source: str, tree: Path | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        read_series(source, tree=tree)
    assert caught.value.remedy
    return caught.value


# --- what is read ---------------------------------------------------------------------------


def test_an_mbox_gives_its_series_in_order_with_its_names(tmp_path: Path) -> None:
    mails = series(3, version=2)
    reply = mail("Re: [PATCH net-next v2 2/3] part 2", "r@x", "> " + DIFF.replace("\n", "\n> "))
    found = read_series(write(tmp_path, [mails[0], mails[3], reply, mails[1], mails[2]]))
    assert (found.title, found.version, found.total) == ("faster", 2, 3)
    assert found.message_id == "2-0@x"
    assert [patch.message_id for patch in found.patches] == ["2-1@x", "2-2@x", "2-3@x"]
    assert [patch.subject for patch in found.patches] == ["part 1", "part 2", "part 3"]
    assert found.date == "2025-01-22"
    assert found.files == ("drivers/net/virtio_net.c",)
    record = found.as_record()
    assert record["patches"] == 3
    assert record["message_ids"] == ["2-1@x", "2-2@x", "2-3@x"]
    assert len(record["sha256"]) == 64


def test_the_blank_that_a_mail_program_took_is_put_back(tmp_path: Path) -> None:
    patch = read_series(write(tmp_path, series(1))).patches[0]
    assert "\n \n-\ttwo();" in patch.diff
    assert "2.47.1" not in patch.diff


@pytest.mark.parametrize(
    ("old", "new"),
    [("", ""), ("i/", "w/"), ("linux-6.12.orig/", "linux-6.12/")],
    ids=["noprefix", "mnemonic", "folders"],
)
def test_prefixes_of_any_kind_are_understood(tmp_path: Path, old: str, new: str) -> None:
    text = DIFF.replace("a/drivers", f"{old}drivers").replace("b/drivers", f"{new}drivers")
    (tmp_path / "x.diff").write_text(text)
    found = read_series(str(tmp_path / "x.diff"))
    assert found.files == ("drivers/net/virtio_net.c",)
    assert (
        found.patches[0].diff
        == read_series(write(tmp_path, [mail("[PATCH] x", "x@x")])).patches[0].diff
    )


def kernel(version: str) -> BaseKernel:
    return BaseKernel(f"debian:{version}", version, version, "trixie")


def port(folder: Path, name: str, serves: str, line: str) -> None:
    head = f"Title: port\nServes: {serves}\n\n" if serves else ""
    (folder / name).write_text(head + DIFF.replace("three", line))


def test_of_ports_that_for_the_base_is_taken(tmp_path: Path) -> None:
    port(tmp_path, "0001-old.patch", "6.1 <= version < 6.2", "old")
    port(tmp_path, "0002-new.patch", "6.12 <= version < 7", "new_a")
    port(tmp_path, "0003-new.patch", "6.12 <= version < 7", "new_b")
    found = read_series(str(tmp_path))
    old, new = found.port_for(kernel("6.1.192-3")), found.port_for(kernel("6.12.118-1"))
    assert (old.total, new.total) == (1, 2)
    assert "old" in old.patches[0].diff
    assert "new_b" in new.patches[1].diff
    assert "6.12 <= version < 7" in new.notes[0]
    assert new.as_record()["serves"] == "6.12 <= version < 7"
    with pytest.raises(
        UserError, match=r"no port to linux 7\.3\.4-1; it serves 6\.1 <= "
    ) as caught:
        found.port_for(kernel("7.3.4-1"))
    assert "--base" in caught.value.remedy
    assert "widen" in caught.value.remedy


def test_a_patch_that_says_nothing_of_bases_is_taken_for_any(tmp_path: Path) -> None:
    found = read_series(write(tmp_path, series(2)))
    assert found.port_for(kernel("7.3.4-1")) is found


def test_ports_that_do_not_say_all_what_they_serve_are_refused(tmp_path: Path) -> None:
    port(tmp_path, "0001-old.patch", "6.1 <= version < 6.2", "old")
    port(tmp_path, "0002-new.patch", "", "new")
    assert "0002-new.patch does not" in refused(str(tmp_path)).message
    port(tmp_path, "0002-new.patch", "6.12 and later", "new")
    assert "Serves is '6.12 and later'" in refused(str(tmp_path)).message


def test_a_compressed_mbox_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.mbox.gz"
    path.write_bytes(gzip.compress("".join(series(2)).encode()))
    assert read_series(str(path)).total == 2


def test_a_folder_of_patches_is_a_series(tmp_path: Path) -> None:
    for number, text in enumerate(series(2)):
        (tmp_path / f"{number:04}-x.patch").write_text(text)
    (tmp_path / "notes.txt").write_text("not a patch")
    found = read_series(str(tmp_path))
    assert (found.kind, found.total, found.title) == ("folder", 2, "faster")


def test_plain_diffs_count_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.diff").write_text(DIFF.replace("three", "second"))
    (tmp_path / "a.patch").write_text("Prose.\n\n" + DIFF.replace("three", "first"))
    found = read_series(str(tmp_path))
    assert found.total == 2
    assert "first" in found.patches[0].diff
    assert "second" in found.patches[1].diff
    assert found.message_id == ""


def test_the_same_mail_from_two_lists_is_one(tmp_path: Path) -> None:
    mails = series(2)
    assert read_series(write(tmp_path, [*mails, mails[1]])).total == 2


@pytest.mark.parametrize("encoding", ["base64", "quoted-printable"])
def test_encoded_mails_are_decoded(tmp_path: Path, encoding: str) -> None:
    message = EmailMessage()
    message["From"] = "Jürgen <j@x.example>"
    message["Subject"] = "[PATCH] größer"
    message["Message-ID"] = "<enc@x>"
    message.set_content("Prose with ü.\r\n\r\n" + DIFF.replace("\n", "\r\n"), cte=encoding)
    path = tmp_path / "one.eml"
    path.write_bytes(bytes(message))
    found = read_series(str(path))
    assert found.title == "größer"
    assert "\r" not in found.patches[0].diff
    assert "+\tthree();" in found.patches[0].diff


def test_the_authors_base_is_kept(tmp_path: Path) -> None:
    base = "e13b6da7045f" + "0" * 28
    mails = series(1)
    mails[1] += f"\nbase-commit: {base}\n"
    assert read_series(write(tmp_path, mails)).base_commit == base


# --- a git range ----------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "linux"
    folder.mkdir()

    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-C", folder, "-c", "user.name=x", "-c", "user.email=x@x", *arguments],
            check=True,
            capture_output=True,
        )

    git("init", "-q", "-b", "main")
    for number in range(3):
        (folder / "a.c").write_text(f"int a = {number};\n")
        git("add", "-A")
        git("commit", "-q", "-m", f"a: say {number}")
        git("tag", f"t{number}")
    git("checkout", "-q", "-b", "side", "t0")
    (folder / "b.c").write_text("int b;\n")
    git("add", "-A")
    git("commit", "-q", "-m", "b: new")
    git("merge", "-q", "main", "-m", "merge")
    git("tag", "merged")
    return folder


def test_a_range_of_commits_is_a_series(tree: Path) -> None:
    found = read_series("t0..t2", tree=tree)
    assert (found.kind, found.total) == ("git range", 2)
    assert [patch.subject for patch in found.patches] == ["a: say 1", "a: say 2"]
    assert all(len(patch.commit) == 40 for patch in found.patches)
    assert len(found.base_commit) == 40
    assert found.message_id == ""


def test_ranges_that_cannot_be_patches_are_refused(tree: Path, tmp_path: Path) -> None:
    assert "--tree" in refused("t0..t2").remedy
    assert "holds no commit" in refused("t2..t2", tree).message
    assert "merge" in refused("t0..merged", tree).message
    assert "cannot read" in refused("t0..nothing", tree).message
    assert "cannot read" in refused("a..b", tmp_path).message
    assert "not a range" in refused("t0", tree).message


# --- what is refused ------------------------------------------------------------------------


def test_a_gap_is_named(tmp_path: Path) -> None:
    mails = series(4)
    error = refused(write(tmp_path, [*mails[:2], mails[4]]))
    assert "gap" in error.message
    assert "2/4, 3/4 are missing" in error.message


def test_mixed_versions_are_refused(tmp_path: Path) -> None:
    error = refused(write(tmp_path, [*series(2), *series(2, version=3)]))
    assert "v1, v3" in error.message
    assert "message-id" in error.remedy


def test_mixed_series_are_refused(tmp_path: Path) -> None:
    mails = series(2)
    assert (
        "2 and 3" in refused(write(tmp_path, [*mails, series(3)[3].replace("1-3@", "z@")])).message
    )
    stray = mail("[PATCH] alone", "alone@x")
    assert "not of it" in refused(write(tmp_path, [*mails, stray])).message
    again = mails[1].replace("1-1@x", "again@x")
    assert "1/2 2 times" in refused(write(tmp_path, [*mails, again])).message


def test_a_cover_letter_alone_is_no_series(tmp_path: Path) -> None:
    error = refused(write(tmp_path, series(3)[:1]))
    assert "only the cover letter" in error.message
    assert "3 patches" in error.message


def test_mails_without_a_diff_are_named(tmp_path: Path) -> None:
    mails = series(2)
    mails[2] = mail("[PATCH net-next 2/2] part 2", "1-2@x", "The diff is in the attachment.\n")
    assert "(mail 3) has no diff" in refused(write(tmp_path, mails)).message
    reply = mail("Re: [PATCH] x", "r@x", "> +\tthree();\n")
    assert "only replies" in refused(write(tmp_path, [reply])).message
    assert "holds no patch" in refused(write(tmp_path, ["<html>a page</html>\n"])).message


def test_binary_files_are_refused(tmp_path: Path) -> None:
    binary = (
        "diff --git a/logo.bin b/logo.bin\nnew file mode 100644\nindex 0..1\n"
        "GIT binary patch\nliteral 4\nLc$|zz00000\n\n"
    )
    error = refused(write(tmp_path, [mail("[PATCH] logo", "b@x", binary)]))
    assert "binary file: logo.bin" in error.message
    assert (
        "binary"
        in refused(
            write(tmp_path, ["diff --git a/x.o b/x.o\nBinary files a/x.o and b/x.o differ\n"])
        ).message
    )


def test_a_diff_that_changes_no_line_is_refused(tmp_path: Path) -> None:
    moved = "diff --git a/x.c b/y.c\nsimilarity index 100%\nrename from x.c\nrename to y.c\n"
    assert (
        "changes no line" in refused(write(tmp_path, [mail("[PATCH] move", "m@x", moved)])).message
    )


def test_a_patch_broken_on_its_way_is_refused(tmp_path: Path) -> None:
    broken = DIFF.replace("+\tthree();\n+\tfour();\n", "+\tthree\n();\n+\tfour();\n")
    error = refused(write(tmp_path, [mail("[PATCH] x", "x@x", broken)]))
    assert "damaged" in error.message
    assert "ends early" in error.message
    assert "mail program" in error.remedy
    cut = DIFF.rpartition("+\tfour")[0]
    assert "ends early" in refused(write(tmp_path, [mail("[PATCH] x", "x@x", cut)])).message


def test_what_is_not_there_or_empty_is_refused(tmp_path: Path) -> None:
    assert "no patch" in refused(str(tmp_path / "none.patch")).message
    (tmp_path / "empty.patch").write_text("\n")
    assert "empty" in refused(str(tmp_path / "empty.patch")).message
    (tmp_path / "folder").mkdir()
    assert "holds no patch" in refused(str(tmp_path / "folder")).message
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 5000)[:30])
    assert "damaged" in refused(str(tmp_path / "cut.gz")).message


# --- a message-id ---------------------------------------------------------------------------


def fake_b4(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder / "bin" / "b4"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")


def test_a_message_id_takes_its_own_version_of_the_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest version is what b4 would choose; asked for is what is named (mricon/b4#58)."""
    thread = write(tmp_path, [*series(2), *series(3, version=2)])
    fake_b4(
        tmp_path,
        f'[ "$1" = mbox ] && [ "$2" = -o ] && [ "$6" = 1-2@x ] && cp {thread} "$3/thread.mbx"',
        monkeypatch,
    )
    for source in ("1-2@x", "<1-2@x>", "https://lore.example/netdev/1-2@x/"):
        found = read_series(source)
        assert (found.version, found.total, found.message_id) == (1, 2, "1-2@x")
        assert "v2" in found.notes[0]
        assert "v1 was asked for" in found.notes[0]


def test_a_thread_without_the_message_id_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = write(tmp_path, series(2))
    fake_b4(tmp_path, f'cp {thread} "$3/thread.mbx"', monkeypatch)
    error = refused("other@x")
    assert "no patch with that message-id" in error.message
    assert "1-1@x" in error.remedy


def test_offline_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_b4(tmp_path, "echo 'Failed to resolve archive' >&2; exit 1", monkeypatch)
    with pytest.raises(TransientError, match="b4 could not fetch") as caught:
        read_series("1-2@x")
    assert "Failed to resolve" in caught.value.stderr
    assert "network" in caught.value.remedy
    assert "mbox" in caught.value.remedy


def test_b4_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python3"))
    with pytest.raises(InfrastructureError, match="b4") as caught:
        read_series("1-2@x")
    assert "pip install b4" in caught.value.remedy


def test_b4_of_an_environment_that_is_not_activated_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = write(tmp_path, series(2))
    fake_b4(tmp_path, f'/bin/cp {thread} "$3/thread.mbx"', monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python3"))
    assert read_series("1-2@x").total == 2


# --- functions ------------------------------------------------------------------------------

SOURCE = """\
#define MACRO(x) (x)
static const struct ops o = {
\t.run = run,
};

static int inner(int a);

static inline int helper(int a,
\t\t\t int b)
{
\treturn a + b;
}

/* A comment
 * with int words(here).
 */
struct sk_buff *
made(int a)
{
\tif (a)
\t\treturn NULL;
\treturn helper(a, 1) ? NULL : NULL;
}

static netdev_tx_t start_xmit(struct sk_buff *skb, struct net_device *dev)
\t__must_hold(x)
{
\tmade(1);
\treturn inner(2);
}
module_init(start);
"""


def test_functions_are_found_by_the_kernels_style() -> None:
    found = diffs.functions(SOURCE)
    assert [name for name, _, _ in found] == ["helper", "made", "start_xmit"]
    lines = SOURCE.splitlines()
    for _, first, last in found:
        assert "(" in lines[first - 1]
        assert lines[last - 1] == "}"


def test_changed_functions_are_those_around_the_changed_lines() -> None:
    hunk = diffs.HunkLines(10, 10, "above", ("-\treturn a;", "+\treturn a + b;"))
    assert diffs.changed_functions(SOURCE, (hunk,)) == ["helper"]
    # A line that only went away counts at the place where it was.
    number = SOURCE.splitlines().index("\tmade(1);") + 1
    gone = diffs.HunkLines(number, number, "", ("-\tgone();",))
    assert diffs.changed_functions(SOURCE, (gone,)) == ["start_xmit"]
    outside = diffs.HunkLines(1, 1, "", ("+#define MACRO(x) (x)",))
    assert diffs.changed_functions(SOURCE, (outside,)) == []


def test_callers_are_found() -> None:
    assert diffs.callers(SOURCE, "helper") == ["made"]
    assert diffs.callers(SOURCE, "made") == ["start_xmit"]
    assert diffs.callers(SOURCE, "nothing") == []
