"""Instructions that the embedded host and its guest executed: a figure that noise hardly moves.

Only an emulated host has them: its QEMU counts, by a plugin of ours (image/src/vringlab-count.c),
for each processor of the host, for host and guest apart, and in their kernels for each translated
block. Which function a block belongs to is found out by `lab.attribution`.

What is counted is simulated: instructions of the emulated processor, not of this machine's.
"""

from __future__ import annotations

import socket
import struct
import threading
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from vringlab.errors import InfrastructureError, TransientError

Side = Literal["host", "guest"]

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
