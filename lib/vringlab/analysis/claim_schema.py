"""The form of a claims file: what `data/claims/*.yaml` may say, and what is refused.

A file holds publications: one mail, or one version of a series, with what is common to its
figures. Figures stand singly under `claims` or in compact `tables`. A table's row is the values
of its `keys`, then one cell per column. A cell is a change in percent, `[before, after]`,
`[before, after, change]`, or null for a figure that the table does not give.

What a source does not state is null; a message-id that no source names is `unverified`.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Hashable, Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from vringlab.analysis.units import Direction, factor, metric, nearest
from vringlab.errors import UserError

UNVERIFIED = "unverified"

State = Literal["standing", "withdrawn", "superseded"]
HostKind = Literal["physical", "nested", "unknown"]
Value = bool | int | float | str

_SHOWN_PROBLEMS = 8
# Beyond any figure of the field, and far below where a float overflows in a ratio.
_LARGEST = Decimal("1e30")


def _number(value: object) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise ValueError(f"{value!r} is not a number")
    number = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    if not number.is_finite():
        raise ValueError(f"{value} is not a finite number")
    if abs(number) > _LARGEST:
        raise ValueError(f"{value} is too large for a figure")
    return number


def _not_negative(value: Decimal) -> Decimal:
    if value < 0:
        raise ValueError(f"{value} is negative, which no metric can be")
    return value


def _positive(value: Decimal) -> Decimal:
    if value <= 0:
        raise ValueError(f"{value} is not above zero: a ratio to it means nothing")
    return value


def _possible_change(value: Decimal) -> Decimal:
    if value < -100:
        raise ValueError(f"a change of {value} percent would make the figure negative")
    return value


def _known_metric(name: str) -> str:
    try:
        return metric(name).name
    except UserError as error:
        raise ValueError(f"{error.message} ({error.remedy})") from None


def _message_id(value: str) -> str:
    if value != UNVERIFIED and not re.fullmatch(r"[^@<>\s]+@[^@<>\s]+", value):
        raise ValueError(
            f"{value!r} is no message-id: write it without angle brackets, or {UNVERIFIED}"
        )
    return value


def _plain(value: object) -> object:
    return float(value) if isinstance(value, Decimal) else value


Number = Annotated[Decimal, BeforeValidator(_number)]
Figure = Annotated[Number, AfterValidator(_not_negative)]
Base = Annotated[Number, AfterValidator(_positive)]
Percent = Annotated[Number, AfterValidator(_possible_change)]
MetricName = Annotated[str, AfterValidator(_known_metric)]
MessageId = Annotated[str, AfterValidator(_message_id)]
Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
Version = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")]
Params = dict[Identifier, Annotated[Value, BeforeValidator(_plain)]]
Runs = Annotated[int, Field(ge=1, strict=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Column(_Strict):
    """A metric, the unit of its figures, and which way is better, restated to be checked."""

    metric: MetricName
    unit: str
    direction: Direction

    @model_validator(mode="after")
    def _agrees_with_registry(self) -> Self:
        spec = metric(self.metric)
        try:
            factor(self.unit, spec.unit)
        except UserError as error:
            raise ValueError(f"metric {self.metric}: {error.message} ({error.remedy})") from None
        if self.direction != spec.direction:
            raise ValueError(f"for {self.metric} {spec.direction} is better, not {self.direction}")
        return self


class Figures(_Strict):
    """The digits of one figure; `change` is in percent of `before`."""

    before: Base | None = None
    after: Figure | None = None
    change: Percent | None = None

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if (self.before is None) != (self.after is None):
            missing = "after" if self.after is None else "before"
            raise ValueError(f"{missing} is missing: before and after come together")
        return self


class Cell(Figures):
    """One cell of a table."""

    @model_validator(mode="before")
    @classmethod
    def _unfold(cls, value: object) -> dict[str, object]:
        if value is None:
            return {}
        if not isinstance(value, list):
            return {"change": value}
        if len(value) not in (2, 3):
            raise ValueError("a cell is a change, [before, after] or [before, after, change]")
        return dict(zip(("before", "after", "change"), value, strict=False))

    @property
    def empty(self) -> bool:
        """Whether the table gives no figure here."""
        return self.before is None and self.change is None


class Spread(_Strict):
    """Relative standard deviation over runs in percent of the mean; the largest of a table."""

    before: Figure
    after: Figure


class Details(_Strict):
    """What a single figure or a table may say beyond, or otherwise than, its publication."""

    params: Params = Field(default_factory=dict)
    n: Runs | None = None
    duration_s: Base | None = None
    spread: Spread | None = None
    tool: Text | None = None
    workload: Text | None = None
    note: Text | None = None


class Single(Column, Figures, Details):
    """One figure under `claims`.

    `no_difference` stands for words such as "no obvious difference"; `difference` is a stated
    after minus before in `unit`; `approximate` marks figures given as "about".
    """

    id: Identifier
    difference: Number | None = None
    no_difference: bool = False
    approximate: bool = False

    @model_validator(mode="after")
    def _complete(self) -> Self:
        figures = [self.before, self.change, self.difference]
        given = any(figure is not None for figure in figures)
        if given == self.no_difference:
            raise ValueError(
                "give either before and after, change or difference, or else no_difference: true"
            )
        return self


class _Row(_Strict):
    keys: Params
    cells: list[Cell]


class Table(Details):
    """Figures by parameters: each row is the values of `keys`, then one cell per column."""

    id: Identifier
    keys: Annotated[list[Identifier], Field(min_length=1)]
    columns: Annotated[list[Column], Field(min_length=1)]
    rows: Annotated[list[list[Any]], Field(min_length=1)]

    @model_validator(mode="after")
    def _readable(self) -> Self:
        list(self.points())
        return self

    def points(self) -> Iterator[tuple[dict[str, Value], list[Cell]]]:
        """Each row as the values of its keys, and its cells."""
        heads = [*self.keys, *(column.metric for column in self.columns)]
        for number, row in enumerate(self.rows, 1):
            if len(row) != len(heads):
                raise ValueError(
                    f"row {number} has {len(row)} entries instead of {len(heads)} "
                    f"({', '.join(heads)})"
                )
            keys = dict(zip(self.keys, row, strict=False))
            try:
                parsed = _Row.model_validate({"keys": keys, "cells": row[len(keys) :]})
            except ValidationError as error:
                problem = error.errors()[0]
                part, where = problem["loc"][0], problem["loc"][1]
                name = where if part == "keys" else heads[len(keys) + int(where)]
                raise ValueError(f"row {number}, {name}: {_message(problem)}") from None
            yield parsed.keys, parsed.cells


class Status(_Strict):
    """Whether the figures still stand, and what ended them if not."""

    state: State
    by: Text | None = None

    @model_validator(mode="after")
    def _ended_by(self) -> Self:
        if (self.state == "standing") != (self.by is None):
            raise ValueError("`by` says what withdrew or superseded a figure, and only that")
        return self


class Setup(_Strict):
    """Where the figures were measured: `kind` is that of the KVM host."""

    kind: HostKind
    kernel: Text | None
    text: str = ""


class Publication(_Strict):
    """One mail or one version of a series, with what is common to its figures.

    `version` may list several versions that printed the same figures.
    """

    version: Version | Annotated[list[Version], Field(min_length=1)]
    message_id: MessageId
    date: datetime.date | None
    source: Text
    status: Status
    arms: tuple[Text, Text]
    environment: Setup
    path: Text
    tool: Text
    workload: Text
    n: Runs | None
    duration_s: Base | None
    spread: Spread | None = None
    params: Params = Field(default_factory=dict)
    note: Text | None = None
    claims: list[Single] = Field(default_factory=list)
    tables: list[Table] = Field(default_factory=list)

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if not self.claims and not self.tables:
            raise ValueError("a publication without claims or tables says nothing")
        return self

    @property
    def versions(self) -> list[str]:
        """Versions that printed these figures."""
        return [self.version] if isinstance(self.version, str) else self.version


class ClaimsFile(_Strict):
    """One file of `data/claims/`; its publications may still have to be filled in."""

    format: Literal[1]
    experiment: Identifier
    title: Text
    publications: list[Publication]


class _Loader(yaml.SafeLoader):
    """Reads floats as decimals, and refuses a key that a mapping has twice."""

    def construct_decimal(self, node: yaml.ScalarNode) -> object:
        text = str(self.construct_scalar(node)).replace("_", "")
        try:
            return Decimal(text.lower().replace(".inf", "Infinity").replace(".nan", "NaN"))
        except InvalidOperation:
            return text

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} stands twice in one mapping", key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_decimal)


def _place(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.lstrip(".") or "file"


def _field_names() -> tuple[str, ...]:
    models = (Single, Table, Publication, ClaimsFile, Status, Setup, Spread)
    return tuple({name for model in models for name in model.model_fields})


def _message(problem: Any) -> str:
    if problem["type"] == "extra_forbidden":
        return f"unknown key ({nearest(str(problem['loc'][-1]), _field_names())})"
    text = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] in ("missing", "value_error"):
        return text
    return f"{text}, not {problem['input']!r}"[:200]


def _refusal(path: Path, error: ValidationError) -> UserError:
    lines = [f"  {_place(problem['loc'])}: {_message(problem)}" for problem in error.errors()]
    if len(lines) > _SHOWN_PROBLEMS:
        lines[_SHOWN_PROBLEMS:] = [f"  and {len(lines) - _SHOWN_PROBLEMS} more"]
    return UserError(
        f"claims file {path} is not usable:\n" + "\n".join(lines),
        remedy="mend the keys named above; vringlab.analysis.claim_schema describes the form",
    )


def read_file(path: Path) -> ClaimsFile:
    """One claims file, checked.

    Raises:
        UserError: the file cannot be read, is no YAML, or breaks the schema: an unknown key,
            metric or unit, a figure that cannot be, before without after. Names file and key.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
        content = ClaimsFile.model_validate(raw)
    except OSError as error:
        raise UserError(
            f"cannot read claims file {path}: {error.strerror}",
            remedy="check the path and its permissions",
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        shown = re.sub(r"\s+", " ", str(error))
        raise UserError(
            f"claims file {path} is no YAML: {shown}", remedy="mend the place named"
        ) from None
    except ValidationError as error:
        raise _refusal(path, error) from None
    if content.experiment != path.stem:
        raise UserError(
            f"claims file {path}: experiment: says {content.experiment!r}",
            remedy=f"name the file {content.experiment}.yaml, or correct the key",
        )
    return content
