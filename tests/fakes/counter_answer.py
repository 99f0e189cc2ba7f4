"""What the instruction counter's plugin answers, as it documents itself."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType

MAGIC = int.from_bytes(b"VRLCOUNT", "little")
TOP_BIT = 1 << 63

Sides = Sequence[Sequence[int]]


def answer(
    blocks: Sequence[tuple[str, int, Sequence[int]]] = (),
    user: Sides = ((0, 0), (0, 0)),
    beyond: Sides | None = None,
    head: Mapping[str, int] = MappingProxyType({}),
) -> bytes:
    """An answer, maybe with another head than it should have.

    Blocks are (side, address, instructions by vCPU), the rest is by (side, vCPU).
    """
    vcpus = len(user[0])
    values = {"magic": MAGIC, "version": 1, "running": vcpus, "expected": vcpus}
    values |= {"blocks": len(blocks), "lost": 0} | dict(head)
    numbers = [*values.values()]
    for group in (user, beyond or ((0,) * vcpus,) * 2):
        numbers += [value for side in group for value in side]
    numbers += [address - TOP_BIT * (side == "guest") for side, address, _ in blocks]
    numbers += [counts[vcpu] for vcpu in range(vcpus) for _, _, counts in blocks]
    return struct.pack(f"<{len(numbers)}Q", *numbers)
