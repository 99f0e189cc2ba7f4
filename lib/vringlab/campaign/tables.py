"""The tidy tables of a run, derived from its cells: samples.parquet and histograms.parquet.

The cells' `sample.json` files are the truth; a table that is missing, damaged or behind is made
from them. Each cell is read once, and what a table already holds is copied in batches, so memory
does not grow with the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vringlab.campaign.files import read_json, replacing
from vringlab.campaign.plan import Plan
from vringlab.errors import UserError

#: Version of sample.json and of both tables.
FORMAT = 1

SAMPLES = "samples.parquet"
HISTOGRAMS = "histograms.parquet"
CELLS = "cells"
#: Where a cell of a run, or a bundle, keeps what was executed for one unit of work, by function.
INSTRUCTIONS = "instructions"
SUPERSEDED = "superseded"

#: The metric of the one row that an invalid sample has from which no figure could be read.
NO_METRIC = "none"

_BATCH_CELLS = 500
_METADATA = {b"vringlab.format": str(FORMAT).encode()}

HISTOGRAM_SCHEMA = pa.schema(
    [
        ("cell_id", pa.string()),
        ("metric", pa.string()),
        ("value", pa.float64()),
        ("count", pa.int64()),
        ("unit", pa.string()),
    ],
    metadata=_METADATA,
)


def samples_schema(plan: Plan) -> pa.Schema:
    """Columns of samples.parquet: the parameters of the plan stand between workload and metric."""
    before = [
        ("run_id", pa.string()),
        ("experiment", pa.string()),
        ("cell_id", pa.string()),
        ("block", pa.int64()),
        ("position", pa.int64()),
        ("boot", pa.string()),
        ("host", pa.string()),
        ("host_kind", pa.string()),
        ("arm", pa.string()),
        ("base_kernel", pa.string()),
        ("workload", pa.string()),
    ]
    params = [(f"param_{name}", _param_type(plan, name)) for name in plan.params]
    after = [
        ("metric", pa.string()),
        ("value", pa.float64()),
        ("unit", pa.string()),
        ("valid", pa.bool_()),
        ("reason", pa.string()),
        ("started", pa.string()),
        ("window_s", pa.float64()),
    ]
    return pa.schema([*before, *params, *after], metadata=_METADATA)


def _param_type(plan: Plan, name: str) -> pa.DataType:
    kinds = {type(cell.params[name]) for cell in plan.cells if name in cell.params}
    for kind, column in ((bool, pa.bool_()), (int, pa.int64()), (float, pa.float64())):
        if kinds == {kind}:
            return column
    # One column has one type: numbers widen, anything else is kept as text.
    return pa.float64() if kinds == {int, float} else pa.string()


def _sample_rows(
    document: Mapping[str, Any], plan: Plan, run_id: str, schema: pa.Schema
) -> Iterator[dict[str, Any]]:
    cell = document["cell"]
    params = {
        f"param_{name}": str(value) if schema.field(f"param_{name}").type == pa.string() else value
        for name, value in cell["params"].items()
    }
    shared = {
        "run_id": run_id,
        "experiment": plan.experiment,
        "cell_id": cell["cell_id"],
        "block": cell["block"],
        "position": cell["position"],
        "boot": document["boot"],
        "host": document["host"],
        "host_kind": document["host_kind"],
        "arm": cell["arm_name"],
        "base_kernel": plan.base_kernel,
        "workload": cell["workload"],
        **params,
        "valid": not document["problems"],
        "reason": "; ".join(document["problems"]),
        "started": document["started"],
        "window_s": document["window_s"],
    }
    metrics = document["metrics"] or [{"name": NO_METRIC, "value": None, "unit": ""}]
    for metric in metrics:
        value = math.nan if metric["value"] is None else metric["value"]
        yield {**shared, "metric": metric["name"], "value": value, "unit": metric["unit"]}


def _histogram_rows(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for histogram in document["histograms"]:
        shared = {
            "cell_id": document["cell"]["cell_id"],
            "metric": histogram["metric"],
            "unit": histogram["unit"],
        }
        for value, count in histogram["bins"]:
            yield {**shared, "value": value, "count": count}


def read_sample(path: Path) -> dict[str, Any]:
    """The document of one cell's sample.json.

    Raises:
        UserError: the file is missing, damaged, or of a format that this version does not know.
    """
    document = read_json(path)
    if document.get("format") != FORMAT:
        raise UserError(
            f"{path} has format {document.get('format')}; this version of vringlab reads {FORMAT}",
            remedy="use the version of vringlab that wrote the run",
        )
    return document


def batches(
    folder: Path, cell_ids: Iterable[str], plan: Plan, run_id: str
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Rows of cells as pairs of (samples, histograms), some hundred cells at a time.

    Raises:
        UserError: a sample.json is damaged or of another format.
    """
    schema = samples_schema(plan)
    waiting = sorted(cell_ids)
    for start in range(0, len(waiting), _BATCH_CELLS):
        samples: list[dict[str, Any]] = []
        histograms: list[dict[str, Any]] = []
        for cell_id in waiting[start : start + _BATCH_CELLS]:
            path = folder / CELLS / cell_id / "sample.json"
            document = read_sample(path)
            try:
                samples += _sample_rows(document, plan, run_id, schema)
                histograms += _histogram_rows(document)
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(
                    f"{path} is damaged: {type(error).__name__} {error}",
                    remedy="move its folder away and resume the run to measure the cell again",
                ) from None
        yield (
            pa.RecordBatch.from_pylist(samples, schema=schema),
            pa.RecordBatch.from_pylist(histograms, schema=HISTOGRAM_SCHEMA),
        )


def done_cells(folder: Path) -> set[str]:
    """Ids of the cells that a run folder holds."""
    cells = folder / CELLS
    if not cells.is_dir():
        return set()
    return {path.name for path in cells.iterdir() if not path.name.startswith(".")}


def superseded_cells(folder: Path) -> set[tuple[str, str]]:
    """(cell id, boot) of the cells that were measured again under another boot."""
    old = folder / SUPERSEDED
    if not old.is_dir():
        return set()
    parts = (path.name.rpartition("@") for path in old.iterdir())
    return {(cell_id, boot) for cell_id, _, boot in parts if cell_id}


def instruction_profiles(folder: Path) -> dict[str, Path]:
    """The file of each cell whose instructions were counted, by cell id."""
    found = {path.parent.name: path for path in folder.glob(f"{CELLS}/*/{INSTRUCTIONS}.json")}
    found |= {path.stem: path for path in (folder / INSTRUCTIONS).glob("*.json")}
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Lag:
    """How far the tables are behind the cells.

    Attributes:
        fault: Why the tables cannot be used at all; empty when they can.
        missing: Cells on disk that the tables lack.
        superseded: Cells in the tables that were measured again since.
    """

    fault: str
    missing: frozenset[str]
    superseded: frozenset[str]

    @property
    def current(self) -> bool:
        """Whether the tables hold just what the cells say."""
        return not self.fault and not self.missing and not self.superseded


def lag(folder: Path, plan: Plan) -> Lag:
    """Compare the tables of a run folder with its cells."""
    done = done_cells(folder)
    held = pa.table({"cell_id": pa.array([], pa.string()), "boot": pa.array([], pa.string())})
    fault = ""
    for name, schema in ((SAMPLES, samples_schema(plan)), (HISTOGRAMS, HISTOGRAM_SCHEMA)):
        try:
            table = pq.ParquetFile(folder / name)
            fault = fault or _difference(table.schema_arrow, schema, name)
            if name == SAMPLES and not fault:
                held = table.read(columns=["cell_id", "boot"])
        except FileNotFoundError:
            fault = fault or f"{name} is missing"
        except (OSError, pa.ArrowException) as error:
            fault = fault or f"{name} is damaged: {str(error).splitlines()[0]}"
    if fault:
        return Lag(fault, frozenset(done), frozenset())
    held = held.group_by(["cell_id", "boot"]).aggregate([])
    known = set(zip(held["cell_id"].to_pylist(), held["boot"].to_pylist(), strict=True))
    old = known & superseded_cells(folder)
    fresh = {cell_id for cell_id, _ in known - old}
    return Lag("", frozenset(done - fresh), frozenset(cell_id for cell_id, _ in old))


def _difference(found: pa.Schema, wanted: pa.Schema, name: str) -> str:
    """How a table's columns differ from those that the plan asks for; empty when they do not."""
    written = (found.metadata or {}).get(b"vringlab.format", b"").decode()
    if written != str(FORMAT):
        return f"{name} has format {written or 'unknown'}; this version reads {FORMAT}"
    if found.equals(wanted):
        return ""
    lacking = [field.name for field in wanted if field.name not in found.names]
    extra = [field.name for field in found if field.name not in wanted.names]
    other = [f.name for f in wanted if f.name in found.names and found.field(f.name).type != f.type]
    parts = (("lacks", lacking), ("adds", extra), ("has another type for", other))
    shown = "; ".join(f"{verb} {', '.join(columns)}" for verb, columns in parts if columns)
    return f"{name} does not have the plan's columns: {shown or 'another order'}"


def kept_batches(path: Path, dropped: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a table without those of some cells."""
    gone = pa.array(dropped, type=pa.string())
    for batch in pq.ParquetFile(path).iter_batches():
        if dropped:
            batch = batch.filter(pc.invert(pc.is_in(batch["cell_id"], value_set=gone)))
        if batch.num_rows:
            yield batch


def consolidate(folder: Path, plan: Plan, run_id: str) -> None:
    """Bring both tables up to date with the cells; each is replaced whole.

    Raises:
        UserError: a sample.json is damaged.
        InfrastructureError: the disk is full, or the folder cannot be written.
    """
    behind = lag(folder, plan)
    if behind.current:
        return
    schemas = {SAMPLES: samples_schema(plan), HISTOGRAMS: HISTOGRAM_SCHEMA}
    # The two files are renamed one after the other. After a kill in between, the histograms hold
    # cells that the samples lack: what is about to be added is dropped first.
    dropped = sorted(behind.superseded | behind.missing)
    with ExitStack() as stack:
        writers: list[pq.ParquetWriter] = []
        for name, schema in schemas.items():
            stream = stack.enter_context(replacing(folder / name))
            writer = stack.enter_context(pq.ParquetWriter(stream, schema, compression="zstd"))
            if not behind.fault:
                for batch in kept_batches(folder / name, dropped):
                    writer.write_batch(batch)
            writers.append(writer)
        for pair in batches(folder, behind.missing, plan, run_id):
            for writer, batch in zip(writers, pair, strict=True):
                if batch.num_rows:
                    writer.write_batch(batch)
