"""Whose the instructions of a reading are: by side, kind of code, module and function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vringlab.lab.counter import SIDES, Numbers, Reading, Side
from vringlab.lab.functions import Code, Function

#: What kind of code it was. `module`: of the modules that were asked for; `idle`: a kernel that has
#: nothing to do; `spin`: one that waits for another processor by turning round; else `kernel`.
Area = Literal["user", "kernel", "idle", "spin", "module"]

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
        # They turn round while another processor runs the timer's handler; else they are short.
        *("lock_timer_base", "timer_delete_sync", "__timer_delete_sync", "try_to_del_timer_sync"),
    }
)


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

    def times(self, factor: float) -> Profile:
        """Every count as often, rounded: what takes place for so much longer."""
        return replace(
            self,
            rows=tuple(
                replace(row, vcpus=tuple(round(factor * count) for count in row.vcpus))
                for row in self.rows
            ),
        )

    def only(self, area: Area) -> Profile:
        """The rows of one kind of code."""
        return replace(self, rows=tuple(row for row in self.rows if row.area == area))


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
