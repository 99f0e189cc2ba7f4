"""Who runs on which processor: the plan, what is read back, and what is called drift."""

from __future__ import annotations

import os
import subprocess
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vringlab.errors import InfrastructureError
from vringlab.lab import pinning
from vringlab.lab.pinning import Layout
from vringlab.transport import local
from vringlab.transport.local import Completed
from vringlab.transport.ssh import Machine


class HereMachine:
    """This machine in place of one over SSH: the same shell text, the same results."""

    name = "here"

    def run(self, command: str, *, check: bool = True, remedy: str = "") -> Completed:
        return local.run(["sh", "-c", command], timeout=60, check=check, remedy=remedy)


HERE = cast(Machine, HereMachine())


def test_one_processor_each() -> None:
    assert Layout.plan(4, 2) == Layout(tools=0, backend=1, vcpus=(2, 3))
    assert Layout.plan(64, 1) == Layout(tools=0, backend=1, vcpus=(2,))


@given(cpus=st.integers(0, 64), vcpus=st.integers(1, 64))
def test_a_plan_fits_or_is_refused(cpus: int, vcpus: int) -> None:
    if cpus < vcpus + 2:
        with pytest.raises(InfrastructureError, match=f"has {cpus} processors") as caught:
            Layout.plan(cpus, vcpus)
        assert str(vcpus + 2) in caught.value.message
        assert "VRINGLAB_LAB_CPUS" in caught.value.remedy
        return
    layout = Layout.plan(cpus, vcpus)
    used = [layout.tools, layout.backend, *layout.vcpus]
    assert len(set(used)) == len(used) == vcpus + 2
    assert set(used) <= set(range(cpus))
    assert layout.as_record()["vcpus"] == layout.vcpus


def test_no_drift_when_all_is_where_it_was_put() -> None:
    assert pinning.drift({10: 2, 11: 3}, {10: "2", 11: "3"}) == []
    assert pinning.drift({}, {}) == []


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({10: "0-3"}, "thread 10 is on 0-3 instead of processor 2"),
        ({10: "3"}, "thread 10 is on 3 instead of processor 2"),
        ({10: "gone"}, "thread 10 is on gone instead of processor 2"),
        ({}, "thread 10 is on gone instead of processor 2"),
        ({10: "12"}, "thread 10 is on 12 instead of processor 2"),
    ],
)
def test_drift_is_told_in_words(seen: dict[int, str], words: str) -> None:
    assert pinning.drift({10: 2}, seen) == [words]


def test_pinned_and_read_back_for_real() -> None:
    cpu = sorted(os.sched_getaffinity(0))[-1]
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            assert pinning.drift({process.pid: 10**6}, pinning.observe(HERE, {process.pid: 0}))
            pinning.pin(HERE, {process.pid: cpu})
            seen = pinning.observe(HERE, {process.pid: cpu})
            assert seen == {process.pid: str(cpu)}
            assert pinning.drift({process.pid: cpu}, seen) == []
        finally:
            process.kill()
    seen = pinning.observe(HERE, {process.pid: cpu, os.getpid(): cpu})
    assert seen[process.pid] == "gone"
    assert seen[os.getpid()] != "gone"


def test_a_thread_that_is_gone_cannot_be_pinned() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    with pytest.raises(InfrastructureError, match=str(process.pid)) as caught:
        pinning.pin(HERE, {process.pid: 0})
    assert "QEMU still runs" in caught.value.remedy


def test_a_processor_that_does_not_exist() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            with pytest.raises(InfrastructureError):
                pinning.pin(HERE, {process.pid: 4000})
        finally:
            process.kill()


def test_nothing_to_pin_asks_nobody() -> None:
    nobody = cast(Machine, None)
    pinning.pin(nobody, {})
    assert pinning.observe(nobody, {}) == {}
