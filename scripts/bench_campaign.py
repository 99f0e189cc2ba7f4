"""What a campaign costs beside its measurements: by cell, as plans grow, and on many hosts at once.

    python scripts/bench_campaign.py                 # both tables, in Markdown
    python scripts/bench_campaign.py --cells 100000  # how large the large plan is
    python scripts/bench_campaign.py --hosts 10      # how many hosts are kept busy

No machine is measured: sessions answer at once (growth), or after a simulated while (hosts). The
small and the large plan have the same shape, 200 cells a boot as in a full profile, and are run in
turn, small ones before and after each large one, so that a slow moment falls on both.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vringlab.analysis.frames import load_run
from vringlab.campaign import experiment as experiments
from vringlab.campaign.experiment import Experiment, Profile, Value, WorkloadUse
from vringlab.campaign.fake import FakeSession, find
from vringlab.campaign.plan import Plan, make_plan
from vringlab.campaign.runner import Session, execute
from vringlab.campaign.store import Store
from vringlab.campaign.workers import Workers
from vringlab.workloads.base import Outcome

BLOCKS, PAYLOADS, ARMS = 5, 10, 4
CELLS_PER_BOOT = BLOCKS * PAYLOADS * ARMS

#: Seconds that simulated machines take, in the proportions of a real host with KVM.
BOOT_S, SWITCH_S, MEASURE_S = 2.0, 0.2, 0.5


def experiment(boots: int, blocks: int = BLOCKS, payloads: int = PAYLOADS) -> Experiment:
    """Three arms and a twin, of a workload that is only simulated."""
    profile = Profile(boots=boots, blocks_per_boot=blocks, duration_s=1)
    return experiments.load("vsock-direct-enqueue").model_copy(
        update={
            "workloads": (
                WorkloadUse(workload="fake", matrix={"payload": list(range(1, payloads + 1))}),
            ),
            "profiles": dict.fromkeys(experiments.PROFILES, profile),
        }
    )


@dataclass(frozen=True)
class Cost:
    """Seconds of one step: of the clock, and of the processor."""

    wall: float
    cpu: float


def timed(step: Callable[[], object]) -> Cost:
    """What a step takes."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


class Quick(FakeSession):
    """Answers at once, and draws no random figures: those would be most of the cost."""

    kept: Outcome | None = None

    def measure(self, workload: str, params: Mapping[str, Value], duration_s: float) -> Outcome:
        """The first measurement's figures again."""
        if self.kept is None:
            self.kept = super().measure(workload, params, duration_s)
        self.calls.clear()
        return self.kept


def growth(cells: int, folder: Path) -> dict[str, Cost]:
    """Cost of each step of a run of so many cells."""
    boots = cells // CELLS_PER_BOOT
    made: list[Plan] = []
    stores: list[Store] = []
    costs = {
        "plan": timed(lambda: made.append(make_plan(experiment(boots), "quick", 1, find=find))),
        "create": timed(lambda: stores.append(Store.create(made[0], folder))),
    }
    (store,) = stores
    with store:
        costs["run and store"] = timed(lambda: execute(store, Quick, find=find))
    costs["open and ask what is left"] = timed(lambda: _reopen(store.path))
    costs["load for analysis"] = timed(lambda: load_run(store.path))
    return costs


def _reopen(path: Path) -> None:
    with Store.open(path) as store:
        assert not store.remaining()


def growth_table(large: int, repeats: int, folder: Path | None) -> str:
    """Cost per cell of the large plan against the small one."""
    small = 1000
    found: dict[int, list[dict[str, Cost]]] = {small: [], large: []}
    for _ in range(repeats):
        # As many small runs as give a steady figure, on both sides of the large one.
        for cells in (small, small, small, large, small, small, small):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                found[cells].append(growth(cells, Path(place)))
    lines = [
        f"| step | {small} cells, us a cell (CPU) | {large} cells, us a cell (CPU) "
        "| ratio, clock | ratio, CPU |",
        "|---|---|---|---|---|",
    ]
    total = {size: {"wall": 0.0, "cpu": 0.0} for size in found}
    for step in found[small][0]:
        cost: dict[tuple[int, str], float] = {}
        for size, runs in found.items():
            for kind in ("wall", "cpu"):
                middle = statistics.median(getattr(run[step], kind) for run in runs) / size
                cost[size, kind] = middle
                total[size][kind] += middle
        lines.append(_line(step, cost, small, large))
    whole = {(size, kind): value for size, kinds in total.items() for kind, value in kinds.items()}
    lines.append(_line("all", whole, small, large))
    return "\n".join(lines)


def _line(step: str, cost: Mapping[tuple[int, str], float], small: int, large: int) -> str:
    shown = [
        f"{1e6 * cost[size, 'wall']:.0f} ({1e6 * cost[size, 'cpu']:.0f})" for size in (small, large)
    ]
    ratios = [f"{cost[large, kind] / cost[small, kind]:.2f}" for kind in ("wall", "cpu")]
    return f"| {step} | {shown[0]} | {shown[1]} | {ratios[0]} | {ratios[1]} |"


class Slow(FakeSession):
    """A host whose machines take their time; counts how long it was kept busy."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, delay_s=0.0)
        self._since = time.monotonic()
        self._busy = 0.0

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds)
        self._busy += seconds

    def boot(self, boot: str, options: Mapping[str, object], edition: int = 0) -> None:
        """Boot, simulated."""
        super().boot(boot, options, edition)
        self._wait(BOOT_S)

    def switch(self, arm: str) -> str:
        """Load an arm, simulated."""
        self._wait(SWITCH_S)
        return super().switch(arm)

    def measure(self, workload: str, params: Mapping[str, Value], duration_s: float) -> Outcome:
        """Measure, simulated."""
        self._wait(MEASURE_S)
        return super().measure(workload, params, duration_s)

    def provenance(self) -> dict[str, object]:
        """With the time that the host was busy, and the time since it was opened."""
        known = {"name": "simulated", "busy_s": self._busy, "s": time.monotonic() - self._since}
        return {"host": known}


def _open(*, on_step: Callable[[str], None], seed: int) -> AbstractContextManager[Session]:  # noqa: ARG001
    return Slow(seed)


def busy(hosts: int, boots: int) -> tuple[float, float]:
    """How much of their time hosts are busy, and how long the run takes, s."""
    names = [f"host-{n + 1}" for n in range(hosts)]
    made = make_plan(experiment(hosts * boots, 2, 5), "quick", 1, find=find)
    stop = threading.Event()
    with (
        tempfile.TemporaryDirectory() as place,
        Workers(names, stop=stop) as workers,
        Store.create(made, Path(place)) as store,
    ):
        sessions = {
            name: partial(workers.session, name, partial(_open, seed=seed))
            for seed, name in enumerate(names)
        }
        begin = time.monotonic()
        execute(store, sessions, find=find, stop=stop)
        took = time.monotonic() - begin
        known = [each["host"] for each in store.provenance()["hosts"].values()]
    assert len(known) == hosts
    return sum(host["busy_s"] for host in known) / sum(host["s"] for host in known), took


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, default=100_000, help="cells of the large plan")
    parser.add_argument("--repeats", type=int, default=1, help="large runs")
    parser.add_argument("--folder", type=Path, help="where runs are written; they are removed")
    parser.add_argument("--hosts", type=int, default=10, help="hosts to keep busy")
    parser.add_argument("--boots", type=int, default=2, help="boots of each host")
    parser.add_argument("--only", choices=("growth", "hosts"), help="only one of the tables")
    chosen = parser.parse_args()
    if chosen.only != "hosts":
        print(growth_table(chosen.cells, chosen.repeats, chosen.folder))
    if chosen.only != "growth":
        share, took = busy(chosen.hosts, chosen.boots)
        print(f"\n{chosen.hosts} hosts were busy {share:.1%} of {took:.1f} s")


if __name__ == "__main__":
    main()
