"""A session without machines, for tests and dry runs.

Every figure is drawn from a random generator, and everything it writes says so: the kind of its
host is `simulated`.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from pydantic import Field

from vringlab.campaign.budget import Budget
from vringlab.campaign.experiment import Probes, Value
from vringlab.campaign.paths import PathPass, judge
from vringlab.workloads.base import Histogram, Metric, Outcome, Params, Workload

HOST_KIND = "simulated"

# Of the order of a ping-pong through an emulated host, so that axes look familiar. No measurement.
_ROUND_TRIP_NS = 1.2e6
_PACKETS_PER_S = 6e5

_MESSAGES = 400


class FakeParams(Params):
    """Parameters of the stand-in workload."""

    payload: int = Field(default=64, ge=1, le=65536)
    mode: Literal["plain", "turned"] = "plain"


@dataclass
class FakeWorkload:
    """A workload that only `FakeSession` can measure."""

    name: str = "fake"
    summary: str = "Random figures, for tests."
    params: type[Params] = FakeParams
    checks: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)

    def guest_options(self, points: list[Params]) -> dict[str, object]:  # noqa: ARG002
        """The options that it was made with, whatever the points."""
        return dict(self.options)

    def run(self, lab: object, params: Params, duration_s: float) -> Outcome:
        """Never: there is no machine to run on."""
        raise NotImplementedError("a fake workload is measured by FakeSession")


def find(name: str) -> Workload:
    """A stand-in for any workload, to pass where workloads are looked up."""
    return FakeWorkload(name)


class FakeSession:
    """A session that measures nothing and answers at once. A context manager.

    The same seed, boot and order of calls give the same figures.

    Args:
        seed: What the figures are drawn from.
        effects: Time per operation by arm, as a multiple of the reference's; 1 where not named.
        noise: Standard deviation of a sample's log time.
        boot_noise: Standard deviation of a boot's log offset, shared by all its samples.
        delay_s: Seconds that each measurement takes.
        faults: Errors to raise instead of the n-th measurement of this session, from 1.
        probes: What `paths` pretends to count; nothing when None.

    Attributes:
        calls: Every call as a tuple of its name and arguments, for tests.
    """

    host = "fake"
    host_kind = HOST_KIND

    def __init__(
        self,
        seed: int = 0,
        effects: Mapping[str, float] | None = None,
        noise: float = 0.05,
        boot_noise: float = 0.1,
        delay_s: float = 0.0,
        faults: Mapping[int, BaseException] | None = None,
        probes: Probes | None = None,
    ) -> None:
        self.sees_paths = probes is not None
        self._probes = probes
        self.time_budget = Budget()
        self.calls: list[tuple[object, ...]] = []
        self._seed = seed
        self._effects = dict(effects or {})
        self._noise = noise
        self._boot_noise = boot_noise
        self._delay_s = delay_s
        self._faults = dict(faults or {})
        self._measured = 0
        self._boot = ""
        self._offset = 0.0
        self._arm = ""
        self._draw = random.Random(seed)

    def __enter__(self) -> Self:
        self.calls.append(("enter",))
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append(("exit",))

    def boot(self, boot: str, options: Mapping[str, object], edition: int = 0) -> None:  # noqa: ARG002 - protocol
        """Pretend to boot a guest: draws the offset of this lifetime."""
        self.calls.append(("boot", boot, dict(options)))
        self._draw = random.Random(f"{self._seed}/{boot}")
        self._offset = self._draw.gauss(0.0, self._boot_noise)
        self._boot, self._arm = boot, ""

    def switch(self, arm: str) -> str:
        """Pretend to load an arm; its build-id is made from its name."""
        self.calls.append(("switch", arm))
        self._arm = arm
        return arm.encode().hex()

    def measure(self, workload: str, params: Mapping[str, Value], duration_s: float) -> Outcome:
        """Draw the figures of one measurement.

        Raises:
            BaseException: the fault that was asked for.
        """
        self._measured += 1
        self.calls.append(("measure", self._arm, workload, dict(params)))
        fault = self._faults.get(self._measured)
        if fault is not None:
            raise fault
        if self._delay_s:
            time.sleep(self._delay_s)
        scale = self._effects.get(self._arm, 1.0) * math.exp(
            self._offset + self._draw.gauss(0.0, self._noise)
        )
        if workload.startswith("pktgen"):
            return self._outcome(self._packets(scale), (), (), duration_s)
        if workload == "netperf":
            return self._outcome(self._netperf(params, scale), (), (), duration_s)
        if workload == "vsock-stream":
            return self._outcome(self._stream(params, scale), (), (), duration_s)
        metrics, histogram = self._round_trips(scale)
        payload = params.get("payload")
        # As on the documented base, where such a message does not fit one receive buffer.
        short = workload.startswith("fio") and isinstance(payload, int) and payload > 3732
        problems = ("simulated short reads",) if short else ()
        return self._outcome(metrics, (histogram,), problems, duration_s)

    def paths(self, arm: str, points: Sequence[tuple[str, Mapping[str, Value]]]) -> list[PathPass]:
        """Draw a count for every counter; see `campaign.runner.Session`."""
        assert self._probes is not None, "sees_paths says so"
        self.calls.append(("paths", arm, [dict(params) for _, params in points]))
        found = []
        for workload, params in points:
            counts = {
                counter.name: self._draw.randrange(1, 1000) for counter in self._probes.counters
            }
            note = "simulated: nothing was counted"
            found.append(
                judge(self._probes, arm, workload, params, counts, tool="simulated", notes=[note])
            )
        return found

    def provenance(self) -> dict[str, object]:
        """Says that nothing was measured."""
        return {
            "host": {"name": self.host, "kind": self.host_kind},
            "note": "simulated: no machine was measured, every figure is a random number",
        }

    def _round_trips(self, scale: float) -> tuple[tuple[Metric, ...], Histogram]:
        times = sorted(
            round(_ROUND_TRIP_NS * scale * self._draw.lognormvariate(0.0, 0.3))
            for _ in range(_MESSAGES)
        )
        mean = sum(times) / len(times)
        metrics = [Metric("rtt_mean", mean, "ns")]
        for name, part in (("1", 1), ("50", 50), ("90", 90), ("99", 99), ("99.9", 99.9)):
            # The nearest-rank percentile: the smallest value with at least `part` % at or below.
            rank = max(1, math.ceil(part / 100 * len(times)))
            metrics.append(Metric(f"rtt_p{name}", float(times[rank - 1]), "ns"))
        metrics.append(Metric("round_trips", 1e9 / mean, "1/s"))
        # Bins of three significant digits.
        bins = Counter(float(f"{value:.3g}") for value in times)
        return tuple(metrics), Histogram("rtt", "ns", tuple(sorted(bins.items())))

    def _packets(self, scale: float) -> tuple[Metric, ...]:
        sent = _PACKETS_PER_S / scale
        return (
            Metric("pps_tx", sent, "1/s"),
            Metric("pps_rx", sent * self._draw.uniform(0.97, 1.0), "1/s"),
            Metric("tx_interrupts", 2e4 * scale, "1/s"),
            Metric("kicks", sent / 256, "1/s"),
        )

    def _netperf(self, params: Mapping[str, Value], scale: float) -> tuple[Metric, ...]:
        """Rates that rise with size and sessions until the machine is full."""
        size, sessions = int(params.get("size", 64)), int(params.get("sessions", 1))
        rr = params.get("direction") == "rr"
        # Faster arms use less processor, as this seed has it, and are hardly faster.
        rate = (8e3 if rr else 2e9) * min(4.0, sessions**0.5) / scale**0.3
        rate *= size**-0.1 if rr else size / (size + 2000)
        name, unit = ("transactions", "1/s") if rr else ("throughput", "bit/s")
        return (*_per_cpu(name, rate, unit, 90 * scale), *self._beside(scale))

    def _beside(self, scale: float) -> tuple[Metric, ...]:
        return (
            Metric("vhost_cpu", 55 * scale, "percent"),
            Metric("vhost_wakeups", 9e3 * scale * self._draw.uniform(0.9, 1.1), "1/s"),
            Metric("tx_interrupts", 4e3 * self._draw.uniform(0.8, 1.2), "1/s"),
        )

    def _stream(self, params: Mapping[str, Value], scale: float) -> tuple[Metric, ...]:
        size = float(str(params.get("payload", 64)).partition("-")[0])
        threads = int(params.get("threads", 1))
        rate = 4e9 * size / (size + 20_000) * min(3.0, threads**0.4) / scale
        slab = 2e5 * threads * scale
        return (
            *_per_cpu("throughput", rate, "bit/s", 120 * scale**0.5),
            Metric("guest_cpu", 95.0, "percent"),
            *(
                Metric(name, slab * part * self._draw.uniform(0.8, 1.2), "byte")
                for name, part in (
                    ("slab_peak", 1.0),
                    ("slab_median", 0.6),
                    ("host_slab_peak", 0.3),
                    ("host_slab_median", 0.1),
                )
            ),
        )

    def _outcome(
        self,
        metrics: tuple[Metric, ...],
        histograms: tuple[Histogram, ...],
        problems: tuple[str, ...],
        duration_s: float,
    ) -> Outcome:
        text = "".join(f"{metric.name} {metric.value!r} {metric.unit}\n" for metric in metrics)
        return Outcome(
            metrics=metrics,
            histograms=histograms,
            problems=problems,
            window_s=duration_s,
            raw={"simulated.txt": f"simulated, not measured\n{text}".encode()},
            context={"simulated": True},
        )


def _per_cpu(name: str, rate: float, unit: str, cpu: float) -> tuple[Metric, ...]:
    """A rate, the processor that it took, and their ratio."""
    return (
        Metric(name, rate, unit),
        Metric("cpu", cpu, "percent"),
        Metric(f"{name}_per_cpu", rate / cpu, f"{unit}/percent"),
    )
