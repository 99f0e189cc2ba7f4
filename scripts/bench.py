"""Measure vringlab beside other tools and beside itself, and print a table in Markdown.

    python scripts/bench.py                          # all rows but `whole`
    python scripts/bench.py up switch --pairs 7      # only these
    python scripts/bench.py --write README.md        # put the table there, between its comments

Every line of the table compares two sides that are measured in turn, pair by pair, so that a slow
moment of the machine falls on both. It shows the median of the pairs' ratios, and their range.
One virtual machine runs at a time. What a row needs is fetched once, into the cache; a run that
is killed leaves nothing behind but that.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

# Started as a script, its own folder is searched instead of the collection's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import bench_local, bench_machines
from scripts.bench_rows import Bench, scratch_folder
from scripts.bench_table import Line, insert, table

from vringlab.errors import UserError, VringlabError

Row = Callable[[Bench], Iterator[Line]]

ROWS: dict[str, Row] = {
    "up": bench_machines.up,
    "cold": bench_machines.cold,
    "build": bench_local.build,
    "whole": bench_local.whole,
    "switch": bench_machines.switch,
    "fio": bench_machines.fio,
    "counter": bench_machines.counter,
    "store": bench_local.store,
    "bootstrap": bench_local.bootstrap,
    "load": bench_local.load,
    "start": bench_local.start,
}
#: Only measured when it is named: it takes too long.
_ON_DEMAND = ("whole",)


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(
        f"  {name:10} {(row.__doc__ or '').strip()}"
        f"{' Only when named.' if name in _ON_DEMAND else ''}"
        for name, row in ROWS.items()
    )
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nRows:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 done, 1 a row failed (the others are in the table), 130 stopped.",
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="what to measure; all when none")
    parser.add_argument("--pairs", type=_positive, default=5, help="pairs of each line (5)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a fio run (10)")
    parser.add_argument(
        "--cells", type=_positive, default=100_000, help="cells of the large plan (100000)"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 at least")
    return value


def chosen(names: Sequence[str]) -> list[str]:
    """The rows that names ask for, in the table's order; all that take minutes when there is none.

    Raises:
        UserError: there is no such row.
    """
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        raise UserError(f"there is no row {unknown[0]!r}", remedy=f"rows: {', '.join(ROWS)}")
    return [name for name in ROWS if (name in names if names else name not in _ON_DEMAND)]


def measure(names: Sequence[str], bench: Bench) -> tuple[list[Line], list[str]]:
    """All lines of some rows, and the rows that failed: those do not keep others from being run."""
    lines: list[Line] = []
    failed = []
    for name in names:
        _say(f"== {name}: {(ROWS[name].__doc__ or '').strip()}")
        begin = time.monotonic()
        try:
            for line in ROWS[name](bench):
                lines.append(line)
                _say(f"   {' | '.join(line.cells)}")
        except VringlabError as error:
            failed.append(name)
            _say(f"{name} failed: {error.kind}: {error}")
        _say(f"   {name} took {time.monotonic() - begin:.0f} s")
    return lines, failed


def _where(bench: Bench, load: float) -> str:
    day = time.strftime("%Y-%m-%d", time.gmtime())
    known = vars(bench).get("accelerator")
    on = f", virtual machines on {known.name}" if known is not None else ""
    return (
        f"Measured {day} by `make bench` on {os.cpu_count()} processors (load {load:.1f} when it "
        f"began){on}. Medians; ratios are ours in parts of theirs, pair by pair, with their range."
    )


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _stop(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _run(options: argparse.Namespace) -> int:
    names = chosen(options.rows)
    if options.write is not None:
        # Before an hour was spent.
        insert(options.write.read_text(), "")
    load = os.getloadavg()[0]
    with scratch_folder() as scratch:
        bench = Bench(options.pairs, options.seconds, options.cells, scratch, _say)
        lines, failed = measure(names, bench)
        where = _where(bench, load)
    found = table(lines, where)
    print(found)
    if options.json is not None:
        record = {"where": where, "lines": [asdict(line) for line in lines], "failed": failed}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.write is not None and lines:
        options.write.write_text(insert(options.write.read_text(), found))
    return 1 if failed else 0


def main() -> None:
    """Run the command line."""
    options = _parser().parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        sys.exit(_run(options))
    except VringlabError as error:
        print(f"bench: {error.kind}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("bench: stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
