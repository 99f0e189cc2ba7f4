"""The kernel without its compression: what an emulated machine can start at once.

A bzImage unpacks itself, which is some seconds of work for an emulated processor, at every boot.
QEMU also starts the ELF file inside it, by its PVH entry (`CONFIG_PVH`). That skips the kernel's
own randomisation of its address, so machines with a processor of their own boot the bzImage.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
from typing import Literal

from vringlab.errors import InfrastructureError

#: Fields of the boot protocol's header (kernel: Documentation/arch/x86/boot.rst).
_SETUP_SECTORS = 0x1F1
_MAGIC = 0x202
_PAYLOAD = 0x248
_SECTOR = 512


def decompressed(data: bytes, codec: Literal["zstd", "gzip"] = "zstd") -> bytes:
    """What was compressed, as one stream or several."""
    # Imported late: it takes a tenth of a second, and is used when kernels are unpacked only.
    import pyarrow as pa

    return bytes(pa.CompressedInputStream(pa.BufferReader(data), codec).read())


_FORMATS = (
    (b"\x28\xb5\x2f\xfd", decompressed),
    (b"\xfd7zXZ\0", lzma.decompress),
    (b"\x1f\x8b", gzip.decompress),
    (b"BZh", bz2.decompress),
)


def uncompressed(image: bytes) -> bytes:
    """The ELF kernel inside a bzImage.

    Raises:
        InfrastructureError: it is no bzImage, or compressed in a way that is not known here.
    """
    if image[_MAGIC : _MAGIC + 4] != b"HdrS":
        raise InfrastructureError(
            "the image's kernel is no bzImage",
            remedy="x86-64 kernels of version 2.6.26 and newer are",
        )
    begin = ((image[_SETUP_SECTORS] or 4) + 1) * _SECTOR
    offset, length = struct.unpack_from("<II", image, _PAYLOAD)
    payload = image[begin + offset : begin + offset + length]
    for magic, unpack in _FORMATS:
        if payload.startswith(magic):
            # The build appends the unpacked size, four bytes that are no part of the stream; but
            # for gzip, whose stream ends with it.
            kernel = unpack(payload if unpack is gzip.decompress else payload[:-4])
            if kernel.startswith(b"\x7fELF"):
                return kernel
    raise InfrastructureError(
        f"the image's kernel is compressed in an unknown way ({payload[:6].hex()})",
        remedy="known are zstd, xz, gzip and bzip2",
    )
