"""Patch series as people have them: mails, files, folders, git ranges, message-ids.

What comes out is exactly one version of one series, whole and in order, or an error that says
what is wrong with it: a series in an older version, or one that lacks a patch, would be measured
under a name that is not its own (mricon/b4#58).
"""

from __future__ import annotations

import email
import email.policy
import gzip
import hashlib
import mailbox
import re
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from email.message import EmailMessage
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal

from vringlab.errors import TransientError, UserError
from vringlab.kernels import diffs
from vringlab.kernels.base import BaseKernel
from vringlab.kernels.diffs import FileDiff
from vringlab.kernels.patches import VersionRange
from vringlab.transport import local

Kind = Literal["mails", "patch", "folder", "git range", "message-id"]

_MESSAGE_ID = re.compile(r"^<?([^\s/<>@]+@[^\s/<>@]+)>?$")
_ARCHIVE_URL = re.compile(
    r"^https?://\S+?/([^\s/@]+@[^\s/]+?)/?(?:t\.mbox\.gz|raw|T/?|t/?)?(?:#.*)?$"
)
_RANGE = re.compile(r"^\S+\.\.\S+$")
_TAGS = re.compile(r"^\s*((?:\[[^\]]*\]\s*)+)(.*)$", re.DOTALL)
_BASE_COMMIT = re.compile(r"^base-commit: ([0-9a-f]{12,40})\b", re.MULTILINE)
_COMMIT = re.compile(r"^([0-9a-f]{40}) Mon Sep 17 00:00:00 2001$")
_FETCH_S = 120.0
_GIT_S = 120.0
_SUFFIXES = (".patch", ".diff", ".eml", ".mbox")
_RAW = "take the raw mails: the archive's mbox of the thread, or `git format-patch`"


@dataclass(frozen=True)
class MailPatch:
    """One patch.

    Attributes:
        subject: Its title, without what stands in brackets.
        author: Name and address.
        date: Day it was written, ISO 8601; empty when not stated.
        message_id: Of its mail, without angle brackets; empty for a patch that was not mailed.
        commit: Its commit, of a git range; empty otherwise.
        number: Its place in the series, from 1.
        files: What it does to each file.
    """

    subject: str
    author: str
    date: str
    message_id: str
    commit: str
    number: int
    files: tuple[FileDiff, ...] = field(repr=False)

    @property
    def diff(self) -> str:
        """The whole diff."""
        return "".join(item.text for item in self.files)


@dataclass(frozen=True)
class Series:
    """A whole series in one version.

    Attributes:
        source: What was asked for.
        kind: What that was.
        title: Subject of its cover letter, or of its only or first patch.
        message_id: Message-id that names it: the one asked for, else the cover letter's, else the
            first patch's; empty for patches that were not mailed.
        version: Version of the series, from 1.
        total: Number of patches that it states, all of which are here.
        patches: The patches in order.
        base_commit: Commit that its author made it on; empty when not stated.
        notes: What a reader should know, one sentence each.
        serves: Base kernels that it says to be written for (a `Serves:` line); any when None.
        ports: It and its ports to other base kernels, where there are several.
    """

    source: str
    kind: Kind
    title: str
    message_id: str
    version: int
    total: int
    patches: tuple[MailPatch, ...]
    base_commit: str = ""
    notes: tuple[str, ...] = ()
    serves: VersionRange | None = None
    ports: tuple[Series, ...] = field(default=(), repr=False)

    def port_for(self, kernel: BaseKernel) -> Series:
        """The port to a base kernel; the series itself where it says nothing of what it serves.

        Raises:
            UserError: none serves that version.
        """
        ports = self.ports or (self,)
        for port in ports:
            if port.serves is None or kernel.number in port.serves:
                note = f"of {len(ports)} ports, that for {port.serves}"
                return port if len(ports) == 1 else replace(port, notes=(*port.notes, note))
        served = ", or ".join(str(port.serves) for port in ports)
        raise UserError(
            f"{self.source} has no port to linux {kernel.version}; it serves {served}",
            remedy="name a base that it serves (--base), or see whether it fits this one too and "
            "widen its `Serves:` line",
        )

    @property
    def date(self) -> str:
        """Day of its last patch; empty when not stated."""
        return max((patch.date for patch in self.patches), default="")

    @property
    def digest(self) -> str:
        """Digest of all its diffs in hex."""
        return hashlib.sha256("".join(p.diff for p in self.patches).encode()).hexdigest()

    @property
    def files(self) -> tuple[str, ...]:
        """Files that it changes, each once."""
        names = (item.path for patch in self.patches for item in patch.files)
        return tuple(dict.fromkeys(names))

    def as_record(self) -> dict[str, Any]:
        """For provenance."""
        return {
            "source": self.source,
            "kind": self.kind,
            "title": self.title,
            "message_id": self.message_id,
            "version": self.version,
            "patches": self.total,
            "sha256": self.digest,
            "base_commit": self.base_commit,
            "subjects": [patch.subject for patch in self.patches],
            "message_ids": [patch.message_id for patch in self.patches],
            "commits": [patch.commit for patch in self.patches if patch.commit],
            "notes": list(self.notes),
            "serves": str(self.serves or ""),
        }


@dataclass(frozen=True)
class _Mail:
    """A mail, or a file that is read like one."""

    subject: str
    tagged: bool
    reply: bool
    version: int
    number: int | None
    total: int | None
    author: str
    date: str
    message_id: str
    commit: str
    text: str
    diff: str
    where: str
    serves: VersionRange | None


def read_series(source: str, *, tree: Path | None = None) -> Series:
    """The series that a user names.

    Args:
        source: A file (mbox, mail, patch; also compressed by gzip), a folder of them, a range
            `A..B` of `tree`, a message-id, or the address of a mail in a public-inbox archive. In
            a folder, patches with different `Serves:` lines are ports to different base kernels.
        tree: Git tree of a range.

    Raises:
        UserError: no such thing, no patch in it, or it is not one whole series of one version.
        InfrastructureError: git or b4 is missing.
        TransientError: the mail archive cannot be reached.
    """
    path = Path(source)
    if not path.exists() and (tree is not None or _RANGE.match(source)):
        return _from_range(source, tree)
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        mails = list(_mails(_content(path), path.name))
        kind: Kind = "mails" if any(mail.message_id for mail in mails) else "patch"
        return assemble(mails, source=source, kind=kind)
    if match := _MESSAGE_ID.match(source) or _ARCHIVE_URL.match(source):
        return _from_archive(match.group(1), source)
    raise UserError(
        f"no patch {source!r}",
        remedy="name a file (an mbox, also .gz, or a patch), a folder of `git format-patch`, a "
        "message-id, or a range A..B with --tree FOLDER",
    )


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            return gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(
                f"{path} is damaged: {error}", remedy="fetch or compress it again"
            ) from None
    return data


def _from_folder(folder: Path) -> Series:
    files = sorted(
        item
        for item in folder.iterdir()
        if item.is_file() and item.name.removesuffix(".gz").endswith(_SUFFIXES)
    )
    if not files:
        raise UserError(
            f"{folder} holds no patch",
            remedy=f"a series is a folder of files that end in {', '.join(_SUFFIXES)}",
        )
    mails = [mail for path in files for mail in _mails(_content(path), path.name)]
    ranges = tuple(dict.fromkeys(mail.serves for mail in mails if mail.diff)) or (None,)
    if len(ranges) > 1 and None in ranges:
        silent = next(mail.where for mail in mails if mail.diff and mail.serves is None)
        raise UserError(
            f"patches in {folder} say which base kernels they serve, but {silent} does not",
            remedy="write a line such as `Serves: 6.12 <= version < 6.13` into its header",
        )
    ports = tuple(
        assemble(
            [mail for mail in mails if mail.serves == one or not mail.diff],
            source=str(folder),
            kind="folder",
        )
        for one in ranges
    )
    return replace(ports[0], ports=ports) if len(ports) > 1 else ports[0]


def _from_range(source: str, tree: Path | None) -> Series:
    if tree is None:
        raise UserError(
            f"{source!r} looks like a range of commits, of which tree?",
            remedy="say --tree FOLDER, the git tree that has these commits",
        )
    if not _RANGE.match(source):
        raise UserError(
            f"{source!r} is not a range of commits of {tree}", remedy="write it as A..B"
        )

    def git(*arguments: str) -> str:
        done = local.run(
            ["git", "-C", str(tree), *arguments],
            timeout=_GIT_S,
            check=False,
            env={"LC_ALL": "C"},
            remedy_missing="run `make setup`, or install it: apt install git",
        )
        if done.returncode != 0:
            raise UserError(
                f"git cannot read {source} in {tree}",
                remedy="name a git tree, and commits that it has",
                host="local",
                stderr=done.stderr,
                returncode=done.returncode,
            )
        return done.stdout

    if merges := git("rev-list", "--merges", source, "--").split():
        raise UserError(
            f"{source} holds {len(merges)} merge commits, which no patch can carry",
            remedy="name a range without merges, or rebase it first",
        )
    text = git("format-patch", "--stdout", "--no-signature", "--no-renames", source, "--")
    if not text.strip():
        raise UserError(f"{source} holds no commit", remedy="A..B are the commits of B not in A")
    found = assemble(list(_mails(text.encode(), source)), source=source, kind="git range")
    base = git("rev-parse", source.split("..")[0] or "HEAD").strip()
    return Series(**{**vars(found), "base_commit": base})


def _b4() -> str:
    """b4 of the PATH, else the one beside our Python, whose environment need not be activated."""
    beside = Path(sys.executable).with_name("b4")
    return str(beside) if shutil.which("b4") is None and beside.is_file() else "b4"


def _from_archive(message_id: str, source: str) -> Series:
    missing = (
        "install it (pip install b4), or save the thread's mbox from the archive and name the file"
    )
    with tempfile.TemporaryDirectory(prefix="vringlab-b4-") as folder:
        done = local.run(
            [_b4(), "mbox", "-o", folder, "-n", "thread", message_id],
            timeout=_FETCH_S,
            check=False,
            remedy_missing=missing,
            remedy="the archive may be slow; save the thread's mbox and name the file",
        )
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        if done.returncode != 0 or not files:
            raise TransientError(
                f"b4 could not fetch {message_id}",
                remedy="check the network and the message-id; or save the thread's mbox from the "
                "archive where there is one, and name the file instead",
                command=["b4", "mbox", message_id],
                host="local",
                stderr=done.stderr or done.stdout,
                returncode=done.returncode,
            )
        mails = [mail for path in files for mail in _mails(_content(path), message_id)]
    return assemble(mails, source=source, kind="message-id", wanted=message_id)


def _mails(data: bytes, where: str) -> Iterator[_Mail]:
    """The mails in a file; one that is not a mail at all is read as a bare diff."""
    if not data.strip():
        raise UserError(f"{where} is empty", remedy=_RAW)
    if data.startswith(b"From "):
        with tempfile.TemporaryDirectory(prefix="vringlab-mbox-") as folder:
            path = Path(folder) / "mbox"
            path.write_bytes(data)
            box = mailbox.mbox(path, create=False)
            try:
                for number, key in enumerate(box.keys(), start=1):
                    first, _, rest = box.get_bytes(key, from_=True).partition(b"\n")
                    named = f"{where} (mail {number})" if len(box) > 1 else where
                    yield _mail(rest, named, first.decode("ascii", "replace").removeprefix("From "))
            finally:
                box.close()
        return
    yield _mail(data, where, "")


def _mail(data: bytes, where: str, envelope: str) -> _Mail:
    message = email.message_from_bytes(data, policy=email.policy.default)
    assert isinstance(message, EmailMessage), "the policy makes them"
    subject = " ".join(str(message.get("Subject", "")).split())
    stated = " ".join(str(message.get("Serves", "")).split())
    serves = VersionRange.parse(stated, where) if stated else None
    if not subject and not message.get("From"):
        # No mail: a diff as `git diff` prints it, with or without prose above.
        text = data.decode("utf-8", "replace")
        # The header of a patch file of this collection reads like a mail's.
        title = " ".join(str(message.get("Title", "")).split())
        origin = str(message.get("From-Message-Id", "")).strip().strip("<>")
        return _Mail(
            *(title, False, False, 1, None, None, "", "", origin, ""),
            text=text,
            diff=diffs.body(text.replace("\r\n", "\n")),
            where=where,
            serves=serves,
        )
    reply = bool(re.match(r"(?:re|aw|sv)\s*:", subject, re.IGNORECASE))
    tags, title = "", subject
    if match := _TAGS.match(subject):
        tags, title = match.group(1), match.group(2)
    version = re.search(r"\bv(\d+)\b", tags, re.IGNORECASE)
    place = re.search(r"\b(\d+)\s*/\s*(\d+)\b", tags)
    text = _text(message)
    commit = _COMMIT.match(envelope.strip())
    return _Mail(
        subject=title.strip(),
        tagged=bool(re.search(r"\b(?:PATCH|RFC)\b", tags, re.IGNORECASE)),
        reply=reply,
        version=int(version.group(1)) if version else 1,
        number=int(place.group(1)) if place else None,
        total=int(place.group(2)) if place else None,
        author=str(message.get("From", "")),
        date=_date(message),
        message_id=str(message.get("Message-ID", "")).strip().strip("<>"),
        commit=commit.group(1) if commit and not message.get("Message-ID") else "",
        text=text,
        diff="" if reply else diffs.body(text),
        where=where,
        serves=serves,
    )


def _text(message: EmailMessage) -> str:
    parts = []
    for part in message.walk():
        if part.get_content_maintype() != "text" or part.get_content_subtype() == "html":
            continue
        try:
            content = part.get_content()
        except (LookupError, UnicodeError):
            raw = part.get_payload(decode=True)
            content = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else ""
        parts.append(str(content))
    return "\n".join(parts).replace("\r\n", "\n")


def _date(message: EmailMessage) -> str:
    try:
        return parsedate_to_datetime(str(message["Date"])).date().isoformat()
    except (TypeError, ValueError):
        return ""


def assemble(
    mails: Sequence[_Mail], *, source: str, kind: Kind, wanted: str | None = None
) -> Series:
    """One whole series out of the mails of a thread or folder.

    Args:
        mails: The mails, in order; replies and other versions among them.
        source: What was asked for.
        kind: What that was.
        wanted: Message-id that must be among them; its version is taken then.

    Raises:
        UserError: see `read_series`.
    """
    notes: list[str] = []
    seen: set[str] = set()
    kept = []
    for mail in mails:
        # The same mail comes once for each list it was sent to.
        if mail.message_id and mail.message_id in seen:
            continue
        seen.add(mail.message_id)
        if not mail.reply and (mail.diff or mail.tagged):
            kept.append(mail)
    if wanted is not None:
        chosen = [mail for mail in kept if mail.message_id == wanted]
        if not chosen:
            known = ", ".join(mail.message_id for mail in kept if mail.message_id) or "none"
            raise UserError(
                f"the thread of {wanted} has no patch with that message-id",
                remedy=f"patches in it: {known}",
            )
        others = sorted({mail.version for mail in kept} - {chosen[0].version})
        if others:
            notes.append(
                f"the thread also holds {_versions(others)}; {_versions([chosen[0].version])} "
                "was asked for"
            )
        kept = [mail for mail in kept if mail.version == chosen[0].version]
    if not kept:
        raise UserError(
            f"{source} holds no patch"
            + (", only replies" if any(mail.reply for mail in mails) else ""),
            remedy=_RAW,
        )
    versions = sorted({mail.version for mail in kept})
    if len(versions) > 1:
        raise UserError(
            f"{source} mixes versions of a series: {_versions(versions)}",
            remedy="keep the mails of one version, or name its message-id",
        )
    patches = _in_order([mail for mail in kept if mail.number != 0], kept, source)
    cover = next((mail for mail in kept if mail.number == 0), None)
    first = kept[0] if cover is None else cover
    built = tuple(_patch(mail, number) for number, mail in enumerate(patches, start=1))
    base = _BASE_COMMIT.search("\n".join(mail.text for mail in kept))
    return Series(
        source=source,
        kind=kind,
        title=first.subject or Path(source).name,
        message_id=wanted or first.message_id,
        version=versions[0],
        total=len(built),
        patches=built,
        base_commit=base.group(1) if base else "",
        notes=tuple(notes),
        serves=next((mail.serves for mail in patches if mail.serves), None),
    )


def _versions(numbers: Sequence[int]) -> str:
    return ", ".join(f"v{number}" for number in numbers)


def _in_order(patches: list[_Mail], kept: Sequence[_Mail], source: str) -> list[_Mail]:
    """The patches by number, checked against the count that they state."""
    if not patches:
        total = kept[0].total or 0
        raise UserError(
            f"{source} holds only the cover letter of a series of {total} patches",
            remedy="name the thread's mbox, or a folder with all patches",
        )
    for mail in patches:
        if not mail.diff:
            raise UserError(
                f"{mail.where} has no diff in it",
                remedy=f"a web page or a quoted mail will not do: {_RAW}",
            )
    numbered = [mail for mail in patches if mail.number is not None]
    if not numbered:
        return patches
    if len(numbered) < len(patches):
        stray = next(mail for mail in patches if mail.number is None)
        raise UserError(
            f"{source} holds a numbered series and {stray.where}, which is not of it",
            remedy="keep one series in the file or folder",
        )
    totals = sorted({mail.total for mail in numbered if mail.total is not None})
    if len(totals) > 1:
        raise UserError(
            f"{source} mixes series of {' and '.join(map(str, totals))} patches",
            remedy="keep one series in the file or folder",
        )
    counts = Counter(mail.number for mail in numbered)
    twice = sorted(number for number, count in counts.items() if count > 1 and number is not None)
    if twice:
        raise UserError(
            f"{source} has patch {twice[0]}/{totals[0]} {counts[twice[0]]} times",
            remedy="keep one of each; were some sent again without a new version?",
        )
    missing = sorted(set(range(1, totals[0] + 1)) - set(counts))
    if missing:
        raise UserError(
            f"{source} has a gap: of {totals[0]} patches, "
            f"{', '.join(f'{number}/{totals[0]}' for number in missing)} "
            + ("is missing" if len(missing) == 1 else "are missing"),
            remedy="name the whole series; a stack with a hole is another patch",
        )
    return sorted(numbered, key=lambda mail: mail.number or 0)


def _patch(mail: _Mail, number: int) -> MailPatch:
    files = diffs.split(mail.diff, mail.where)
    binary = [item.path for item in files if item.binary]
    if binary:
        raise UserError(
            f"{mail.where} changes a binary file: {', '.join(binary)}",
            remedy="leave the binary part out: no module is built from one",
        )
    if not any(item.hunks for item in files):
        raise UserError(
            f"{mail.where} changes no line",
            remedy="renames and modes alone change no module; name a patch that changes code",
        )
    return MailPatch(
        subject=mail.subject or mail.where,
        author=mail.author,
        date=mail.date,
        message_id=mail.message_id,
        commit=mail.commit,
        number=number,
        files=files,
    )
