"""Readings of the instruction counter: parsing, arithmetic, and whose instructions they are."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.fakes.counter_answer import answer
from tests.pure.test_patches import elf_file

from vringlab.errors import InfrastructureError, TransientError
from vringlab.kernels.elf import ModuleFile
from vringlab.lab import attribution, counter, functions
from vringlab.lab.counter import Reading
from vringlab.lab.functions import Code, Function

KERNEL = 0xFFFFFFFF81000000
MODULE = 0xFFFFFFFFC0400000


BLOCKS = [
    ("host", KERNEL + 0x10, (5, 0)),
    ("guest", KERNEL + 0x10, (0, 7)),
    ("guest", MODULE + 0x20, (100, 200)),
    ("host", MODULE + 0x20, (1, 2)),
]


def reading(**changes: Any) -> Reading:
    parts: dict[str, Any] = {"blocks": BLOCKS, "user": ((10, 20), (30, 40)), **changes}
    return counter.parse(answer(**parts))


def test_sides_and_processors_are_kept_apart() -> None:
    found = reading(beyond=((0, 0), (1000, 0)))
    assert found.vcpus == 2
    assert found.addresses.tolist() == [address for _, address, _ in BLOCKS]
    assert found.guest.tolist() == [False, True, True, False]
    assert found.blocks.tolist() == [[5, 0, 100, 1], [0, 7, 200, 2]]
    assert found.total("host") == (16, 22)
    assert found.total("guest") == (1130, 247)
    assert found.total() == (1146, 269)


def test_a_difference_takes_blocks_that_came_later_as_new() -> None:
    before = reading(blocks=BLOCKS[:2], user=((1, 2), (3, 4)))
    after = reading(blocks=[("host", KERNEL + 0x10, (6, 0)), *BLOCKS[1:]], head={"lost": 3})
    found = after - before
    assert found.user.tolist() == [[9, 18], [27, 36]]
    assert found.blocks.tolist() == [[1, 0, 100, 1], [0, 0, 200, 2]]
    assert found.lost == 3
    assert (after - after).total() == (0, 0)


@pytest.mark.parametrize(
    "later",
    [
        pytest.param({"blocks": BLOCKS[:3]}, id="fewer blocks"),
        pytest.param({"blocks": [BLOCKS[1], BLOCKS[0], *BLOCKS[2:]]}, id="other blocks"),
        pytest.param({"user": ((9, 20), (30, 40))}, id="fewer instructions"),
        pytest.param(
            {"blocks": [("host", KERNEL + 0x10, (4, 0)), *BLOCKS[1:]]}, id="fewer in a block"
        ),
        pytest.param(
            {"blocks": [], "user": ((1, 2, 3), (4, 5, 6))},
            id="more processors",
        ),
    ],
)
def test_readings_that_do_not_follow_each_other_have_no_difference(later: dict[str, Any]) -> None:
    with pytest.raises(InfrastructureError, match="not one after the other"):
        reading(**later) - reading()


@pytest.mark.parametrize("head", [{"magic": 1}, {"version": 2}, {"blocks": 1 << 40}])
def test_an_answer_of_another_version_is_refused(head: dict[str, int]) -> None:
    with pytest.raises(InfrastructureError, match="is not of version 1"):
        counter.parse(answer(head=head))


@pytest.mark.parametrize("keep", [0, 10, 48, -1])
def test_an_answer_that_is_cut_short_is_refused(keep: int) -> None:
    with pytest.raises(InfrastructureError, match="cannot be read"):
        counter.parse(answer(BLOCKS)[:keep])


def test_processors_that_are_not_there_yet_may_come() -> None:
    with pytest.raises(TransientError, match="2 of the host's 4 processors"):
        counter.parse(answer(head={"expected": 4}))


# --- whose they are ------------------------------------------------------------------------


KALLSYMS = f"""\
0000000000000000 A fixed_percpu_data
{KERNEL:x} T startup
{KERNEL + 0x10:x} t also_send
{KERNEL + 0x10:x} T send
{KERNEL + 0x40:x} t default_idle
{KERNEL + 0x60:x} D jiffies
{KERNEL + 0x70:x} T native_queued_spin_lock_slowpath
{KERNEL + 0x80:x} W weak.cold
{MODULE:x} t old_function\t[old]
{MODULE + 0x100:x} t another\t[kvm]
{MODULE + 0x200:x} d its_data\t[kvm]
"""


def test_functions_go_on_to_the_next_symbol() -> None:
    assert functions.parse_symbols(KALLSYMS) == (
        Function(KERNEL, KERNEL + 0x10, "startup"),
        Function(KERNEL + 0x10, KERNEL + 0x40, "send"),
        Function(KERNEL + 0x40, KERNEL + 0x60, "default_idle"),
        Function(KERNEL + 0x70, KERNEL + 0x80, "native_queued_spin_lock_slowpath"),
        Function(KERNEL + 0x80, MODULE, "weak"),
        Function(MODULE, MODULE + 0x100, "old_function", "old"),
        Function(MODULE + 0x100, MODULE + 0x200, "another", "kvm"),
    )
    assert functions.parse_symbols("") == ()


def symbol(name: int, section: int, offset: int, size: int, kind: int = 2) -> bytes:
    return struct.pack("<IBBHQQ", name, kind, 0, section, offset, size)


STRINGS = b"\0transmit.isra.0\0receive\0setup\0"
TOY = elf_file(
    {
        ".text": (6, bytes(0x60)),
        ".text.unlikely": (6, bytes(0x10)),
        ".init.text": (6, bytes(0x20)),
        ".symtab": (
            0,
            symbol(1, 1, 0x10, 0x20)
            + symbol(17, 1, 0x30, 0x10)
            + symbol(1, 2, 0, 0x10)
            + symbol(25, 3, 0, 0x20)
            + symbol(17, 1, 0, 8, kind=1)
            + symbol(17, 0xFFF1, 0, 8),
        ),
        ".strtab": (0, STRINGS),
    }
)
SECTIONS = {".text": MODULE, ".text.unlikely": MODULE + 0x1000, ".init.text": MODULE + 0x2000}


def toy(side: counter.Side = "guest") -> Code:
    elf = ModuleFile.parse(TOY, "toy.ko")
    return Code(side, tuple(functions.located(elf, "toy", SECTIONS)), tested=True)


def test_a_modules_functions_are_where_its_sections_are() -> None:
    assert toy().functions == (
        Function(MODULE, MODULE + 0x10, None, "toy"),
        Function(MODULE + 0x10, MODULE + 0x30, "transmit", "toy"),
        Function(MODULE + 0x30, MODULE + 0x40, "receive", "toy"),
        Function(MODULE + 0x40, MODULE + 0x60, None, "toy"),
        Function(MODULE + 0x1000, MODULE + 0x1010, "transmit", "toy"),
    )
    assert ModuleFile.parse(TOY, "toy.ko").functions == {"transmit", "receive", "setup"}


def test_a_module_without_symbols_is_still_its_own() -> None:
    elf = ModuleFile.parse(elf_file({".text": (6, bytes(0x60))}), "toy.ko")
    assert functions.located(elf, "toy", SECTIONS) == [Function(MODULE, MODULE + 0x60, None, "toy")]


def test_section_addresses_are_read() -> None:
    said = ".text:0xffffffffc0400000\n.text.unlikely:0xffffffffc0401000\ngrep: x: no such file\n"
    assert functions.section_addresses(said) == {".text": MODULE, ".text.unlikely": MODULE + 0x1000}
    assert functions.section_addresses("") == {}


def rows(profile: attribution.Profile) -> dict[tuple[str, str, str | None, str | None], int]:
    return {
        (row.side, row.area, row.module, row.function): row.instructions() for row in profile.rows
    }


def test_each_instruction_has_one_owner() -> None:
    kernels = [Code(side, functions.parse_symbols(KALLSYMS)) for side in counter.SIDES]
    found = reading(
        blocks=[
            *BLOCKS,
            ("guest", MODULE + 0x1008, (0, 3)),
            ("guest", KERNEL + 0x44, (50, 0)),
            ("guest", KERNEL + 0x60, (0, 9)),
            ("host", KERNEL + 0x7C, (8, 0)),
        ],
        beyond=((0, 0), (0, 4)),
    )
    profile = attribution.attribute(found, [*kernels, toy()])
    assert rows(profile) == {
        ("guest", "module", "toy", "transmit"): 303,
        ("guest", "user", None, None): 70,
        ("guest", "idle", None, "default_idle"): 50,
        ("host", "user", None, None): 30,
        ("guest", "kernel", None, None): 13,
        ("host", "spin", None, "native_queued_spin_lock_slowpath"): 8,
        ("guest", "kernel", None, "send"): 7,
        ("host", "kernel", None, "send"): 5,
        # What lies at the same address on the other side is another module.
        ("host", "kernel", "old", "old_function"): 3,
    }
    assert [row.instructions() for row in profile.rows] == sorted(
        rows(profile).values(), reverse=True
    )
    assert profile.total() == sum(found.total())
    assert profile.total(side="guest", areas=["module", "idle"]) == 353
    assert profile.total(function="transmit", vcpus=[1]) == 203
    assert profile.rows[0].instructions([0]) == 100
    assert "no room for all blocks" in " ".join(profile.notes)


def test_what_cannot_be_told_apart_is_said() -> None:
    profile = attribution.attribute(reading(), [replace(toy(), notes=("toy has no symbols",))])
    assert rows(profile)["guest", "kernel", None, None] == 7
    assert rows(profile)["host", "kernel", None, None] == 8
    assert profile.notes == (
        "toy has no symbols",
        "the host's kernel is not by function, and what it did to wait not told apart",
        "the guest's kernel is not by function, and what it did to wait not told apart",
    )
    assert profile.total() == sum(reading().total())


def test_profiles_of_two_sizes_have_a_difference() -> None:
    codes = [toy()]
    few = attribution.attribute(reading(blocks=[BLOCKS[0], BLOCKS[2]]), codes)
    many = attribution.attribute(
        reading(blocks=[("guest", MODULE + 0x20, (150, 260)), BLOCKS[1]]), codes
    )
    found = many - few
    assert rows(found) == {
        ("guest", "module", "toy", "transmit"): 110,
        ("guest", "kernel", None, None): 7,
        ("host", "kernel", None, None): -5,
        ("host", "user", None, None): 0,
        ("guest", "user", None, None): 0,
    }
    assert found.rows[0].vcpus == (50, 60)
    assert found.total() == many.total() - few.total()
    assert found.notes == many.notes == few.notes


def test_nothing_counted_is_nothing() -> None:
    profile = attribution.attribute(counter.parse(answer()), [])
    assert profile.rows == ()
    assert profile.total() == 0
    assert np.array_equal(counter.parse(answer()).total(), (0, 0))
