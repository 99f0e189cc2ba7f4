"""The metrics that claims and samples speak of, each with one canonical unit.

Inside frames and claims a value is a float in its metric's canonical unit and the unit's name
stands in a column beside it. Conversion happens here, at the edge, by pint.

The pint registry is built from nothing on purpose. In pint's own one `bit` and `percent` are
dimensionless, so that it turns a packet rate into a bit rate, or bytes into percent, without
a word; and `Gb` is a gigabarn.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from types import MappingProxyType
from typing import Literal

import pint

from vringlab.errors import UserError

Direction = Literal["lower", "higher"]

_DEFINITIONS = (
    "nano- = 1e-9 = n-",
    "micro- = 1e-6 = µ- = u-",
    "milli- = 1e-3 = m-",
    "kilo- = 1e3 = k-",
    "mega- = 1e6 = M-",
    "giga- = 1e9 = G-",
    "kibi- = 1024 = Ki-",
    "mebi- = 1048576 = Mi-",
    "gibi- = 1073741824 = Gi-",
    "second = [time] = s",
    "bit = [information]",
    "byte = 8 * bit = B",
    "percent = [share]",
    "instruction = [work]",
    "cycle = [clock]",
    "event = [events]",
    "pps = 1 / second",
)

#: Spellings of mails and tools that a unit parser reads otherwise or not at all.
_SPELLINGS = MappingProxyType(
    {
        "b/s": "bit/s",
        "kb/s": "kbit/s",
        "Mb/s": "Mbit/s",
        "Gb/s": "Gbit/s",
        "Gbps": "Gbit/s",
        "Mbps": "Mbit/s",
        "%": "percent",
    }
)

_NAME = re.compile(r"(1|[A-Za-zµ]+)(/[A-Za-zµ]+)*")


@dataclass(frozen=True)
class MetricSpec:
    """What a metric means.

    Attributes:
        name: Its name in claims and in the `metric` column of samples.
        unit: Its canonical unit, in which every stored value is.
        direction: Which way is better.
        description: One sentence for tables and help.
        per: For a normalised metric, the names of its numerator and denominator.
        percentile: For a point of a distribution, its rank in percent.
    """

    name: str
    unit: str
    direction: Direction
    description: str
    per: tuple[str, str] | None = None
    percentile: float | None = None

    @property
    def better(self) -> int:
        """+1 when a higher value is better, -1 when a lower one is."""
        return 1 if self.direction == "higher" else -1


def _percentile(rank: str) -> MetricSpec:
    text = f"Round-trip time, {rank}th percentile of the messages of a run."
    if rank == "1":
        text = text.replace("1th", "1st")
    return MetricSpec(f"rtt_p{rank}", "ns", "lower", text, percentile=float(rank))


_SPECS = (
    MetricSpec("rtt_mean", "ns", "lower", "Round-trip time, mean over the messages of a run."),
    *(_percentile(rank) for rank in ("1", "50", "90", "99", "99.9")),
    MetricSpec("round_trips", "1/s", "higher", "Completed round trips per second."),
    MetricSpec("pps_tx", "1/s", "higher", "Packets per second as the sender counts them."),
    MetricSpec("pps_rx", "1/s", "higher", "Packets per second as the receiver counts them."),
    MetricSpec("datagrams", "1/s", "higher", "UDP datagrams per second."),
    MetricSpec("transactions", "1/s", "higher", "Request-response transactions per second."),
    MetricSpec("throughput", "bit/s", "higher", "Payload bits per second, one way."),
    MetricSpec(
        "throughput_stddev",
        "percent",
        "lower",
        "Standard deviation of a run's throughput as a share of its mean: over the seconds of one "
        "run where we measure it, over runs where a mail gives it.",
    ),
    MetricSpec("tx_interrupts", "1/s", "lower", "Transmit interrupts per second in the guest."),
    MetricSpec("kicks", "1/s", "lower", "Notifications of the host by the guest per second."),
    MetricSpec("vmexits", "1/s", "lower", "Exits from the guest per second."),
    MetricSpec("cpu", "percent", "lower", "CPU time used on the host; 100 percent is one CPU."),
    MetricSpec(
        "throughput_per_cpu",
        "bit/s/percent",
        "higher",
        "Throughput divided by the host's CPU use.",
        per=("throughput", "cpu"),
    ),
    MetricSpec(
        "transactions_per_cpu",
        "1/s/percent",
        "higher",
        "Transactions per second divided by the host's CPU use.",
        per=("transactions", "cpu"),
    ),
    MetricSpec("guest_cpu", "percent", "lower", "CPU time used in the guest; 100 is one vCPU."),
    MetricSpec("vhost_cpu", "percent", "lower", "CPU time of the vhost worker; 100 is one CPU."),
    MetricSpec("vhost_wakeups", "1/s", "lower", "Wakeups of the vhost worker per second."),
    MetricSpec("slab_peak", "byte", "lower", "Memory of the slab caches, highest sample."),
    MetricSpec("slab_median", "byte", "lower", "Memory of the slab caches, middle sample."),
    MetricSpec("host_slab_peak", "byte", "lower", "The same on the host, highest sample."),
    MetricSpec("host_slab_median", "byte", "lower", "The same on the host, middle sample."),
    MetricSpec(
        "instructions",
        "instruction",
        "lower",
        "Instructions of host and guest for one unit of work (a round trip, a packet, a byte), "
        "without those executed to wait and the benchmark tools' own.",
    ),
    MetricSpec("instructions_guest", "instruction", "lower", "The same of the guest alone."),
    MetricSpec("instructions_host", "instruction", "lower", "The same of the host alone."),
    MetricSpec(
        "instructions_module",
        "instruction",
        "lower",
        "The same of the arm's own modules, what they call not included.",
    ),
    MetricSpec("exits", "event", "lower", "Exits from the guest for one unit of work."),
    MetricSpec(
        "switches_guest", "event", "lower", "Context switches of the guest for one unit of work."
    ),
    MetricSpec("switches_host", "event", "lower", "The same of the host."),
    MetricSpec(
        "cycles_guest", "cycle", "lower", "The guest's processor cycles for one unit of work."
    ),
    MetricSpec("cycles_host", "cycle", "lower", "The same of the host."),
)

#: All metrics by name. The first block of names is shared with the workloads' samples.
METRICS: Mapping[str, MetricSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})


def nearest(name: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    """A hint for a misspelt name: the nearest known ones, or all of them when none is near."""
    close = difflib.get_close_matches(name, list(known), n=3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known: {', '.join(sorted(known))}"


def metric(name: str) -> MetricSpec:
    """The metric of that name.

    Raises:
        UserError: there is none; the remedy names the nearest.
    """
    try:
        return METRICS[name]
    except KeyError:
        raise UserError(f"unknown metric {name!r}", remedy=nearest(name, METRICS)) from None


@cache
def _registry() -> pint.UnitRegistry[Decimal]:
    # Decimal keeps 12.91 us at exactly 12910 ns: audits compare figures digit for digit.
    registry: pint.UnitRegistry[Decimal] = pint.UnitRegistry(
        None, on_redefinition="raise", non_int_type=Decimal
    )
    for definition in _DEFINITIONS:
        registry.define(definition)
    return registry


def _parse(name: str) -> pint.Unit:
    spelt = _SPELLINGS.get(name, name)
    try:
        # pint evaluates whole expressions; a name from a file is only ever `a` or `a/b`.
        if not _NAME.fullmatch(spelt):
            raise pint.UndefinedUnitError(spelt)
        return _registry().Unit(spelt)
    except pint.PintError:
        raise UserError(
            f"unknown unit {name!r}",
            remedy="use a name such as ns, us, 1/s, Mpps, Gbit/s, MB, percent",
        ) from None


@cache
def factor(unit: str, to: str) -> Decimal:
    """How many `to` one `unit` is.

    Raises:
        UserError: a unit is not known, or the two measure different things.
    """
    one = _registry().Quantity(Decimal(1), _parse(unit))
    try:
        return Decimal(one.to(_parse(to)).magnitude)
    except pint.DimensionalityError:
        raise UserError(
            f"unit {unit!r} does not measure the same thing as {to!r}",
            remedy=f"give the figure in a multiple of {to}",
        ) from None


def convert(value: float, unit: str, to: str) -> float:
    """`value` of `unit`, in `to`.

    Raises:
        UserError: a unit is not known, or the two measure different things.
    """
    return float(Decimal(repr(float(value))) * factor(unit, to))


def to_canonical(name: str, value: float, unit: str) -> float:
    """`value` of `unit` in the canonical unit of the metric `name`.

    Raises:
        UserError: the metric or unit is not known, or they do not fit together.
    """
    return convert(value, unit, metric(name).unit)


_PREFIXES: tuple[tuple[float, str], ...] = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_TIMES: tuple[tuple[float, str], ...] = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))


def humanize(value: float, unit: str) -> str:
    """A figure for people: three digits and a prefix, `12910 ns` as `12.9 µs`.

    Args:
        value: The figure in `unit`.
        unit: A canonical unit of the registry; any other is printed as it stands.
    """
    short = {"bit/s": "b/s", "1/s": "/s", "byte": "B", "bit/s/percent": "b/s/%"}.get(
        unit, "instr" if unit == "instruction" else None
    )
    if unit == "percent":
        return f"{value:.3g} %"
    if unit == "event":
        return f"{value:.3g}"
    if unit != "ns" and short is None:
        return f"{value:.4g} {unit}"
    steps = _TIMES if short is None else tuple((size, p + short) for size, p in _PREFIXES)
    size, name = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    scaled = value / size
    # Three digits, but never an exponent: 999.6 is 1000, not 1e+03.
    digits = f"{scaled:.0f}" if abs(scaled) >= 99.95 else f"{scaled:.3g}"
    return f"{digits} {name}"


def percent_text(change: float) -> str:
    """A change as people write it: 0.628 as `+62.8 %`."""
    return f"{100 * change:+.1f} %"
