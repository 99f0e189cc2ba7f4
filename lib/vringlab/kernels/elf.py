"""What a kernel module file says of itself: its build-id, its modinfo, its machine code.

Only what is needed of ELF: 64-bit little-endian files, section headers, notes. Layouts are
those of the System V ABI (ELF-64 object file format) and `man 5 elf`.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

from vringlab.errors import InfrastructureError

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NOTE = struct.Struct("<III")
_SYMBOL = struct.Struct("<IBBHQQ")
_NT_GNU_BUILD_ID = 3
_SHT_NOBITS = 8
_SHF_EXECINSTR = 4
_STT_FUNC = 2


@dataclass(frozen=True)
class _Section:
    name: str
    flags: int
    content: bytes


@dataclass(frozen=True)
class Symbol:
    """A function's entry in the symbol table.

    Attributes:
        name: Its name.
        section: Name of the section that it is in.
        offset: Where it begins there, bytes.
        size: Its length, bytes.
    """

    name: str
    section: str
    offset: int
    size: int

    @property
    def base_name(self) -> str:
        """Its name without what the compiler appends to one (`.isra.0`, `.cold`)."""
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class ModuleFile:
    """An ELF file, read.

    Attributes:
        name: What to call it in messages.
        sections: Its sections in file order.
    """

    name: str
    sections: tuple[_Section, ...]

    @classmethod
    def read(cls, path: Path) -> ModuleFile:
        """Read the file at `path`.

        Raises:
            InfrastructureError: it is not a whole 64-bit little-endian ELF file.
        """
        return cls.parse(path.read_bytes(), path.name)

    @classmethod
    def parse(cls, data: bytes, name: str) -> ModuleFile:
        """Read the bytes of an ELF file.

        Raises:
            InfrastructureError: as `read`.
        """
        try:
            return cls(name, tuple(_sections(data)))
        except (struct.error, IndexError, ValueError) as error:
            raise InfrastructureError(
                f"{name} is not a whole ELF file: {error}",
                remedy="remove it, so that it is built again",
                host="local",
            ) from None

    def section(self, name: str) -> bytes:
        """Content of the section of that name; empty when there is none."""
        return next((item.content for item in self.sections if item.name == name), b"")

    @property
    def build_id(self) -> str:
        """The linker's build-id in hex, as in `/sys/module/NAME/notes/`; empty without one."""
        return self.note_build_id(".note.gnu.build-id")

    def note_build_id(self, section: str) -> str:
        """The build-id among the notes of a section; a kernel has its own in `.notes`."""
        notes = self.section(section)
        offset = 0
        while offset + _NOTE.size <= len(notes):
            name_size, size, kind = _NOTE.unpack_from(notes, offset)
            start = offset + _NOTE.size
            content = start + -(-name_size // 4) * 4
            if kind == _NT_GNU_BUILD_ID and notes[start : start + name_size] == b"GNU\0":
                return notes[content : content + size].hex()
            offset = content + -(-size // 4) * 4
        return ""

    @property
    def modinfo(self) -> dict[str, str]:
        """The module's tags (`vermagic`, `srcversion`, ...); of repeated tags, the last."""
        entries = self.section(".modinfo").split(b"\0")
        pairs = (item.decode("utf-8", "replace").partition("=") for item in entries if item)
        return {key: value for key, _, value in pairs}

    @property
    def functions(self) -> frozenset[str]:
        """Names of the functions that its symbol table has, as kallsyms will show them.

        One that the compiler put inside its callers is not there; what it appends to a name
        (`.isra.0`) is left out.
        """
        return frozenset(symbol.base_name for symbol in self.symbols)

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """The functions of its symbol table; empty when it was stripped of that."""
        table, names = self.section(".symtab"), self.section(".strtab")
        found = []
        for name, info, _, section, offset, size in _SYMBOL.iter_unpack(
            table[: len(table) // _SYMBOL.size * _SYMBOL.size]
        ):
            # Numbers past the sections are reserved: absolute, common.
            if info & 0xF == _STT_FUNC and 0 < section < len(self.sections):
                text = names[name : names.find(b"\0", name)].decode("utf-8", "replace")
                found.append(Symbol(text, self.sections[section].name, offset, size))
        return tuple(found)

    @property
    def code(self) -> dict[str, int]:
        """Bytes of machine code by section."""
        return {
            item.name: len(item.content)
            for item in self.sections
            if item.flags & _SHF_EXECINSTR and item.content
        }

    @property
    def text_sha256(self) -> str:
        """Digest of the machine code alone, before relocation, in hex.

        Two modules that differ in names, stamps or debug data but not in code share it.
        """
        digest = hashlib.sha256()
        for item in self.sections:
            if item.flags & _SHF_EXECINSTR and item.content:
                digest.update(f"{item.name}\0{len(item.content)}\0".encode() + item.content)
        return digest.hexdigest()


def _sections(data: bytes) -> list[_Section]:
    ident, *fields = _HEADER.unpack_from(data)
    if ident[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit little-endian ELF header")
    table, entry_size, count, names_index = fields[5], fields[10], fields[11], fields[12]
    headers = [_SECTION.unpack_from(data, table + number * entry_size) for number in range(count)]

    def content(header: tuple[int, ...]) -> bytes:
        kind, offset, size = header[1], header[4], header[5]
        if kind == _SHT_NOBITS:
            return b""
        if offset + size > len(data):
            raise ValueError("it is cut short")
        return data[offset : offset + size]

    names = content(headers[names_index])
    return [
        _Section(
            names[header[0] : names.index(b"\0", header[0])].decode(), header[2], content(header)
        )
        for header in headers
    ]
