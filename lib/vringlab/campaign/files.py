"""Files that are there whole or not at all, also after a kill, a crash or a full disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from vringlab.errors import InfrastructureError, UserError

#: Prefix of everything that is being written; whoever holds the folder's lock may remove it.
UNFINISHED = ".new-"

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn failures to write below `path` into errors with a remedy.

    Raises:
        InfrastructureError: the disk is full, or the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise InfrastructureError(
                f"no space left to write {path}",
                remedy=f"free space on the disk of {path.parent}; nothing half-written was left",
            ) from error
        raise InfrastructureError(
            f"cannot write {path}: {error.strerror or error}",
            remedy="check that the folder exists, is writable and on a healthy disk",
        ) from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a rename survives a power cut only after this."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A stream whose content takes the place of `path` when the block ends without an error.

    Raises:
        InfrastructureError: the disk is full, or the folder cannot be written.
    """
    temporary = path.with_name(f"{UNFINISHED}{path.name}")
    with writing(path):
        try:
            with temporary.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def replace_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON document in place of `path`.

    Raises:
        InfrastructureError: the disk is full, or the folder cannot be written.
    """
    text = json.dumps(document, indent=1, default=str) + "\n"
    with replacing(path) as stream:
        stream.write(text.encode())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: the file is missing, cannot be read, or holds no complete JSON object.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}", remedy="check that this is a run folder"
        ) from None
    except ValueError as error:
        raise UserError(
            f"{path} is damaged: {error}", remedy="restore the file from a copy, or measure again"
        ) from None
    if not isinstance(document, dict):
        raise UserError(
            f"{path} is damaged: no JSON object",
            remedy="restore the file from a copy, or measure again",
        )
    return document


def remove_unfinished(folder: Path) -> None:
    """Remove what killed writers left directly in `folder`."""
    for path in folder.glob(f"{UNFINISHED}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A nested mapping with the values of another laid over it."""
    result = dict(old)
    for key, value in new.items():
        before = result.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        result[key] = merged(before, value) if both else value  # type: ignore[arg-type]
    return result
