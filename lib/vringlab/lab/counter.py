"""Instructions that the embedded host and its guest executed: a figure that noise hardly moves.

Only an emulated host has them: its QEMU counts, by a plugin of ours (image/src/vringlab-count.c),
for each processor of the host, for host and guest apart, and in their kernels for each translated
block. Which module and function a block belongs to is found out here, from what was loaded while
it was counted: an arm's module may come to lie where another one was.

What is counted is simulated: instructions of the emulated processor, not of this machine's.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from vringlab.errors import InfrastructureError, TransientError
from vringlab.kernels.elf import ModuleFile
from vringlab.kernels.module import BuiltModule
from vringlab.transport.ssh import Machine

Side = Literal["host", "guest"]
#: What kind of code it was. `module`: of the modules that were asked for; `idle`: a kernel that has
#: nothing to do; `spin`: one that waits for another processor by turning round; else `kernel`.
Area = Literal["user", "kernel", "idle", "spin", "module"]

#: In the plugin's order.
SIDES: tuple[Side, ...] = ("host", "guest")

_MAGIC = int.from_bytes(b"VRLCOUNT", "little")
_FORMAT = 1
_HEAD = struct.Struct("<6Q")
_TOP_BIT = np.uint64(1 << 63)
#: More than a plugin has room for: what says so is no plugin of ours.
_MOST_BLOCKS = 1 << 24
#: A reading takes some hundredths of a second, more while other programs need the processors.
_ANSWER_S = 30.0

#: Where a kernel that has nothing to do is (kernel/sched/idle.c, drivers/cpuidle, x86's process.c).
IDLE_FUNCTIONS = frozenset(
    {
        *("do_idle", "cpu_startup_entry", "cpuidle_idle_call", "cpu_idle_poll", "poll_idle"),
        *("default_idle", "default_idle_call", "arch_cpu_idle", "arch_cpu_idle_enter"),
        *("arch_cpu_idle_exit", "native_safe_halt", "pv_native_safe_halt", "acpi_safe_halt"),
        *("acpi_idle_enter", "acpi_idle_do_entry", "cpuidle_enter", "cpuidle_enter_state"),
        *("cpuidle_select", "cpuidle_reflect", "menu_select", "menu_reflect", "haltpoll_select"),
        *("tick_nohz_idle_enter", "tick_nohz_idle_exit", "tick_nohz_idle_stop_tick"),
        *("tick_nohz_idle_restart_tick", "tick_nohz_idle_got_tick", "tick_nohz_idle_retain_tick"),
    }
)

#: Where a kernel turns round until another processor has done something (kernel/locking,
#: kernel/smp.c, arch/x86/lib/delay.c): how often says how busy this machine was, not what there
#: was to do.
SPIN_FUNCTIONS = frozenset(
    {
        *("native_queued_spin_lock_slowpath", "__pv_queued_spin_lock_slowpath"),
        *("queued_read_lock_slowpath", "queued_write_lock_slowpath", "osq_lock"),
        *("mutex_spin_on_owner", "rwsem_spin_on_owner", "csd_lock_wait", "delay_tsc"),
    }
)

Numbers = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Reading:
    """Instructions since the host was started or, as a difference, between two readings.

    Attributes:
        user: At addresses of user space, by (side, vCPU). Before a kernel has its page tables it
            is there, too, and so is firmware.
        beyond: Of kernel blocks that the plugin had no more room for, by (side, vCPU).
        addresses: Address of each kernel block.
        guest: Whether it is the guest's.
        blocks: Instructions by (vCPU, block).
        lost: How often a block found no room.
    """

    user: Numbers
    beyond: Numbers
    addresses: Numbers
    guest: NDArray[np.bool_]
    blocks: Numbers
    lost: int

    @property
    def vcpus(self) -> int:
        """Processors of the host."""
        return int(self.user.shape[1])

    def total(self, side: Side | None = None) -> tuple[int, ...]:
        """All instructions of a side, or of both, by vCPU."""
        sides = SIDES if side is None else (side,)
        found = np.zeros(self.vcpus, dtype=np.uint64)
        for name in sides:
            index = SIDES.index(name)
            found += self.user[index] + self.beyond[index]
            found += self.blocks[:, self.guest == bool(index)].sum(axis=1, dtype=np.uint64)
        return tuple(int(value) for value in found)

    def __sub__(self, earlier: Reading) -> Reading:
        """What was counted since an earlier reading of the same host.

        Raises:
            InfrastructureError: it is one of another host, or not an earlier one.
        """
        known = len(earlier.addresses)
        same = (
            self.vcpus == earlier.vcpus
            and known <= len(self.addresses)
            and bool(np.array_equal(self.addresses[:known], earlier.addresses))
            and bool(np.array_equal(self.guest[:known], earlier.guest))
        )
        before = np.zeros_like(self.blocks)
        if same:
            before[:, :known] = earlier.blocks
        if not same or any(
            bool((old > new).any())
            for old, new in (
                (earlier.user, self.user),
                (earlier.beyond, self.beyond),
                (before, self.blocks),
            )
        ):
            raise InfrastructureError(
                "two readings of instructions are not one after the other of the same host",
                remedy="take both of one counter, and subtract the earlier one",
            )
        return Reading(
            self.user - earlier.user,
            self.beyond - earlier.beyond,
            self.addresses,
            self.guest,
            self.blocks - before,
            self.lost - earlier.lost,
        )


def parse(data: bytes) -> Reading:
    """A reading from the plugin's answer.

    Raises:
        InfrastructureError: it is not one, or that of another version of the plugin.
        TransientError: some of the host's processors have not been started yet.
    """
    head = data[: _HEAD.size]
    size = _answer_size(head)
    _, _, vcpus, _, blocks, lost = _HEAD.unpack(head)
    if len(data) != size:
        raise _no_answer(f"its answer has {len(data)} bytes instead of {size}")
    numbers = np.frombuffer(data, dtype="<u8", offset=_HEAD.size).astype(np.uint64)
    shared, rest = np.split(numbers, [2 * len(SIDES) * vcpus])
    addresses, counts = np.split(rest, [blocks])
    shared = shared.reshape(2, len(SIDES), vcpus)
    guest = (addresses & _TOP_BIT) == 0
    return Reading(
        shared[0], shared[1], addresses | _TOP_BIT, guest, counts.reshape(vcpus, blocks), lost
    )


def _answer_size(head: bytes) -> int:
    """Bytes of a whole answer, by its head."""
    if len(head) != _HEAD.size:
        raise _no_answer("its answer is cut short")
    magic, version, running, expected, blocks, _ = _HEAD.unpack(head)
    if magic != _MAGIC or version != _FORMAT or blocks > _MOST_BLOCKS:
        raise _no_answer(f"its answer is not of version {_FORMAT}")
    if running != expected:
        raise TransientError(
            f"{running} of the host's {expected} processors have been started",
            remedy="read the counter when the host is up",
            host="embedded",
        )
    numbers = 2 * len(SIDES) * running + blocks + running * blocks
    return int(_HEAD.size + 8 * numbers)


def _no_answer(why: str) -> InfrastructureError:
    return InfrastructureError(
        f"the instruction counter cannot be read: {why}",
        remedy="the image's QEMU may have ended; an image of another version has another plugin",
        host="embedded",
    )


class Counter:
    """The plugin of a running host.

    Args:
        connection: Our end of its socket; the counter owns it from here on.
        vcpus: Processors that the host has.
    """

    def __init__(self, connection: socket.socket, vcpus: int) -> None:
        self._connection = connection
        self._vcpus = vcpus
        self._lock = threading.Lock()
        self._connection.settimeout(_ANSWER_S)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Hang up; the plugin goes on counting, for nobody."""
        self._connection.close()

    def read(self) -> Reading:
        """All counters since the host was started.

        Those of processors that are busy go on meanwhile: each is exact, but they are not of one
        instant. A processor that is reset keeps its counts.

        Raises:
            InfrastructureError: the plugin does not answer or is another one, or the host has
                another number of processors than was expected.
            TransientError: it did not answer in time, or processors have not been started yet.
        """
        with self._lock:
            try:
                self._connection.sendall(b"r")
                head = self._receive(_HEAD.size)
                body = self._receive(_answer_size(head) - _HEAD.size)
            except TimeoutError:
                # What comes too late would be taken for the next answer.
                self._connection.close()
                raise TransientError(
                    f"the instruction counter did not answer within {_ANSWER_S:g} s",
                    remedy="this machine may be overloaded; boot the host again",
                    host="embedded",
                ) from None
            except OSError as error:
                raise _no_answer(str(error)) from error
        reading = parse(head + body)
        if reading.vcpus != self._vcpus:
            raise _no_answer(f"it counts {reading.vcpus} processors, the host has {self._vcpus}")
        return reading

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._connection.recv(min(size - len(data), 1 << 20))
            if not part:
                raise _no_answer("it hung up")
            data += part
        return bytes(data)


# --- whose instructions they are ---------------------------------------------------------------


@dataclass(frozen=True)
class Function:
    """Code of one function, or a part of it; several may have one name.

    Attributes:
        start: Its first address.
        end: The address after its last.
        name: Its name, without what the compiler appends (`.isra.0`, `.cold`). None for code of a
            module that no symbol is for.
        module: The module that has it; None for the kernel itself.
    """

    start: int
    end: int
    name: str | None
    module: str | None = None


@dataclass(frozen=True)
class Code:
    """What is where in a kernel's memory, on one side.

    Attributes:
        side: Whose kernel.
        functions: Its functions.
        tested: Whether they are those of modules under test.
        notes: What a reader should know of them.
    """

    side: Side
    functions: tuple[Function, ...]
    tested: bool = False
    notes: tuple[str, ...] = ()


def module_code(machine: Machine, side: Side, built: BuiltModule) -> Code:
    """Where the functions of an arm's modules are, as they are loaded now.

    Args:
        machine: Where they are loaded.
        side: Which side that is.
        built: The arm.

    Raises:
        InfrastructureError: one of them is not loaded.
        TransientError: the connection was lost.
    """
    functions: list[Function] = []
    notes: list[str] = []
    for item in built.loading:
        elf = ModuleFile.read(item.path)
        # One process, since each takes a tenth of a second in an emulated guest.
        said = machine.run(
            f"cd /sys/module/{item.module}/sections && grep -s '' .[!.]* [!.]*; [ $? -lt 2 ]",
            check=False,
        ).stdout
        addresses = section_addresses(said)
        if not addresses:
            raise InfrastructureError(
                f"{item.module} is not loaded on {machine.name}, so its functions are nowhere",
                remedy="load the arm before its instructions are counted",
                host=machine.name,
            )
        found = located(elf, item.module, addresses)
        functions += found
        if not any(function.name for function in found):
            notes.append(f"{item.module} has no symbols: its instructions are not by function")
    return Code(side, tuple(functions), tested=True, notes=tuple(notes))


def section_addresses(said: str) -> dict[str, int]:
    """Address by name of section, from lines such as `.text:0xffffffffc0372000`."""
    found = {}
    for line in said.splitlines():
        name, _, address = line.rpartition(":")
        if name and address.startswith("0x"):
            found[name] = int(address, 16)
    return found


def located(elf: ModuleFile, module: str, addresses: dict[str, int]) -> list[Function]:
    """The functions of a module file at the addresses that its sections were loaded to."""
    found = []
    for section, size in elf.code.items():
        base = addresses.get(section)
        # What runs once is thrown away afterwards, and something else may lie there.
        if base is None or section.startswith(".init"):
            continue
        inside = sorted(
            (symbol for symbol in elf.symbols if symbol.section == section),
            key=lambda symbol: (symbol.offset, -symbol.size),
        )
        at = 0
        for symbol in inside:
            if symbol.offset > at:
                found.append(Function(base + at, base + symbol.offset, None, module))
            start, end = max(at, symbol.offset), symbol.offset + symbol.size
            if end > start:
                found.append(Function(base + start, base + end, symbol.base_name, module))
            at = max(at, end)
        if at < size:
            found.append(Function(base + at, base + size, None, module))
    return found


def kernel_code(machine: Machine, side: Side) -> Code:
    """Where the functions of a kernel and of all its modules are now, from /proc/kallsyms.

    It takes about a second on an emulated host, and two in its guest.

    Raises:
        InfrastructureError: it cannot be read.
        TransientError: the connection was lost.
    """
    text = machine.run(
        "cat /proc/kallsyms", timeout=120, remedy="reading /proc/kallsyms needs root"
    ).stdout
    functions = parse_symbols(text)
    if not functions:
        raise InfrastructureError(
            f"{machine.name} does not tell the addresses of its kernel's functions",
            remedy="reading /proc/kallsyms needs root, and kernel.kptr_restrict below 2",
            host=machine.name,
        )
    return Code(side, functions)


def parse_symbols(text: str) -> tuple[Function, ...]:
    """Functions from the text of /proc/kallsyms; one goes on to the next symbol of any kind."""
    found: list[tuple[int, str, str, str | None]] = []
    for line in text.splitlines():
        words = line.split()
        if len(words) not in (3, 4):
            continue
        address = int(words[0], 16)
        # Below are offsets in a processor's own data.
        if address >> 63:
            module = words[3].strip("[]") if len(words) == 4 else None
            found.append((address, words[1], words[2], module))
    found.sort(key=lambda item: item[0])
    functions = []
    for (address, kind, name, module), following in itertools.pairwise(found):
        end = following[0]
        # Of several names at one place the last one is taken.
        if kind in "tTwW" and end > address:
            functions.append(Function(address, end, name.partition(".")[0], module))
    return tuple(functions)


@dataclass(frozen=True)
class Row:
    """Instructions of one function.

    Attributes:
        side: Whose.
        area: What kind of code.
        module: The module; None for the kernel itself and for user space.
        function: Its name; None where it is not known, and for user space.
        vcpus: Instructions by the host's processor.
    """

    side: Side
    area: Area
    module: str | None
    function: str | None
    vcpus: tuple[int, ...]

    def instructions(self, vcpus: Iterable[int] | None = None) -> int:
        """Instructions on some processors of the host, or on all."""
        return sum(self.vcpus) if vcpus is None else sum(self.vcpus[index] for index in vcpus)


@dataclass(frozen=True)
class Profile:
    """Where instructions went.

    Attributes:
        rows: By side, area, module and function, most instructions first.
        notes: What could not be told apart.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def total(
        self,
        *,
        side: Side | None = None,
        areas: Iterable[Area] | None = None,
        function: str | None = None,
        vcpus: Sequence[int] | None = None,
    ) -> int:
        """Instructions of the rows that match, on some processors of the host or on all.

        Args:
            side: Only of that side.
            areas: Only of these areas.
            function: Only of the function of that name, whichever module has it.
            vcpus: Only on these processors of the host, by their numbers there: leave out those
                that poll, where the guest's are pinned one to one.
        """
        wanted = None if areas is None else frozenset(areas)
        return sum(
            row.instructions(vcpus)
            for row in self.rows
            if side in (None, row.side)
            and (wanted is None or row.area in wanted)
            and function in (None, row.function)
        )

    def __sub__(self, other: Profile) -> Profile:
        """Row by row, what this one has more than another; less than nothing where it has less.

        Of the same work in two sizes, that is what the additional work took.
        """
        sums: dict[tuple[Side, Area, str | None, str | None], tuple[int, ...]] = {}
        for profile, sign in ((self, 1), (other, -1)):
            for row in profile.rows:
                key = (row.side, row.area, row.module, row.function)
                before = sums.get(key, (0,) * len(row.vcpus))
                pairs = zip(before, row.vcpus, strict=True)
                sums[key] = tuple(old + sign * new for old, new in pairs)
        notes = tuple(dict.fromkeys((*self.notes, *other.notes)))
        return Profile(_sorted(Row(*key, counts) for key, counts in sums.items()), notes)


def _sorted(rows: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(
        sorted(
            rows,
            key=lambda row: (
                -sum(row.vcpus),
                row.side,
                row.area,
                row.module or "",
                row.function or "",
            ),
        )
    )


def attribute(reading: Reading, codes: Sequence[Code]) -> Profile:
    """Whose instructions a difference of two readings has.

    Args:
        reading: The difference; what is loaded must not have changed between the two.
        codes: What is where. Where two of a side overlap, that under test is right: a kernel's
            own list may be of a time before the arm was loaded.

    Returns:
        The profile. Without a kernel's functions its `idle` and `spin` are not told from the rest.
    """
    sums: dict[tuple[Side, Area, str | None, str | None], NDArray[np.uint64]] = {}

    def add(side: Side, area: Area, function: Function | None, counts: Numbers) -> None:
        if counts.any():
            names = (function.module, function.name) if function is not None else (None, None)
            key = (side, area, *names)
            sums[key] = sums[key] + counts if key in sums else counts

    for index, side in enumerate(SIDES):
        add(side, "user", None, reading.user[index])
        add(side, "kernel", None, reading.beyond[index])
        mine = np.flatnonzero((reading.guest == bool(index)) & reading.blocks.any(axis=0))
        addresses, blocks = reading.addresses[mine], reading.blocks[:, mine]
        for tested in (True, False):
            functions = sorted(
                (item for code in codes if (code.side, code.tested) == (side, tested)
                 for item in code.functions),
                key=lambda item: item.start,
            )  # fmt: skip
            at = _places(addresses, functions)
            for place in np.unique(at[at >= 0]):
                function = functions[place]
                add(
                    side,
                    _area(function, tested),
                    function,
                    blocks[:, at == place].sum(axis=1, dtype=np.uint64),
                )
            addresses, blocks = addresses[at < 0], blocks[:, at < 0]
        add(side, "kernel", None, blocks.sum(axis=1, dtype=np.uint64))
    rows = (Row(*key, tuple(int(value) for value in counts)) for key, counts in sums.items())
    return Profile(_sorted(rows), _notes(reading, codes))


def _area(function: Function, tested: bool) -> Area:
    if tested:
        return "module"
    if function.name in IDLE_FUNCTIONS:
        return "idle"
    return "spin" if function.name in SPIN_FUNCTIONS else "kernel"


def _places(addresses: Numbers, functions: Sequence[Function]) -> NDArray[np.int64]:
    """Index of the function that has each address; -1 for none."""
    starts = np.array([item.start for item in functions], dtype=np.uint64)
    ends = np.array([item.end for item in functions], dtype=np.uint64)
    at = np.searchsorted(starts, addresses, side="right").astype(np.int64) - 1
    if len(functions):
        at[(at >= 0) & (addresses >= ends[at])] = -1
    return at


def _notes(reading: Reading, codes: Sequence[Code]) -> tuple[str, ...]:
    notes = [note for code in codes for note in code.notes]
    notes += [
        f"the {side}'s kernel is not by function, and what it did to wait not told apart"
        for side in SIDES
        if not any(code.side == side and not code.tested for code in codes)
    ]
    if reading.beyond.any():
        notes.append(
            "the counter had no room for all blocks: some of the kernels is not by function"
        )
    return tuple(notes)
