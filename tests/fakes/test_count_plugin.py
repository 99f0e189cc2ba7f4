"""The plugin vringlab-count, built here, in a program that plays QEMU to it."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import vringlab.image
from vringlab.errors import InfrastructureError, TransientError
from vringlab.lab.counter import Counter, Reading

SOURCE = Path(vringlab.image.__file__).parent / "src"
HARNESS = Path(__file__).parent / "plugin_harness.c"
#: Four are for what has no slot of its own.
SLOTS = 16
KERNEL = 0xFFFFFFFF81000000
VMRUN = 0xFFFFFFFFC0400000
#: VMRUN is the last of four instructions of three bytes each.
AFTER = VMRUN + 12
USER = 0x401000


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    made = tmp_path_factory.mktemp("plugin") / "harness"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", f"-DSLOTS={SLOTS}u"]
    sources = [HARNESS, SOURCE / "vringlab-count.c"]
    subprocess.run(
        ["cc", *flags, "-pthread", f"-I{SOURCE}", "-o", made, *sources], check=True, timeout=60
    )
    return made


class Machine:
    """A machine of two vCPUs whose blocks are run one by one."""

    def __init__(self, process: subprocess.Popen[str], counter: Counter) -> None:
        self._process = process
        self._counter = counter

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def start(self, vcpu: int) -> None:
        self._tell(f"start {vcpu}")

    def run(self, side: str, address: int, *, size: int = 4, times: int = 1, vcpu: int = 0) -> None:
        word = "vmrun" if (side, address) == ("host", VMRUN) else ""
        self._tell(f"run {vcpu} {side} {address:x} {size} {times} {word}")

    def read(self) -> Reading:
        return self._counter.read()


@contextmanager
def machine(program: Path, started: int = 2) -> Iterator[Machine]:
    ours, theirs = socket.socketpair()
    with (
        Counter(ours, 2) as counter,
        subprocess.Popen(
            [program, "x86_64", "2", "2", f"fd={theirs.fileno()}"],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        theirs.close()
        made = Machine(process, counter)
        try:
            for vcpu in range(started):
                made.start(vcpu)
            yield made
        finally:
            process.kill()


def listed(reading: Reading) -> dict[tuple[str, int], list[int]]:
    sides = ["guest" if guest else "host" for guest in reading.guest]
    return {
        (side, int(address)): counts
        for side, address, counts in zip(
            sides, reading.addresses, reading.blocks.T.tolist(), strict=True
        )
    }


def test_instructions_are_counted_by_processor_and_block(program: Path) -> None:
    with machine(program) as made:
        made.run("host", KERNEL, size=5, times=3)
        made.run("host", KERNEL, size=5, times=2, vcpu=1)
        made.run("host", KERNEL + 64, size=2)
        made.run("host", USER, size=7, times=10, vcpu=1)
        found = made.read()
        assert listed(found) == {("host", KERNEL): [15, 10], ("host", KERNEL + 64): [2, 0]}
        assert found.user.tolist() == [[0, 70], [0, 0]]
        made.run("host", KERNEL, size=5)
        assert (made.read() - found).total() == (5, 0)


def test_host_and_guest_at_the_same_addresses_are_kept_apart(program: Path) -> None:
    with machine(program) as made:
        for _ in range(3):
            made.run("host", KERNEL)
            made.run("host", VMRUN)
            # Right where the host goes on: only its memory tells the guest's code from it.
            for address in (KERNEL, AFTER, USER):
                made.run("guest", address, times=10)
            # Another processor is not in its guest.
            made.run("host", KERNEL + 64, vcpu=1)
            made.run("host", AFTER)
            made.run("host", USER)
        found = made.read()
        assert listed(found) == {
            ("host", KERNEL): [12, 0],
            ("host", VMRUN): [12, 0],
            ("guest", KERNEL): [120, 0],
            ("guest", AFTER): [120, 0],
            ("host", KERNEL + 64): [0, 12],
            ("host", AFTER): [12, 0],
        }
        assert found.user.tolist() == [[12, 0], [120, 0]]


def test_new_blocks_after_an_exit_are_the_hosts(program: Path) -> None:
    with machine(program) as made:
        made.run("host", VMRUN)
        made.run("guest", KERNEL)
        made.run("host", AFTER)
        made.run("host", KERNEL + 128)
        # The second time nothing is translated: the callbacks alone say where it is.
        made.run("host", VMRUN)
        made.run("guest", KERNEL + 128)
        made.run("host", AFTER)
        made.run("host", KERNEL + 256)
        found = listed(made.read())
        assert [key for key in found if key[0] == "guest"] == [
            ("guest", KERNEL),
            ("guest", KERNEL + 128),
        ]
        assert found["host", AFTER] == [8, 0]
        assert ("host", KERNEL + 256) in found


def test_what_finds_no_room_is_counted_without_its_address(program: Path) -> None:
    with machine(program) as made:
        for number in range(20):
            made.run("host", KERNEL + 64 * number, times=2)
        found = made.read()
        assert len(found.addresses) == SLOTS - 4
        assert found.lost == 20 - (SLOTS - 4)
        assert found.beyond.tolist() == [[8 * found.lost, 0], [0, 0]]
        assert found.total() == (20 * 8, 0)


def test_processors_that_have_not_been_started(program: Path) -> None:
    with machine(program, started=1) as made:
        with pytest.raises(TransientError, match="1 of the host's 2 processors"):
            made.read()
        made.start(1)
        assert made.read().total() == (0, 0)


def test_a_qemu_that_ended(program: Path) -> None:
    with machine(program) as made:
        made.read()
        made._process.kill()
        made._process.wait()
        with pytest.raises(InfrastructureError, match="cannot be read"):
            made.read()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["aarch64", "2", "2", "fd=0"], "emulated x86_64 machines only"),
        (["x86_64", "2", "8", "fd=0"], "vCPUs that are added later"),
        *(
            (["x86_64", "2", "2", *words], "fd=NUMBER of an open socket")
            for words in (
                [],
                ["fd="],
                ["fd=1x"],
                ["fd=99"],
                ["fd=0", "x"],
                ["0"],
                ["fd=9999999999"],
            )
        ),
    ],
)
def test_what_it_cannot_count_is_refused(program: Path, arguments: list[str], words: str) -> None:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=30)
    assert done.returncode == 3
    assert words in done.stderr
