"""What live tests of several files start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vringlab.image.build import Image, ensure_image
from vringlab.lab import accel, embedded, guest


@pytest.fixture(scope="module")
def image() -> Image:
    return ensure_image()


@pytest.fixture(scope="module")
def host(image: Image) -> Iterator[embedded.HostMachine]:
    """An embedded host of the test file's own, ready for guests."""
    with embedded.embedded_host(image, accel.choose(image)) as machine:
        guest.prepare_host(machine)
        yield machine
