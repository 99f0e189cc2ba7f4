"""Where the wall time of a run went, by named phase.

Phases nest: time in an inner phase counts there and not in the outer one, so the phases sum to
the total, with `idle` as the rest. One thread at a time enters phases: the one that runs the
campaign.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

Phase = Literal[
    "set-up", "build", "boot", "switch", "prepare", "measure", "count", "path", "collect", "analyse"
]

#: All phases in the order of a run; `idle` is what no phase claims.
PHASES: tuple[str, ...] = (
    "set-up",
    "build",
    "boot",
    "switch",
    "prepare",
    "measure",
    "count",
    "path",
    "collect",
    "analyse",
    "idle",
)


#: What is done in each phase, for a reader.
MEANINGS: Mapping[str, str] = {
    "set-up": "the KVM host is booted, or restored from a saved lab, and prepared",
    "build": "image, kernels and modules, as far as this was not done while the host came up",
    "boot": "guests are booted, or restored, until they answer",
    "switch": "arms are loaded and their build-ids checked",
    "prepare": "before and after each timed window: devices set, tools started, counters read",
    "measure": "the timed windows themselves",
    "count": "untimed runs around which instructions are counted",
    "path": "untimed passes that see which path the packets take",
    "collect": "samples are checked and written",
    "analyse": "tables are brought up to date",
    "idle": "none of these",
}


class Budget:
    """A stopwatch with phases; it starts when it is made.

    Args:
        clock: Seconds of a clock that never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = self._mark = clock()
        self._end: float | None = None
        self._spent: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._open: list[str] = ["idle"]

    def _settle(self) -> None:
        """Count the time since the last change for the phase that is open now."""
        if self._end is None:
            now = self._clock()
            self._spent[self._open[-1]] += now - self._mark
            self._mark = now

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Count the time of the `with` block for `name`, less that of phases inside it."""
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}; known: {', '.join(PHASES)}")
        self._settle()
        self._open.append(name)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def move(self, seconds: float, source: Phase | Literal["idle"], target: Phase) -> None:
        """Count `seconds` of `source` for `target` instead, at most what `source` has.

        A timed window lies inside a longer step, and only its length is known afterwards.
        """
        self._settle()
        moved = max(0.0, min(seconds, self._spent[source]))
        self._spent[source] -= moved
        self._spent[target] += moved

    def claim(self, outer: Phase | Literal["idle"], spent: Mapping[str, float]) -> None:
        """Give time of `outer` to finer phases that were counted elsewhere meanwhile.

        Args:
            outer: The phase in which the time was counted here.
            spent: Seconds by phase, as another budget has them.
        """
        for phase, seconds in spent.items():
            self.move(seconds, outer, phase)  # type: ignore[arg-type]  # names of phases

    def stop(self) -> None:
        """End the count; later phases add nothing."""
        self._settle()
        if self._end is None:
            self._end = self._mark

    @property
    def total(self) -> float:
        """Seconds since the start, up to `stop`."""
        return (self._clock() if self._end is None else self._end) - self._start

    def spent(self) -> dict[str, float]:
        """Seconds by phase in the order of `PHASES`; they sum to `total`."""
        self._settle()
        return dict(self._spent)

    def share(self, name: Phase) -> float:
        """The part of the wall time that went to one phase, 0 to 1."""
        spent = self.spent()
        total = sum(spent.values())
        return spent[name] / total if total > 0 else 0.0


def table(spent: Mapping[str, float], explain: bool = False) -> str:
    """Seconds and share by phase, one phase a line, those without time left out.

    Args:
        spent: Seconds by phase.
        explain: Say beside each what is done in it.
    """
    total = sum(spent.values())
    lines = [
        f"{name:<8} {seconds:9.1f} s  {seconds / total:6.1%}"
        + (f"  {MEANINGS.get(name, '')}" if explain else "")
        for name, seconds in spent.items()
        if seconds > 0
    ]
    return "\n".join([*lines, f"{'total':<8} {total:9.1f} s"])
