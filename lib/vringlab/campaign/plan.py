"""The order in which an experiment's cells are measured. Pure: no machine, no clock, no file.

A block is one round of all arms, the twin of the reference arm among them. An arm is loaded once
per block and then measured at every workload point, in an order that is drawn anew for each block
and is the same for all its arms: the time since the switch is then the same for the cells that
are compared. Where a profile says `block: point`, a round is a block for each point instead: more
switches, but no more than one point is measured again when a run is killed.

The order of arms follows a Williams design: each arm stands at each position equally often, and
follows each other arm equally often, so that neither drift within a block nor what one arm leaves
behind favours another. With an even number of arms n that takes n blocks; with an odd number 2n,
of which each half is balanced over positions. Arms are assigned to the design's letters, and the
design's rows to blocks, at random for each design.

Source: E. J. Williams, "Experimental designs balanced for the estimation of residual effects of
treatments", Australian Journal of Scientific Research, Series A, 2 (1949), pages 149-168.
"""

from __future__ import annotations

import gc
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from vringlab.campaign.experiment import TWIN_SUFFIX, Experiment, FindWorkload, Point, Value
from vringlab.errors import UserError
from vringlab.workloads import base

#: Version of plan.json. A reader refuses versions that it does not know.
FORMAT = 1

# File systems allow 255 bytes; the rest is for suffixes and for paths shown in one line.
_MAX_ID = 120

T = TypeVar("T")


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep the cycle collector still while a plan is built.

    It would look through all cells made so far again and again, in search of cycles that they
    cannot form: with 100,000 cells that doubled the cost of reading one (measured).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement of the plan.

    Attributes:
        cell_id: Its name, unique in the plan and usable as a folder's name.
        boot: The planned guest lifetime, `b01`. A boot that had to be repeated measures under
            another identity, which is kept with the sample.
        block: Number of the block, from 1, counted through all boots.
        position: Order within the block, from 1.
        arm: The arm to load.
        arm_name: The name under which its samples are kept: the arm, or the arm with `.aa`.
        workload: Name of the workload.
        params: All parameters of the workload.
        duration_s: Length asked for of the timed window, in seconds.
    """

    cell_id: str
    boot: str
    block: int
    position: int
    arm: str
    arm_name: str
    workload: str
    params: Mapping[str, Value]
    duration_s: float


@dataclass(frozen=True)
class Plan:
    """All cells of one run in the order of measuring.

    Attributes:
        experiment: Name of the experiment.
        title: Its title.
        profile: Name of the profile.
        seed: What the order was drawn from.
        base_kernel: Base kernel of all arms.
        module: The module that is swapped.
        side: Where it is loaded: `guest` or `host`.
        reference: The arm against which the others are compared.
        arms: Names as kept with the samples, the twin last when there is one.
        overrides: Parameters that the user replaced (`-p`), as given.
        cells: The cells, in order.
        restores: How many boots, the first ones, may be restored from saved labs.
        count_instructions: Whether instructions are counted beside the time.
    """

    experiment: str
    title: str
    profile: str
    seed: int
    base_kernel: str
    module: str
    side: str
    reference: str
    arms: tuple[str, ...]
    overrides: Mapping[str, Sequence[Value]]
    cells: tuple[Cell, ...]
    restores: int = 0
    count_instructions: bool = False

    @cached_property
    def block_sizes(self) -> Mapping[int, int]:
        """Number of cells by block."""
        return Counter(cell.block for cell in self.cells)

    @cached_property
    def params(self) -> tuple[str, ...]:
        """Names of all parameters of all workloads, in order of appearance."""
        return tuple(dict.fromkeys(name for cell in self.cells for name in cell.params))

    @property
    def twin(self) -> str | None:
        """Name of the reference arm's twin, or None where the plan has no A/A pair."""
        name = self.reference + TWIN_SUFFIX
        return name if name in self.arms else None

    @cached_property
    def boots(self) -> tuple[str, ...]:
        """Planned guest lifetimes in order."""
        return tuple(dict.fromkeys(cell.boot for cell in self.cells))

    def edition(self, boot: str) -> int:
        """Which saved lab a planned boot is restored from; 0 when it boots cold."""
        number = self.boots.index(boot) + 1
        return number if number <= self.restores else 0

    @property
    def measuring_s(self) -> float:
        """Sum of the timed windows asked for, in seconds; boots and switches come on top."""
        return sum(cell.duration_s for cell in self.cells)

    def points(self, workload: str) -> list[Mapping[str, Value]]:
        """The parameter points of one workload, each once, in order of appearance."""
        found = {
            json.dumps(dict(cell.params), sort_keys=True): cell.params
            for cell in self.cells
            if cell.workload == workload
        }
        return list(found.values())

    @property
    def workloads(self) -> tuple[str, ...]:
        """Names of the workloads in order of appearance."""
        return tuple(dict.fromkeys(cell.workload for cell in self.cells))

    def to_json(self) -> str:
        """The plan as the text of plan.json."""
        head = {
            "format": FORMAT,
            "experiment": self.experiment,
            "title": self.title,
            "profile": self.profile,
            "seed": self.seed,
            "base_kernel": self.base_kernel,
            "module": self.module,
            "side": self.side,
            "reference": self.reference,
            "arms": list(self.arms),
            "overrides": {name: list(values) for name, values in self.overrides.items()},
            "restores": self.restores,
            "count_instructions": self.count_instructions,
        }
        # One line per cell keeps a plan readable and its differences small.
        cells = ",\n".join(json.dumps(cell_document(cell)) for cell in self.cells)
        return f'{json.dumps(head, indent=1)[:-2]},\n "cells": [\n{cells}\n]}}\n'

    @classmethod
    @_without_collection()
    def from_json(cls, text: str, source: str = "plan.json") -> Plan:
        """The plan in the text of a plan.json.

        Args:
            text: The file's content.
            source: What to call it in an error.

        Raises:
            UserError: the text is damaged, or of a format that this version does not know.
        """
        remedy = "restore the file from a copy, or start a new run"
        try:
            document = json.loads(text)
            found = document["format"]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{source} is damaged: no complete JSON with a format", remedy=remedy
            ) from None
        if found != FORMAT:
            raise UserError(
                f"{source} has format {found}; this version of vringlab reads {FORMAT}",
                remedy="use the version of vringlab that wrote the run",
            )
        try:
            fields = {key: value for key, value in document.items() if key != "format"}
            fields["arms"] = tuple(fields["arms"])
            fields["cells"] = tuple(Cell(**cell) for cell in fields["cells"])
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise UserError(f"{source} is damaged: {error}", remedy=remedy) from None


def cell_document(cell: Cell) -> dict[str, Any]:
    """A cell as a JSON document: the fields of `Cell` by name."""
    return {name: getattr(cell, name) for name in Cell.__slots__}


@_without_collection()
def make_plan(
    experiment: Experiment,
    profile: str,
    seed: int,
    overrides: Mapping[str, Sequence[Value]] | None = None,
    arms: Sequence[str] = (),
    find: FindWorkload = base.find,
) -> Plan:
    """Plan a run: the same arguments give the same plan.

    A plan with more boots begins with the cells of the plan with fewer, as long as their ids
    need no more digits.

    Args:
        experiment: What to measure.
        profile: How much of it.
        seed: What to draw the order from.
        overrides: Values by parameter that replace those of the experiment (`-p`).
        arms: Arms to measure; the profile's when empty. The reference is always added.
        find: Finds a workload by name.

    Raises:
        UserError: an unknown profile, arm, parameter or value.
    """
    overrides = {name: list(values) for name, values in (overrides or {}).items()}
    points = experiment.override(overrides, find).points(profile, find)
    measure = experiment.profile(profile)
    chosen = [(arm, arm) for arm in experiment.arms_of(profile, arms)]
    if measure.aa:
        chosen.append((experiment.reference, experiment.reference + TWIN_SUFFIX))
    rounds = measure.boots * measure.blocks_per_boot
    each = len(points) if measure.block == "point" else 1
    digits = [
        max(2, len(str(n)))
        for n in (measure.boots, rounds * each, len(chosen) * len(points) // each)
    ]
    suffixes = {id(point): _suffix(point.workload, point.params) for point in points}

    cells: list[Cell] = []
    orders = _arm_orders(chosen, seed)
    visits: list[list[Point]] = []
    for number in range(1, rounds * each + 1):
        round_number = (number - 1) // each + 1
        boot = f"b{(round_number - 1) // measure.blocks_per_boot + 1:0{digits[0]}}"
        if not visits:
            order = _shuffled(points, _draw(seed, "points", round_number))
            visits = [[point] for point in order] if measure.block == "point" else [order]
        block, position = number, 0
        visit = visits.pop(0)
        for arm, arm_name in next(orders):
            for point in visit:
                position += 1
                start = f"{boot}-k{block:0{digits[1]}}-p{position:0{digits[2]}}-{arm_name}"
                cells.append(
                    Cell(
                        cell_id=f"{start}-{suffixes[id(point)]}"[:_MAX_ID],
                        boot=boot,
                        block=block,
                        position=position,
                        arm=arm,
                        arm_name=arm_name,
                        workload=point.workload,
                        params=point.params,
                        duration_s=point.duration_s,
                    )
                )
    return Plan(
        experiment=experiment.name,
        title=experiment.title,
        profile=profile,
        seed=seed,
        base_kernel=experiment.base_kernel,
        module=experiment.module,
        side=experiment.side,
        reference=experiment.reference,
        arms=tuple(name for _, name in chosen),
        overrides=overrides,
        cells=tuple(cells),
        restores=measure.restores,
    )


def guest_options(plan: Plan, find: FindWorkload = base.find) -> dict[str, object]:
    """How to boot a guest in which every cell of the plan can be measured.

    Each workload says what it needs for all of its points. Lists of one option add up; any other
    option must be the same wherever it is named.

    Raises:
        UserError: two workloads contradict each other.
    """
    merged: dict[str, object] = {}
    source: dict[str, str] = {}
    for name in plan.workloads:
        workload = find(name)
        points = [base.parse_params(workload, params) for params in plan.points(name)]
        for key, value in workload.guest_options(points).items():
            before = merged.get(key, value)
            if isinstance(before, list | tuple) and isinstance(value, list | tuple):
                merged[key] = [*before, *(item for item in value if item not in before)]
            elif before == value:
                merged[key] = value
            else:
                raise UserError(
                    f"{source[key]} needs a guest with {key}={before!r} and {name} one with "
                    f"{key}={value!r}",
                    remedy="measure them in two runs: select the points of one with -p",
                )
            source[key] = name
    return merged


def _suffix(workload: str, params: Mapping[str, Value]) -> str:
    shown = ",".join(f"{name}={value}" for name, value in params.items())
    # The id is a folder's name on the user's disk: nothing that a shell or a path would read.
    return re.sub(r"[^A-Za-z0-9_.,=+-]", "_", f"{workload}-{shown}" if shown else workload)


def _draw(seed: int, purpose: str, number: int) -> random.Random:
    """A generator of its own for each purpose and block, so that a longer plan only adds."""
    return random.Random(f"{seed}/{purpose}/{number}")


def _shuffled(items: Sequence[T], draw: random.Random) -> list[T]:
    # Python promises the same `random()` for a seed in every version, of `shuffle` it does not.
    return sorted(items, key=lambda _: draw.random())


def _arm_orders(arms: Sequence[T], seed: int) -> Iterator[list[T]]:
    """Orders of the arms for one block after another, without end."""
    number = 0
    while True:
        draw = _draw(seed, "arms", number)
        letters = _shuffled(arms, draw)
        for square in _williams(len(arms)):
            for row in _shuffled(square, draw):
                yield [letters[letter] for letter in row]
        number += 1


def _williams(n: int) -> list[list[list[int]]]:
    """Latin squares that together are balanced for first-order carry-over: one, or two for odd n.

    The first row zigzags 0, 1, n-1, 2, n-2, ...: the steps between neighbours are all different
    modulo n, so adding 0..n-1 to it gives every ordered pair once when n is even. For odd n each
    step occurs in one direction only, and the mirror image brings the other.
    """
    zigzag = [0]
    for step in range(1, n):
        zigzag.append((step + 1) // 2 if step % 2 else n - step // 2)
    square = [[(letter + shift) % n for letter in zigzag] for shift in range(n)]
    return [square] if n % 2 == 0 else [square, [row[::-1] for row in square]]
