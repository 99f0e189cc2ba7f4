"""A lab that was booted once and goes on any number of times: restored instead of booted.

An embedded host with a booted, paused guest on it is saved once for all that it was made of (image,
QEMU, command lines, our own code), and goes on from there within seconds. Its memory is a file
that every restored lab maps for itself, copying a page when it writes to it; so nothing is read
before it is needed, and several labs run from one snapshot at once.

All labs restored from one snapshot are one boot: the same kernel addresses, the same pages. They
differ in their clocks, which are set, and their random numbers, which are drawn anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vringlab.cachedir import OnStep, Store, require_space
from vringlab.errors import InfrastructureError, TransientError
from vringlab.image.build import Image
from vringlab.lab import embedded, guest
from vringlab.lab.accel import Accelerator
from vringlab.lab.embedded import HostMachine, Memory
from vringlab.lab.guest import Guest, GuestSpec
from vringlab.settings import settings
from vringlab.transport.ssh import Machine, Process

#: Raise it when what is kept of a lab changes in a way that the digest does not see.
_FORMAT = 1
#: A lab of 4 GiB has touched a tenth of it when it is up.
_SPACE_GB = 1.5
#: Snapshots of one cache; the longest unused goes first.
_KEPT = 8
_QUIET_S = 30.0
_SEED_BYTES = 64
#: Setting a clock takes a quarter of a second under emulation.
_WAKE_S = 30.0
#: A lab's memory is compared in parts of this size.
_PART = 64 << 10
_ZEROES = bytes(_PART)
#: With less than this the disk counts as full.
_FULL_GB = 0.05

#: What decides how a lab comes up, besides what its command lines say.
_SOURCES = ("embedded", "guest", "pinning", "snapshot", "testpmd", "vhost_nic")


class Unusable(InfrastructureError):  # noqa: N818 - the words that its reader sees
    """A snapshot that cannot be restored; it was removed, and a lab has to be booted."""


@dataclass(frozen=True)
class Snapshot:
    """A saved lab.

    Attributes:
        folder: Its folder.
        digest: What names it: all that the lab was made of.
        edition: Which of several boots of the same lab it is, from 1.
        boot_id: What the guest's kernel calls its boot.
        made: When, in ISO 8601.
        left: See `guest.leave`.
    """

    folder: Path
    digest: str
    edition: int
    boot_id: str
    made: str
    left: Mapping[str, Any]

    @property
    def memory(self) -> Path:
        """The host's memory."""
        return self.folder / "memory"

    @property
    def state(self) -> Path:
        """The rest of the host."""
        return self.folder / "state"

    def as_record(self) -> dict[str, object]:
        """For provenance."""
        return {"digest": self.digest, "edition": self.edition, "made": self.made}


def digest_of(image: Image, accelerator: Accelerator, spec: GuestSpec) -> str:
    """What names the snapshots of a lab; 16 hex digits.

    Args:
        image: With its kernel, tools and QEMU.
        accelerator: What the host runs on.
        spec: The guest.
    """
    host = embedded.qemu_argv(image, accelerator, 0, Path("console"), 0, Memory(Path("m"), True))
    inside = guest.qemu_argv(
        spec, release=image.release, host_kind=accelerator.host_kind, cid=0, qmp_port=0
    )
    # Under KVM the guest sees this processor; an emulated one is the same everywhere.
    processor = _processor() if accelerator.name == "kvm" else ""
    code = [(Path(__file__).parent / f"{name}.py").read_bytes() for name in _SOURCES]
    # Each build of an image has keys of its own; the digest is that of its recipe alone.
    made = (image.digest, image.host_key)
    state = (_FORMAT, made, host, inside, asdict(spec), processor, code)
    return hashlib.sha256(repr(state).encode()).hexdigest()[:16]


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    return "\n".join(
        line for line in lines if line.startswith(("model name", "flags", "microcode"))
    )


def _store() -> Store:
    return Store(settings().cache / "snapshots")


def _key(digest: str, edition: int) -> str:
    return f"{digest}-{edition}"


def find(digest: str, edition: int = 1) -> Snapshot | None:
    """The snapshot of that name, or None when there is no whole one."""
    return _load(_store().entry(_key(digest, edition)), digest, edition)


def _load(folder: Path, digest: str, edition: int) -> Snapshot | None:
    try:
        kept = json.loads((folder / "lab.json").read_text())
        left = kept["left"]
        found = Snapshot(folder, digest, edition, left["boot_id"], kept["made"], left)
        whole = left.keys() >= guest.LEFT and {"memory", "state"} <= kept.keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if whole and found.memory.is_file() and found.state.is_file() else None


def ensure(
    image: Image,
    accelerator: Accelerator,
    spec: GuestSpec,
    *,
    edition: int = 1,
    on_step: OnStep = lambda _: None,
) -> Snapshot:
    """The snapshot of a lab: the one in the cache, or made now by booting it.

    Args:
        image: The image.
        accelerator: From `accel.choose`.
        spec: The guest.
        edition: Which of several boots of it.
        on_step: Told what takes time.

    Raises:
        TransientError, InfrastructureError: the lab did not come up, could not be saved, or the
            disk is full. Nothing half-written is left.
    """
    digest = digest_of(image, accelerator, spec)
    store = _store()

    def build(folder: Path) -> None:
        _prune(store)
        on_step("saving a lab, to be restored from now on: booting it")
        try:
            _make(image, accelerator, spec, folder, on_step)
        except InfrastructureError:
            # A full disk kills QEMU where it writes to its memory, without a word.
            require_space(store.folder, _FULL_GB)
            raise

    return store.ensure(
        _key(digest, edition),
        lambda folder: _load(folder, digest, edition),
        build,
        on_step=on_step,
        space_gb=_SPACE_GB,
    )


def _make(
    image: Image, accelerator: Accelerator, spec: GuestSpec, folder: Path, on_step: OnStep
) -> None:
    memory = Memory(folder / "memory", shared=True)
    with embedded.embedded_host(image, accelerator, on_step=on_step, memory=memory) as host:
        guest.prepare_host(host)
        with guest.boot_guest(host, spec, on_step=on_step) as running:
            # A processor in guest mode cannot be restored, so the guest is paused by its own QEMU.
            left = guest.leave(running)
        _hang_up(host)
        assert host.monitor is not None, "an embedded host has one"
        host.monitor.execute("stop")
        host.monitor.execute("migrate-set-capabilities", {"capabilities": embedded.IGNORE_SHARED})
        host.monitor.execute("migrate", {"uri": f"file:{folder / 'state'}"})
        embedded.migrated(host.monitor)
        # Ended by itself: what its memory file holds is then written.
        host.monitor.execute("quit")
    kept = {
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "left": left,
        "memory": _checksum(folder / "memory"),
        "state": _checksum(folder / "state"),
    }
    for name in ("memory", "state"):
        (folder / name).chmod(0o400)
    (folder / "lab.json").write_text(json.dumps(kept, indent=1) + "\n")


def _hang_up(host: HostMachine) -> None:
    """Close all connections to the host, and wait until it has noticed.

    One that is open when the host is saved would be so for ever in those that are restored.
    """
    host.machine.run(
        "setsid sh -c 'while pgrep -x sshd-session; do busybox usleep 10000; done; "
        'echo "vringlab: all have hung up" > /dev/console\' > /dev/null 2>&1 < /dev/null &'
    )
    host.machine.close()
    deadline = time.monotonic() + _QUIET_S
    while "all have hung up" not in host.console.read_text(errors="replace"):
        if time.monotonic() > deadline:
            raise TransientError(
                "the host's connections were not closed in time, so it cannot be saved",
                remedy="this machine may be overloaded",
                host="embedded",
            )
        time.sleep(0.02)


def _checksum(path: Path, stop: threading.Event | None = None) -> str:
    """SHA-256 of a file's data, without its holes: a lab's memory is mostly holes."""
    state = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        state.update(str(size).encode())
        place = 0
        while place < size:
            try:
                place = os.lseek(stream.fileno(), place, os.SEEK_DATA)
            except OSError:
                break
            if stop is not None and stop.is_set():
                return ""
            # Where holes begin and end is the file system's affair: whole parts are compared, and
            # zeroes are as good as a hole.
            place -= place % _PART
            os.lseek(stream.fileno(), place, os.SEEK_SET)
            part = stream.read(_PART)
            if not part:
                break
            if part != _ZEROES[: len(part)]:
                state.update(f"@{place}:".encode())
                state.update(part)
            place += len(part)
    return state.hexdigest()


def _prune(store: Store) -> None:
    """Remove the longest unused snapshots that no lab runs from."""
    found = sorted((path for path in store.folder.glob("[!.]*") if path.is_dir()), key=_last_used)
    for folder in found[: max(0, len(found) - _KEPT + 1)]:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            # Without it nothing runs from the rest, which somebody was killed while removing.
            with contextlib.suppress(FileNotFoundError):
                state = stack.enter_context((folder / "state").open("rb"))
                fcntl.flock(state, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _last_used(folder: Path) -> float:
    """When a snapshot was last used; 0 for one that is not whole."""
    try:
        return (folder / "lab.json").stat().st_mtime
    except OSError:
        return 0.0


@contextlib.contextmanager
def _in_use(snapshot: Snapshot) -> Iterator[None]:
    """Keep others from removing it."""
    with contextlib.ExitStack() as stack:
        try:
            state = stack.enter_context(snapshot.state.open("rb"))
            fcntl.flock(state, fcntl.LOCK_SH)
            os.utime(snapshot.folder / "lab.json")
        except FileNotFoundError as error:
            raise Unusable(
                f"the snapshot {snapshot.folder} was removed", remedy="a lab is booted instead"
            ) from error
        yield


def discard(snapshot: Snapshot) -> None:
    """Remove a snapshot, so that the next one who wants it makes it anew."""
    shutil.rmtree(snapshot.folder, ignore_errors=True)


class _Check:
    """Compares a snapshot with its checksums in a thread, while the lab already goes on."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._stop = threading.Event()
        self._wrong: str = ""
        self._thread = threading.Thread(target=self._compare, daemon=True)
        self._thread.start()

    def _compare(self) -> None:
        try:
            kept = json.loads((self._snapshot.folder / "lab.json").read_text())
            for name in ("state", "memory"):
                if _checksum(self._snapshot.folder / name, self._stop) != kept[name]:
                    self._wrong = f"its {name} is not what was written"
                    return
        except (OSError, ValueError, KeyError) as error:
            self._wrong = str(error)

    def result(self) -> str:
        """What is wrong with it; nothing when it is whole."""
        self._thread.join()
        return self._wrong

    def end(self) -> None:
        """Compare no further."""
        self._stop.set()
        self._thread.join()


@contextlib.contextmanager
def restored(
    snapshot: Snapshot,
    image: Image,
    accelerator: Accelerator,
    spec: GuestSpec,
    *,
    on_step: OnStep = lambda _: None,
    count_instructions: bool = False,
) -> Iterator[tuple[HostMachine, Callable[[], contextlib.AbstractContextManager[Guest]]]]:
    """Let a saved lab go on; it ends with the block.

    Args:
        snapshot: From `ensure` with the same arguments.
        image: The image.
        accelerator: What it runs on.
        spec: The guest.
        on_step: Told what is being done.
        count_instructions: See `embedded_host`. The snapshot is the same one with and without:
            the counter begins at nothing, and no processor was in its guest when it was saved.

    Yields:
        The host, and what wakes its guest: a block, to be entered once at most.

    Raises:
        Unusable: it cannot be restored: it is damaged, or the lab in it is dead. It is removed.
    """
    on_step("restoring a saved lab")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_in_use(snapshot))
        check = _Check(snapshot)
        stack.callback(check.end)
        try:
            host = stack.enter_context(
                embedded.embedded_host(
                    image,
                    accelerator,
                    memory=Memory(snapshot.memory, shared=False, state=snapshot.state),
                    count_instructions=count_instructions,
                )
            )
            host_wakes = _waking(host.machine)
            wrong = check.result()
        except InfrastructureError as error:
            wrong = check.result() or error.message
        if wrong:
            discard(snapshot)
            raise Unusable(
                f"the saved lab cannot be restored: {wrong}",
                remedy="it was removed; a lab is booted instead",
                host="embedded",
            )

        def awake(machine: Machine) -> None:
            # Both at once: under emulation each takes a quarter of a second.
            for waking in (_waking(machine), host_wakes):
                done = waking.wait(_WAKE_S)
                if done.returncode != 0:
                    raise InfrastructureError(
                        "the clock of a restored machine cannot be set",
                        host="embedded",
                        stderr=done.stderr,
                        returncode=done.returncode,
                    )

        yield host, lambda: guest.taken_over(host, spec, snapshot.left, awake)


def _waking(machine: Machine) -> Process:
    """Set the clock of a machine that went on from a snapshot, and reseed its random numbers."""
    return machine.start(["vringlab-wake", f"{time.time():.6f}"], input=os.urandom(_SEED_BYTES))
