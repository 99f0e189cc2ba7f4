"""Simulated hosts for dask workers, each with a real process that must end with it.

As a program: `fake_hosts.py FOLDER` begins a run on two of them in FOLDER/runs whose measurements
take for ever from the third cell of each host on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

from tests.fakes.fake_campaign import plan

from vringlab.campaign.experiment import Value
from vringlab.campaign.fake import FakeSession, find
from vringlab.campaign.progress import PlainDisplay
from vringlab.campaign.runner import Interrupted, SessionFactory, execute
from vringlab.campaign.seat import Opener
from vringlab.campaign.store import Store
from vringlab.campaign.workers import Workers
from vringlab.errors import InfrastructureError, MeasurementInvalid
from vringlab.transport import local
from vringlab.workloads.base import Outcome


class Host(FakeSession):
    """A host that writes down what it measures, and does as it is told in `act`.

    Args:
        name: Its name.
        folder: Where it writes `NAME.log`.
        act: What to do instead of the n-th measurement: `die`, `stall`, `invalid` or `fail`.
    """

    def __init__(self, name: str, folder: Path, act: Mapping[int, str]) -> None:
        super().__init__(seed=len(name), delay_s=0.01)
        self._log = folder / f"{name}.log"
        self._act = dict(act)

    def measure(self, workload: str, params: Mapping[str, Value], duration_s: float) -> Outcome:
        """Measure, or do as told."""
        act = self._act.get(self._measured + 1)
        with self._log.open("a") as log:
            log.write(f"measure {self._boot} {self._arm} {params['payload']}\n")
        if act == "die":
            os._exit(9)
        if act == "invalid":
            self._measured += 1
            raise MeasurementInvalid("rx stayed 0")
        if act == "fail":
            self._measured += 1
            raise InfrastructureError("fio is missing", remedy="install fio", stderr="no fio")
        deadline = time.monotonic() + 300
        while act == "stall" and time.monotonic() < deadline:
            # Waits for machines are made of short ones.
            time.sleep(0.05)
        with self.time_budget.phase("set-up"):
            time.sleep(0.002)
        return super().measure(workload, params, duration_s)


@contextmanager
def open_host(
    *, on_step: Callable[[str], None], name: str, folder: Path, act: Mapping[int, str]
) -> Iterator[Host]:
    """A simulated host with a process of its own; `NAME.pid` has its number."""
    on_step(f"opening in process {os.getpid()}")
    try:
        with local.companion(["sleep", "300"], log=folder / "sleep.out") as process:
            (folder / f"{name}.pid").write_text(f"{process.pid}\n{os.getpid()}\n")
            with Host(name, folder, act) as session:
                yield session
    finally:
        (folder / f"{name}.closed").touch()


def opener(name: str, folder: Path, act: Mapping[int, str] | None = None) -> Opener:
    """What a worker is sent."""
    return cast(Opener, partial(open_host, name=name, folder=folder, act=act or {}))


def on_workers(
    workers: Workers, folder: Path, acts: Mapping[str, Mapping[int, str]]
) -> dict[str, SessionFactory]:
    """The hosts of a run, by name."""
    return {
        name: partial(workers.session, name, opener(name, folder, act))
        for name, act in acts.items()
    }


def main() -> None:
    """See the module."""
    folder = Path(sys.argv[1])
    stop = threading.Event()
    with (
        Workers(["a", "b"], stop=stop) as workers,
        Store.create(plan(boots=4), folder / "runs") as store,
        PlainDisplay(sys.stdout) as display,
    ):
        hosts = on_workers(workers, folder, {name: {3: "stall"} for name in ("a", "b")})
        try:
            execute(store, hosts, display, find=find, stop=stop)
        except Interrupted as error:
            print(error)
            sys.exit(130)


if __name__ == "__main__":
    main()
