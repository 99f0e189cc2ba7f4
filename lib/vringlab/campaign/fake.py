"""A session without machines, for tests and dry runs.

Every figure is drawn from a random generator, and everything it writes says so: the kind of its
host is `simulated`.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

from pydantic import Field

from vringlab.campaign.budget import Budget
from vringlab.campaign.experiment import Value
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
    ) -> None:
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

    def boot(self, boot: str, options: Mapping[str, object]) -> None:
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
        metrics, histogram = self._round_trips(scale)
        payload = params.get("payload")
        # As on the documented base, where such a message does not fit one receive buffer.
        short = workload.startswith("fio") and isinstance(payload, int) and payload > 3732
        problems = ("simulated short reads",) if short else ()
        return self._outcome(metrics, (histogram,), problems, duration_s)

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
