"""Where the functions of kernels and modules lie in memory, as they are loaded now.

An arm's module may come to lie where another one was, so this is asked while it is loaded.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from vringlab.errors import InfrastructureError
from vringlab.kernels.elf import ModuleFile
from vringlab.kernels.module import BuiltModule
from vringlab.lab.counter import Side
from vringlab.transport.ssh import Machine


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
