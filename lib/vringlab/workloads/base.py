"""What a workload is: prepared, run and parsed on a lab, and judged by its own checks.

A workload is one module in this package that defines `WORKLOAD`; `find` and `names` see it
without an edit elsewhere.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from vringlab.errors import UserError

if TYPE_CHECKING:
    from vringlab.lab.lab import Lab


class Params(BaseModel):
    """Base of a workload's parameters: one point of an experiment's matrix."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Metric:
    """One figure of a sample; `unit` is a name of the metric registry (`ns`, `1/s`, `percent`)."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True)
class Histogram:
    """A distribution as (bin midpoint in `unit`, count) pairs, ascending."""

    metric: str
    unit: str
    bins: tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class Outcome:
    """What one timed run of a workload gave.

    Attributes:
        metrics: The figures. An invalid outcome keeps those that could be read.
        histograms: Distributions, where the tool gives them.
        problems: Why the sample is invalid; empty for a valid one.
        warnings: What a reader should know though the sample is valid.
        started: UTC start of the timed window, ISO 8601.
        window_s: Length of the timed window in seconds.
        raw: Output of the tools exactly as printed, by file name.
        context: What was seen beside the figures (ring size in force, pinning seen, commands).
    """

    metrics: tuple[Metric, ...]
    histograms: tuple[Histogram, ...] = ()
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    started: str = ""
    window_s: float = 0.0
    raw: Mapping[str, bytes] = field(default_factory=dict)
    context: Mapping[str, object] = field(default_factory=dict)

    @property
    def valid(self) -> bool:
        """Whether the sample may reach a verdict."""
        return not self.problems

    @property
    def reason(self) -> str:
        """The reasons for invalidity in one line; empty when valid."""
        return "; ".join(self.problems)


class Workload(Protocol):
    """A documented benchmark.

    Attributes:
        name: Its name in experiments.
        summary: One line for `vringlab list`.
        params: The model of its parameters.
        checks: Its validity checks: name -> what it means when it fails.
    """

    name: str
    summary: str
    params: type[Params]
    checks: Mapping[str, str]

    def guest_options(self, points: list[Params]) -> dict[str, object]:
        """What the guest must be booted with so that all `points` can run in one boot.

        Returns keyword arguments of `vringlab.lab.guest.GuestSpec`.
        """
        ...

    def run(self, lab: Lab, params: Params, duration_s: float) -> Outcome:
        """Run once on the arm now loaded.

        Raises:
            InfrastructureError: the tools or machines failed (the cell is not done).
            MeasurementInvalid: never; an invalid measurement is an `Outcome` with problems.
        """
        ...


@cache
def _registry() -> dict[str, Workload]:
    found: dict[str, Workload] = {}
    for info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        module = importlib.import_module(f"vringlab.workloads.{info.name}")
        workload = getattr(module, "WORKLOAD", None)
        if workload is not None:
            found[workload.name] = workload
    return found


def names() -> list[str]:
    """Names of all workloads, sorted."""
    return sorted(_registry())


def find(name: str) -> Workload:
    """The workload of that name.

    Raises:
        UserError: there is none; the message lists those that exist.
    """
    try:
        return _registry()[name]
    except KeyError:
        raise UserError(
            f"unknown workload {name!r}", remedy=f"choose one of: {', '.join(names())}"
        ) from None


def parse_params(workload: Workload, values: Mapping[str, object]) -> Params:
    """Check `values` against the workload's parameters.

    Raises:
        UserError: an unknown name or a value out of range; says which are known.
    """
    try:
        return workload.params.model_validate(dict(values))
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
        )
        raise UserError(
            f"parameters of {workload.name} are not usable: {problems}",
            remedy=f"known parameters: {', '.join(workload.params.model_fields)}",
        ) from None
