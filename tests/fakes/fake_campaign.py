"""A small campaign without machines, shared by tests and run by them in processes to be killed.

As a program: `fake_campaign.py run FOLDER N` begins a run in FOLDER that stalls in its N-th
measurement; `fake_campaign.py sweep FOLDER STEP` kills children at every STEP-th file operation
and resumes each.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from vringlab.analysis.frames import load_run
from vringlab.campaign import experiment as experiments
from vringlab.campaign.catalogue import list_runs
from vringlab.campaign.experiment import Experiment, Profile, Value, WorkloadUse
from vringlab.campaign.fake import FakeSession, find
from vringlab.campaign.plan import Plan, make_plan
from vringlab.campaign.progress import PlainDisplay
from vringlab.campaign.runner import Interrupted, RunResult, execute
from vringlab.campaign.store import Store
from vringlab.workloads.base import Outcome


def experiment(boots: int = 3, blocks: int = 3, payloads: int = 1) -> Experiment:
    """Three arms and a twin: `4 * payloads` cells a block."""
    profile = Profile(boots=boots, blocks_per_boot=blocks, duration_s=1)
    return experiments.load("vsock-direct-enqueue").model_copy(
        update={
            "workloads": (
                WorkloadUse(workload="fake", matrix={"payload": list(range(1, payloads + 1))}),
            ),
            "profiles": dict.fromkeys(experiments.PROFILES, profile),
        }
    )


def plan(boots: int = 3, blocks: int = 3, payloads: int = 1) -> Plan:
    """The plan of such an experiment."""
    return make_plan(experiment(boots, blocks, payloads), "quick", 1, find=find)


class Stalling(FakeSession):
    """A session that measures until the N-th time, which takes long enough to be killed in."""

    def __init__(self, stall_at: int) -> None:
        super().__init__()
        self._left = stall_at

    def measure(self, workload: str, params: Mapping[str, Value], duration_s: float) -> Outcome:
        """Measure, or stall."""
        self._left -= 1
        if self._left == 0:
            time.sleep(600)
        return super().measure(workload, params, duration_s)


def run(folder: Path, made: Plan, stall_at: int = 0) -> RunResult:
    """Begin a run in `folder`, or resume the one that is there."""
    found = [info for info in list_runs(folder) if info.state != "damaged"]
    store = Store.open(found[0].path) if found else Store.create(made, folder)
    with store, PlainDisplay(sys.stdout) as display:
        return execute(store, lambda: Stalling(stall_at), display, find=find)


def _dying(folder: Path, made: Plan, at: int) -> None:
    """Run until the `at`-th operation that changes a file in `folder`, then die by SIGKILL."""
    seen = 0
    changes = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}

    def count(event: str, args: tuple[object, ...]) -> None:
        nonlocal seen
        writes = event == "open" and isinstance(args[2], int) and args[2] & os.O_ACCMODE
        if (event in changes or writes) and str(folder) in str(args[0]):
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    run(folder, made)


def _child(action: str, folder: Path, made: Plan, at: int = 0) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if action == "die":
                _dying(folder, made, at)
            else:
                run(folder, made)
        except BaseException as error:
            print(f"{action}, operation {at}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def sweep(root: Path, step: int) -> int:
    """Kill a child at each `step`-th operation, resume in another, and check what is there.

    Returns:
        The number of operations after which the run ended by itself.
    """
    made = plan(boots=1, blocks=2)
    at = 1
    while True:
        folder = root / f"{at:04}"
        folder.mkdir()
        ended = _child("die", folder, made, at)
        for path in (info.path for info in list_runs(folder)):
            partial = load_run(path)
            assert len(partial.samples["cell_id"].unique()) <= len(made.cells)
        assert _child("resume", folder, made) == 0, f"cannot resume after operation {at}"
        (info,) = list_runs(folder)
        assert info.state == "complete", (at, info)
        frames = load_run(info.path)
        assert frames.complete
        assert not frames.notes, (at, frames.notes)
        assert not frames.samples.duplicated(["cell_id", "metric"]).any(), at
        bins = frames.histograms.groupby("cell_id")["count"].sum()
        assert set(bins) == {400}, (at, set(bins))
        assert frames.samples.groupby("block")["boot"].nunique().eq(1).all(), at
        left = list(info.path.rglob(".new-*"))
        assert not left, (at, left)
        if ended == 0:
            return at
        assert ended == -signal.SIGKILL, (at, ended)
        at += step


def main() -> None:
    """See the module."""
    action, folder = sys.argv[1], Path(sys.argv[2])
    if action == "sweep":
        print(sweep(folder, int(sys.argv[3])))
        return
    try:
        result = run(folder, plan(), int(sys.argv[3]))
    except Interrupted as stop:
        print(stop)
        sys.exit(130)
    print(f"{result.status} measured {result.measured}")


if __name__ == "__main__":
    main()
