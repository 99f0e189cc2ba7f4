"""The claim audit: all known faults of the seeds, none in a clean file, none missed when made."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from vringlab.analysis.audit import RULES, audit, audit_selection, required_runs
from vringlab.analysis.claims import Claim, load_claims, read_claims
from vringlab.analysis.finding import Finding, versions_text
from vringlab.analysis.rounding import percent_of, printed, raw_ratio
from vringlab.analysis.units import metric
from vringlab.errors import UserError
from vringlab.report import audit_view, claim_figures

CLEAN = read_claims(Path(__file__).parent / "data" / "synthetic-clean.yaml")
BY_ID = {claim.id.partition("/")[2]: claim for claim in CLEAN}


@pytest.fixture(scope="module")
def found() -> list[Finding]:
    return audit(load_claims())


def _of(findings: Sequence[Finding], kind: str, experiment: str = "") -> list[Finding]:
    return [item for item in findings if item.kind == kind and experiment in ("", item.experiment)]


def _kinds(claims: Sequence[Claim]) -> Counter[str]:
    return Counter(item.kind for item in audit(claims))


def _with(claim: Claim, **figures: Any) -> Claim:
    """The claim with other printed figures, its floats made to agree."""
    published = replace(claim.published, **figures)
    scale = Decimal(1)
    if claim.before is not None and claim.published.before is not None:
        scale = Decimal(repr(claim.before)) / claim.published.before

    def scaled(value: Decimal | None) -> float | None:
        return None if value is None else float(value * scale)

    return replace(
        claim,
        published=published,
        before=scaled(published.before),
        after=scaled(published.after),
        difference=scaled(published.difference),
        stated_change=None if published.change is None else float(published.change / 100),
    )


def _times(claim: Claim, by: Decimal) -> Claim:
    before, after = claim.published.before, claim.published.after
    assert before is not None
    assert after is not None
    return _with(claim, before=before * by, after=after * by)


def _swap(*changed: Claim) -> list[Claim]:
    new = {claim.id: claim for claim in changed}
    return [new.pop(claim.id, claim) for claim in CLEAN] + list(new.values())


# --- the known faults of the seeds ------------------------------------------------------------


def test_text_of_the_merged_netperf_figures(found: list[Finding]) -> None:
    (item,) = _of(found, "percent", "virtio-net-netperf")
    assert item.severity == "fault"
    assert item.claims == ("virtio-net-netperf/merged.throughput",)
    assert "+82 %" in item.message
    assert "31 -> 58 Gb/s is +87.1 %" in item.message


def test_percentages_of_the_rfc_are_right_within_rounding(found: list[Finding]) -> None:
    # 6.45 -> 10.5 is +62.8 %, stated as 62 %: 10.45 / 6.455 rounds to it.
    assert _of(found, "percent", "virtio-net-napi-tx") == []


def test_nine_percent_less_is_taken_from_the_figure_after(found: list[Finding]) -> None:
    (item,) = _of(found, "percent", "vsock-skb-merge")
    assert item.claims == ("vsock-skb-merge/v2.large",)
    assert item.severity == "warning"
    assert "in percent of the figure after, it would be -8.8 %" in item.message


def test_fifty_megabytes_against_the_mails_own_figures(found: list[Finding]) -> None:
    (item,) = _of(found, "difference")
    assert item.claims == ("vsock-skb-merge/v2-reply-slab.slab-peak",)
    assert "-50 MB" in item.message
    assert "540 -> 390 MB is -150 MB" in item.message


def test_normalised_rows_of_seed_001_all_agree(found: list[Finding]) -> None:
    assert _of(found, "normalised") == []


def test_repeated_rows_of_seed_001_and_no_others(found: list[Finding]) -> None:
    rows = {
        frozenset(name.split(".", 1)[1].rpartition(".")[0] for name in item.claims)
        for item in _of(found, "duplicate-row")
    }
    assert rows == {
        frozenset({"guest-rx.65535.1", "guest-rx.65535.4"}),
        frozenset({"guest-rx.65535.2", "guest-rx.65535.8"}),
    }
    assert {len(item.claims) for item in _of(found, "duplicate-row")} == {6}


def test_iperf_table_kept_from_v3_to_v4(found: list[Finding]) -> None:
    (item,) = _of(found, "stale-table", "vsock-throughput")
    assert (item.severity, len(item.claims)) == ("fault", 18)
    assert "9 of 9 figures are identical in v3 and v4" in item.message
    assert "6.9.7 -> 6.9.8" in item.message


def test_skb_table_kept_from_v3_to_v9(found: list[Finding]) -> None:
    (item,) = _of(found, "stale-table", "vsock-skb-merge")
    assert len(item.claims) == 4 * 7
    assert "4 of 4 figures are identical in v3 to v9" in item.message


def test_722_ns_round_trip_against_a_one_way_stream(found: list[Finding]) -> None:
    items = _of(found, "latency-against-stream")
    assert [item.claims[0].split(".")[0][-2:] for item in items] == ["v1", "v2", "v3"]
    assert "rtt_p1 before, 4096 B in 722 ns is 45.4 Gb/s each way" in items[0].message
    assert "a stream reached 6.87 Gb/s, 4.77 µs per message" in items[0].message


def test_4_kib_faster_than_64_b(found: list[Finding]) -> None:
    items = _of(found, "payload-order")
    assert [item.message.partition(",")[0] for item in items] == [
        "v1 against v4",
        "v2 against v4",
        "v3 against v4",
    ]
    assert "rtt_mean of queued, 4096 B in 1.69 µs but 64 B in 16.8 µs" in items[0].message


def test_ns_and_us_for_the_same_ping_pong(found: list[Finding]) -> None:
    items = _of(found, "magnitude")
    assert len(items) == 3
    assert "rtt_mean at 4096 B 1.69 µs -> 19.9 µs (factor 11.8)" in items[0].message
    assert all("published in ns, then in us" in item.message for item in items)
    # The same figures are not a thousandfold apart: it is no mere slip of the unit.
    assert not any("slip" in item.message for item in items)


def test_withdrawn_latencies(found: list[Finding]) -> None:
    items = _of(found, "withdrawn", "vsock-direct-enqueue")
    assert sum(len(item.claims) for item in items) == 3 + 2 + 2
    assert all("20240730-pinna-v4-0-5c9179164db5@outlook.com" in item.message for item in items)
    assert not any("v4" in name for item in items for name in item.claims)


def test_no_obvious_difference_against_plus_87_percent(found: list[Finding]) -> None:
    (item,) = _of(found, "reversal", "virtio-net-netperf")
    assert item.claims == (
        "virtio-net-netperf/rfc.throughput",
        "virtio-net-netperf/merged.throughput",
    )


def test_large_packets_lose_in_v2_and_gain_later(found: list[Finding]) -> None:
    (item,) = _of(found, "reversal", "vsock-skb-merge")
    assert item.claims[0] == "vsock-skb-merge/v2.large"


def test_spread_over_the_limit(found: list[Finding]) -> None:
    (item,) = _of(found, "wide-spread")
    assert "34.5% before and 1.9% after" in item.message


def test_uperf_draws_no_normal_sizes(found: list[Finding]) -> None:
    (item,) = _of(found, "tool-limit")
    assert item.claims == ("vsock-skb-merge/v2.medium",)


def test_short_reads_at_4_kib_only(found: list[Finding]) -> None:
    items = _of(found, "short-read")
    assert {item.claims[0].split(".")[0][-2:]: item.severity for item in items} == {
        "v1": "fault",
        "v2": "fault",
        "v3": "fault",
        "v4": "note",
    }
    assert all(".4096." in name for item in items for name in item.claims)


def test_runs_that_are_not_stated(found: list[Finding]) -> None:
    (item,) = _of(found, "missing-n", "vhost-net-rx-poll")
    assert len(item.claims) == 162
    (item,) = _of(found, "missing-n", "vsock-direct-enqueue")
    assert {name.split("/")[1][:2] for name in item.claims} == {"v2", "v3"}
    assert len(_of(found, "missing-spread")) == 7


def test_the_seeds_have_no_faults_beyond_the_known(found: list[Finding]) -> None:
    faults = Counter((item.experiment, item.kind) for item in found if item.severity == "fault")
    assert faults == {
        ("vhost-net-rx-poll", "duplicate-row"): 2,
        ("vhost-net-tx-notify", "withdrawn"): 1,
        ("virtio-net-netperf", "percent"): 1,
        ("vsock-direct-enqueue", "magnitude"): 3,
        ("vsock-direct-enqueue", "payload-order"): 3,
        ("vsock-direct-enqueue", "latency-against-stream"): 3,
        ("vsock-direct-enqueue", "withdrawn"): 3,
        ("vsock-direct-enqueue", "short-read"): 3,
        ("vsock-skb-merge", "difference"): 1,
        ("vsock-throughput", "stale-table"): 1,
    }


def test_findings_come_worst_first_and_name_their_rule(found: list[Finding]) -> None:
    order = [item.severity for item in found]
    assert order == sorted(order, key=["fault", "warning", "note"].index)
    assert all(item.rule.source and item.rule.title for item in found)
    assert len(RULES) == len({rule.title for rule in RULES.values()})


def test_one_experiment_is_held_against_the_others() -> None:
    claims, found = audit_selection("vsock-direct-enqueue")
    assert {claim.experiment for claim in claims} == {"vsock-direct-enqueue"}
    assert len(_of(found, "latency-against-stream")) == 3
    assert {item.experiment for item in found} == {"vsock-direct-enqueue"}


def test_unknown_selections_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no claims for experiment"):
        audit_selection("nothing")
    with pytest.raises(UserError, match="cannot read"):
        audit_selection(file=tmp_path / "none.yaml")
    with pytest.raises(UserError, match="both an experiment"):
        audit_selection("vsock-throughput", tmp_path / "none.yaml")


# --- nothing in a clean file, whatever is done to it that keeps it true --------------------------


def test_nothing_is_found_in_the_clean_file() -> None:
    assert audit(CLEAN) == []
    _, found = audit_selection(file=Path(__file__).parent / "data" / "synthetic-clean.yaml")
    assert found == []


def test_nothing_is_found_in_nothing() -> None:
    assert audit([]) == []


@given(order=st.permutations(CLEAN))
@settings(max_examples=20, deadline=None)
def test_order_of_claims_does_not_matter(order: list[Claim]) -> None:
    assert audit(order) == []


@given(power=st.integers(-4, 4), factor=st.decimals("0.2", "5", places=3))
@settings(max_examples=40, deadline=None)
def test_a_faster_or_slower_machine_is_not_flagged(power: int, factor: Decimal) -> None:
    speed = factor.scaleb(power)

    def scale(claim: Claim) -> Claim:
        figure = claim.published
        if figure.before is None or figure.after is None:
            return claim
        by = 1 / speed if claim.direction == "lower" else speed
        before, after = (Decimal(f"{value * by:.12g}") for value in (figure.before, figure.after))
        difference = None if figure.difference is None else after - before
        return _with(claim, before=before, after=after, difference=difference)

    assert audit([scale(claim) for claim in CLEAN]) == []


@given(
    before=st.decimals("0.5", "99999", places=6),
    ratio=st.decimals("0.05", "20", places=6),
    places=st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3)),
)
@settings(deadline=None)
def test_honest_rounding_is_not_flagged(
    before: Decimal, ratio: Decimal, places: tuple[int, int, int]
) -> None:
    after = before * ratio
    claim = _with(
        BY_ID["v2.stream.1.64.throughput"],
        before=max(round(before, places[0]), Decimal(1).scaleb(-places[0])),
        after=round(after, places[1]),
        change=round((ratio - 1) * 100, places[2]),
    )
    assert _kinds([claim])["percent"] == 0


@given(
    thr=st.decimals("-40", "80", places=5),
    cpu=st.decimals("-40", "80", places=5),
    places=st.integers(0, 4),
)
@settings(deadline=None)
def test_honest_normalised_figures_are_not_flagged(thr: Decimal, cpu: Decimal, places: int) -> None:
    exact = ((1 + thr / 100) / (1 + cpu / 100) - 1) * 100
    row = _row("v2.normalised.64.1")
    values = {"throughput": thr, "cpu": cpu, "throughput_per_cpu": exact}
    changed = [_with(row[name], change=round(value, places)) for name, value in values.items()]
    assert _kinds(changed)["normalised"] == 0


def _row(prefix: str) -> dict[str, Claim]:
    return {claim.metric: claim for name, claim in BY_ID.items() if name.startswith(f"{prefix}.")}


# --- every fault that is put into the clean file is found ---------------------------------------

STATED = [
    claim
    for claim in CLEAN
    if claim.published.change is not None and claim.published.before is not None
]


@given(
    claim=st.sampled_from(STATED),
    beyond=st.decimals("0.01", "200", places=2),
    sign=st.sampled_from([1, -1]),
)
@settings(deadline=None)
def test_a_wrong_percentage_is_always_found(claim: Claim, beyond: Decimal, sign: int) -> None:
    ratio, change = raw_ratio(claim.published), claim.published.change
    assert ratio is not None
    assert change is not None
    possible, unit = percent_of(ratio), printed(change)
    half = (unit.high - unit.low) / 2
    edge = possible.high + half if sign > 0 else possible.low - half
    step = 2 * half
    # The next printable figure beyond what rounding allows.
    wrong = (edge / step).to_integral_value(
        rounding="ROUND_FLOOR" if sign < 0 else "ROUND_CEILING"
    ) * step + sign * (step + beyond.quantize(step))
    if wrong < -100:
        return
    items = _of(audit(_swap(_with(claim, change=wrong))), "percent")
    assert [item.claims for item in items] == [(claim.id,)]


@given(
    metric_name=st.sampled_from(["throughput", "cpu", "throughput_per_cpu"]),
    point=st.sampled_from(["64.1", "64.2", "256.1"]),
    points=st.decimals("0.5", "30", places=4),
    sign=st.sampled_from([1, -1]),
)
@settings(deadline=None)
def test_a_wrong_normalised_row_is_always_found(
    metric_name: str, point: str, points: Decimal, sign: int
) -> None:
    claim = _row(f"v2.normalised.{point}")[metric_name]
    assert claim.published.change is not None
    wrong = _with(claim, change=claim.published.change + sign * points)
    items = _of(audit(_swap(wrong)), "normalised")
    assert len(items) == 1
    assert claim.id in items[0].claims


@given(wrong=st.integers(-400, 400).filter(lambda value: not -220 <= value <= 0))
def test_a_wrong_difference_is_always_found(wrong: int) -> None:
    claim = _with(BY_ID["v2.slab"], difference=Decimal(wrong))
    assert _kinds(_swap(claim)) == {"difference": 1}


POINTS = sorted({name.rpartition(".")[0] for name in BY_ID if name.startswith("v2.latency")})


@given(pair=st.sampled_from(list(itertools.permutations(POINTS, 2))))
@settings(max_examples=10, deadline=None)
def test_a_copied_row_is_always_found(pair: tuple[str, str]) -> None:
    source, target = (_row(name) for name in pair)
    copied = [
        replace(target[name], published=claim.published, before=claim.before, after=claim.after)
        for name, claim in source.items()
    ]
    (item,) = _of(audit(_swap(*copied)), "duplicate-row")
    assert set(item.claims) == {claim.id for row in (source, target) for claim in row.values()}


def test_rows_with_few_digits_may_agree() -> None:
    # 0.0 % twice is what small effects look like, not a copy.
    claims = [
        _with(BY_ID[f"v2.normalised.{point}.cpu"], change=Decimal("0.0"))
        for point in ("64.1", "64.2", "256.1")
    ]
    assert _kinds(claims)["duplicate-row"] == 0


def _as_version(claim: Claim, version: str, kernel: str) -> Claim:
    return replace(
        claim,
        id=claim.id.replace("/v2.", f"/{version}."),
        version=version,
        environment=replace(claim.environment, kernel=kernel),
    )


@pytest.mark.parametrize(("kernel", "severity"), [("6.2.0", "fault"), ("6.1.9", "warning")])
def test_a_table_kept_in_the_next_version_is_found(kernel: str, severity: str) -> None:
    kept = [_as_version(claim, "v3", kernel) for claim in CLEAN if claim.version == "v2"]
    (item,) = audit([*CLEAN, *kept])
    assert (item.kind, item.severity) == ("stale-table", severity)
    assert ("the base moved: 6.1.9 -> 6.2.0" in item.message) == (severity == "fault")


def test_a_table_kept_in_part_and_in_another_unit_is_found() -> None:
    kept = [
        replace(
            _as_version(claim, "v3", "6.2.0"),
            published=replace(_times(claim, Decimal(1000)).published, unit="ns"),
        )
        for name, claim in BY_ID.items()
        if name.startswith("v2.latency.64.")
    ]
    (item,) = audit([*CLEAN, *kept])
    assert item.kind == "stale-table"
    assert "3 of 3 figures are identical in v2 and v3" in item.message


@given(factor=st.sampled_from([Decimal("1e3"), Decimal("1e-3"), Decimal("7.3"), Decimal("0.11")]))
@settings(deadline=None)
def test_a_baseline_of_another_magnitude_is_found(factor: Decimal) -> None:
    wrong = [_times(claim, factor) for claim in _row("v1.latency.64").values()]
    (item,) = _of(audit(_swap(*wrong)), "magnitude")
    assert ("slip of the unit" in item.message) == (factor in (1000, Decimal("0.001")))


def test_payload_order_allows_for_noise_only() -> None:
    claim = BY_ID["v2.latency.512.rtt_mean"]
    small = BY_ID["v2.latency.64.rtt_mean"].published.before
    assert small is not None
    for share, flagged in ((Decimal("0.95"), False), (Decimal("0.85"), True)):
        changed = _with(claim, before=small * share, change=None)
        assert ("payload-order" in _kinds(_swap(changed))) == flagged


def test_tails_are_not_held_to_the_payload_order() -> None:
    claim = BY_ID["v2.latency.3584.rtt_p99"]
    lower = _with(claim, before=Decimal("29.0"), after=Decimal("27.9"))
    assert _kinds(_swap(lower)) == {}


def test_latency_that_outruns_a_stream_is_found() -> None:
    # 3584 B at 6.12 Gb/s is 4.68 us per message.
    claim = BY_ID["v2.latency.3584.rtt_p1"]
    for before, flagged in (("4.69", 0), ("4.67", 1)):
        changed = _with(claim, before=Decimal(before), after=Decimal("4.12"), change=None)
        assert _kinds(_swap(changed))["latency-against-stream"] == flagged


@pytest.mark.parametrize("other", ["streams", "path", "payload"])
def test_streams_of_another_kind_say_nothing_of_a_latency(other: str) -> None:
    latency = _with(BY_ID["v2.latency.3584.rtt_p1"], before=Decimal("1"), after=Decimal("0.9"))
    stream = BY_ID["v2.stream.1.3584.throughput"]
    changes: dict[str, Any] = {
        "streams": {"params": {**stream.params, "streams": 2}},
        "payload": {"params": {**stream.params, "payload": 64}},
        "path": {"path": "virtio-net/vhost-net"},
    }
    assert _kinds([latency, stream])["latency-against-stream"] == 1
    assert _kinds([latency, replace(stream, **changes[other])])["latency-against-stream"] == 0


def test_opposite_effects_are_found_beyond_small_ones() -> None:
    rise, fall = Decimal("9"), Decimal("-9")
    claim = BY_ID["v2.tail"]
    later = replace(claim, id=claim.id.replace("v2", "v3"), version="v3")
    for one, two, flagged in ((rise, fall, 1), (rise, rise, 0), (Decimal("0.5"), fall, 0)):
        pair = [_with(claim, change=one), _with(later, change=two)]
        assert _kinds(pair)["reversal"] == flagged


def test_percentiles_out_of_order_are_found() -> None:
    row = _row("v2.latency.64")
    low, high = row["rtt_p1"], row["rtt_p99"]
    turned = [
        replace(low, published=high.published, before=high.before, after=high.after),
        replace(high, published=low.published, before=low.before, after=low.after),
    ]
    kinds = _kinds(_swap(*turned))
    assert kinds["percentile-order"] == 4


def test_a_statistic_copied_into_another_is_found() -> None:
    # firecracker#2226 put the average into the maximum.
    row = _row("v2.latency.64")
    mean = row["rtt_mean"]
    copied = replace(row["rtt_p99"], published=mean.published, before=mean.before, after=mean.after)
    assert _kinds(_swap(copied)) == {"copied-statistic": 2}


def test_a_rate_of_zero_is_found() -> None:
    claim = _with(BY_ID["v2.stream.1.64.throughput"], after=Decimal("0.00"), change=Decimal("-100"))
    assert _kinds(_swap(claim))["zero"] == 1
    # No interrupts at all is an effect, not a failure.
    assert _kinds(_swap(_with(BY_ID["v2.tail"], change=Decimal("-100")))) == {}


@given(claim=st.sampled_from(CLEAN))
@settings(max_examples=20, deadline=None)
def test_a_withdrawn_claim_is_always_found(claim: Claim) -> None:
    (item,) = audit(_swap(replace(claim, status="withdrawn", status_by="its author")))
    assert (item.kind, item.claims) == ("withdrawn", (claim.id,))
    assert "its author" in item.message


def test_318k_against_316k_with_one_run() -> None:
    claim = _with(
        BY_ID["v2.stream.1.64.throughput"],
        before=Decimal("318"),
        after=Decimal("316"),
        change=None,
    )
    (item,) = audit([replace(claim, n=1, spread=(0.01, 0.01))])
    assert (item.kind, item.severity) == ("single-run", "fault")
    assert f"needs {required_runs(316 / 318 - 1, (0.01, 0.01))} runs per arm" in item.message


@pytest.mark.parametrize(
    ("change", "spread", "runs"),
    [
        # n = 2 (2.8 cv / log ratio)^2, by hand.
        (0.10, (0.05, 0.05), 5),
        (0.01, (0.05, 0.05), 396),
        (-1.0, (0.05, 0.05), 2),
        (5.0, (0.0, 0.0), 2),
    ],
)
def test_runs_needed(change: float, spread: tuple[float, float], runs: int) -> None:
    assert required_runs(change, spread) == runs


def test_a_spread_of_6_9_percent_against_the_limit() -> None:
    # pbench#2386
    claim = BY_ID["v2.stream.1.64.throughput"]
    assert _kinds(_swap(replace(claim, spread=(0.069, 0.02)))) == {"wide-spread": 1}
    assert _kinds(_swap(replace(claim, spread=(0.05, 0.05)))) == {}


def test_a_change_within_its_noise_is_found() -> None:
    claim = _with(
        BY_ID["v2.stream.1.64.throughput"],
        before=Decimal("0.310"),
        after=Decimal("0.312"),
        change=None,
    )
    assert _kinds([replace(claim, n=5, spread=(0.02, 0.02))]) == {"within-noise": 1}
    assert _kinds([replace(claim, n=5000, spread=(0.02, 0.02))]) == {}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"n": None}, "missing-n"),
        ({"spread": None}, "missing-spread"),
        ({"duration_s": None}, "missing-setup"),
        ({"message_id": "unverified"}, "unverified-source"),
    ],
)
def test_what_is_left_unsaid_is_found(change: dict[str, Any], kind: str) -> None:
    assert _kinds(_swap(replace(CLEAN[0], **change))) == {kind: 1}


def test_fio_before_vsock_is_found() -> None:
    assert _kinds(_swap(replace(CLEAN[0], tool="fio 3.33"))) == {"tool-limit": 1}
    assert _kinds(_swap(replace(CLEAN[0], tool="fio 3.37-56"))) == {}


def test_the_rounding_of_about() -> None:
    assert printed(Decimal(540), approximate=True).low == 535
    assert printed(Decimal(540)).low == Decimal("539.5")
    assert printed(Decimal("4.0"), approximate=True).low == Decimal("3.95")


def test_directions_come_from_the_registry() -> None:
    assert {claim.direction == metric(claim.metric).direction for claim in CLEAN} == {True}


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["v1"], "v1"),
        (["v1", "v2"], "v1 and v2"),
        (["v3", "v4", "v5", "v9"], "v3 to v5 and v9"),
        (["rfc", "merged", "rfc"], "rfc and merged"),
        (["v2", "v2-reply", "v3", "v4", "v5"], "v2, v2-reply and v3 to v5"),
    ],
)
def test_names_of_versions(names: list[str], text: str) -> None:
    assert versions_text(names) == text


# --- how it is shown ----------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 160])
def test_text_names_every_finding_at_any_width(found: list[Finding], width: int) -> None:
    console = Console(width=width, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        audit_view.render(found, console)
    text = capture.get()
    assert max(len(line) for line in text.splitlines()) <= width
    for kind, count in Counter(item.kind for item in found).items():
        assert text.count(kind) >= count
    assert "21 faults, 13 warnings, 21 notes" in " ".join(text.split())


def test_text_of_no_findings() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        audit_view.render([], console)
    assert "no findings" in capture.get()


def test_brackets_in_a_message_are_text() -> None:
    console = Console(width=120)
    item = Finding("zero", "fault", ("a/b.c",), "range [0] and [bold]")
    with console.capture() as capture:
        audit_view.render([item], console)
    assert "[0] and [bold]" in capture.get()


def test_records_are_plain_json(found: list[Finding]) -> None:
    records = json.loads(json.dumps(audit_view.findings_as_records(found)))
    assert len(records) == len(found)
    assert set(records[0]) == {
        "kind",
        "severity",
        "experiment",
        "claims",
        "message",
        "rule",
        "source",
    }


@pytest.fixture
def closed() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.mark.usefixtures("closed")
def test_heat_maps_show_the_matrix_and_frame_what_repeats(found: list[Finding]) -> None:
    matrix = load_claims("vhost-net-rx-poll")
    figure = claim_figures.heat_maps(matrix, found)
    panels = figure.axes[:9]
    texts = [text for panel in panels for text in panel.texts]
    assert len(texts) == 162
    assert Counter(len(panel.patches) for panel in panels) == {4: 3, 0: 6}
    frame = claim_figures.matrix_frame(matrix, "guest-tx", ["throughput"])
    assert frame.loc[1, 1024] == pytest.approx(-18.9329)
    assert frame.shape == (4, 6)
    # Less CPU is for the better, so both end on the green side of the colour scale.
    for panel, value in ((panels[0], -7.0963), (panels[1], 12.6880)):
        (mesh,) = panel.collections
        assert mesh.get_array().ravel()[1] == pytest.approx(value)  # type: ignore[union-attr]


@pytest.mark.usefixtures("closed")
def test_no_text_of_the_heat_maps_overlaps_another(found: list[Finding]) -> None:
    figure = claim_figures.heat_maps(load_claims("vhost-net-rx-poll"), found)
    _assert_apart(figure)


@pytest.mark.usefixtures("closed")
def test_latency_figure_draws_the_means_and_the_bound() -> None:
    latencies = load_claims("vsock-direct-enqueue")
    figure = claim_figures.latency_versions(latencies, load_claims("vsock-throughput"))
    (axes,) = figure.axes
    assert len(axes.get_yticks()) == 8
    ends = [np.asarray(line.get_xdata()) for line in axes.lines]
    bounds = [float(left) for left, right in ends if left == right]
    assert bounds == [pytest.approx(4096 * 8 / 6.87e9 * 1e6)] * 4
    _assert_apart(figure)


@pytest.mark.usefixtures("closed")
def test_stated_percentages_as_drawn() -> None:
    frame = claim_figures.stated_frame(load_claims())
    assert set(frame.index[~frame["possible"]]) == {
        "virtio-net-netperf/merged.throughput",
        "vsock-skb-merge/v2.large",
    }
    assert frame.loc["virtio-net-netperf/merged.throughput", "exact"] == pytest.approx(87.0968)
    _assert_apart(claim_figures.stated_against_raw(load_claims()))


def _ticks(axis: Axis) -> list[Text]:
    # Matplotlib keeps a tick or two outside the view, which it does not draw.
    low, high = sorted(axis.get_view_interval())
    return [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]


def _assert_apart(figure: Figure) -> None:
    """No two labels of a figure overlap, and none is cut off by its edge."""
    figure.canvas.draw()
    labels = [
        text
        for axes in figure.axes
        for text in (*axes.texts, axes.title, *_ticks(axes.xaxis), *_ticks(axes.yaxis))
        if text.get_text()
    ]
    boxes = [label.get_window_extent() for label in labels]
    for (one, box), (two, other) in itertools.combinations(zip(labels, boxes, strict=True), 2):
        assert not box.overlaps(other), (one.get_text(), two.get_text())
    width, height = figure.canvas.get_width_height()
    for label, box in zip(labels, boxes, strict=True):
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
        assert inside, label.get_text()


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize(
    "draw",
    [claim_figures.heat_maps, claim_figures.latency_versions, claim_figures.stated_against_raw],
)
def test_nothing_to_draw_is_said(draw: Callable[[list[Claim]], Figure]) -> None:
    with pytest.raises(UserError) as caught:
        draw([BY_ID["v2.tail"]])
    assert caught.value.remedy


def test_tables_for_reading(found: list[Finding]) -> None:
    claims = load_claims()
    overview = claim_figures.overview_table(claims)
    assert overview["figures"].sum() == len(claims)
    table = claim_figures.claims_table(load_claims("vsock-skb-merge"))
    assert (table["version"] == "v3 to v9").sum() == 4
    html = claim_figures.shown(claim_figures.findings_table(found)).to_html()
    assert "<b>" not in html
    assert "31 -&gt; 58 Gb/s" in html
    assert len(claim_figures.rules_table()) == len(RULES)


@pytest.mark.usefixtures("closed")
def test_figures_are_written_only_where_asked(tmp_path: Path) -> None:
    figure = claim_figures.stated_against_raw(load_claims())
    assert claim_figures.save_figures(None, a_b=figure) == []
    (path,) = claim_figures.save_figures(tmp_path / "new", a_b=figure)
    assert path.name == "a-b.png"
    assert path.stat().st_size > 1000
