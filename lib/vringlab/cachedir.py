"""Folders named by their content: built once, complete or absent, shared by all processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from vringlab.errors import InfrastructureError

#: Receives one line for each step that takes time.
OnStep = Callable[[str], None]

T = TypeVar("T")

_TEMPORARY = ".building-"
_FAILED = ".failed-"

# The disk's or the folder's fault; any other error of the system is a mistake of ours.
_DISK_ERRORS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.EIO,
    }
)


def there(folder: Path) -> Path | None:
    """The folder itself where it is: what loads an entry that is whole once it is there."""
    return folder if folder.is_dir() else None


def require_space(folder: Path, gigabytes: float) -> None:
    """Check that the disk under `folder` has room before work is begun.

    Raises:
        InfrastructureError: it has less than `gigabytes` (10^9 bytes) free.
    """
    free = shutil.disk_usage(folder).free / 1e9
    if free < gigabytes:
        raise InfrastructureError(
            f"not enough disk space in {folder}: {free:.1f} GB free, {gigabytes:g} GB needed",
            remedy="free some space, or point VRINGLAB_CACHE to a larger disk",
            host="local",
        )


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise InfrastructureError(
            f"the cache folder {folder} cannot be used: {error}",
            remedy="free some space or make the folder yours, or point VRINGLAB_CACHE elsewhere",
            host="local",
        ) from error


@dataclass(frozen=True)
class Store:
    """A folder of entries, each named by a key that stands for all its inputs.

    An entry appears by a rename, so it is whole when it is there. A killed builder leaves a
    folder under a temporary name; whoever builds next removes it, since the lock that goes
    with it is the kernel's and died with its holder.
    """

    folder: Path

    def entry(self, key: str) -> Path:
        """Where the entry of that key is, once it is there."""
        return self.folder / key

    def failed(self, key: str) -> Path:
        """Where the last failed attempt at that key is kept, for its log."""
        return self.folder / f"{_FAILED}{key}"

    def ensure(
        self,
        key: str,
        load: Callable[[Path], T | None],
        build: Callable[[Path], None],
        *,
        on_step: OnStep,
        space_gb: float = 0.0,
        keep_failed: bool = False,
    ) -> T:
        """The entry of a key: loaded where it is, built where it is not. No two build it at once.

        Args:
            key: Stands for all that the entry is made of.
            load: Reads it from its folder; None when it is not there, or not whole.
            build: Makes it in an empty folder.
            on_step: Told when another process is waited for.
            space_gb: Room that the disk must have before it is built, GB.
            keep_failed: Keep the folder of a build that fails, as `failed(key)`.

        Raises:
            InfrastructureError: the disk is full, or it is not there although it was built.
            Exception: what `build` raises.
        """
        found = load(self.entry(key))
        if found is not None:
            return found
        with self._locked(key, on_step):
            found = load(self.entry(key))
            if found is not None:
                return found
            if space_gb:
                require_space(self.folder, space_gb)
            with self._building(key, keep_failed=keep_failed) as folder:
                build(folder)
        found = load(self.entry(key))
        if found is None:
            raise InfrastructureError(
                f"{self.entry(key)} disappeared while it was made",
                remedy="nothing else may clean the cache folder during a run",
                host="local",
            )
        return found

    @contextlib.contextmanager
    def _locked(self, key: str, on_step: OnStep) -> Iterator[None]:
        """Hold the key's lock; waits while another process builds the same entry."""
        with self._lock_file(key) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_step("another process builds the same; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _building(self, key: str, *, keep_failed: bool = False) -> Iterator[Path]:
        """An empty folder that becomes the entry when the block ends well.

        When it does not, it is removed, or kept as `failed(key)`. Hold the key's lock.

        Raises:
            InfrastructureError: the cache folder cannot be written or is full.
        """
        with _disk_errors(self.folder):
            self._sweep(key)
            temporary = self.folder / f"{_TEMPORARY}{key}"
            temporary.mkdir()
            try:
                yield temporary
            except BaseException:
                if keep_failed:
                    self._replace(temporary, self.failed(key))
                else:
                    shutil.rmtree(temporary, ignore_errors=True)
                raise
            self._replace(temporary, self.entry(key))
            shutil.rmtree(self.failed(key), ignore_errors=True)

    @contextlib.contextmanager
    def _lock_file(self, key: str) -> Iterator[IO[bytes]]:
        with contextlib.ExitStack() as stack:
            with _disk_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context((self.folder / f"{key}.lock").open("ab"))
            yield lock

    @staticmethod
    def _replace(source: Path, target: Path) -> None:
        shutil.rmtree(target, ignore_errors=True)
        source.rename(target)

    def _sweep(self, mine: str) -> None:
        """Remove what killed builders left: a temporary folder whose lock nobody holds."""
        for stale in self.folder.glob(f"{_TEMPORARY}*"):
            key = stale.name.removeprefix(_TEMPORARY)
            if key == mine:
                shutil.rmtree(stale)
                continue
            with self._lock_file(key) as lock, contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(stale, ignore_errors=True)
