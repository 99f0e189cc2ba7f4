"""Metrics, and the claims of the seeds as they are read from data/claims/."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from vringlab.analysis import units
from vringlab.analysis.claims import (
    UNVERIFIED,
    Claim,
    experiments,
    find_claim,
    load_claims,
    read_claims,
)
from vringlab.campaign import experiment
from vringlab.errors import UserError

CLEAN = Path(__file__).parent / "data" / "synthetic-clean.yaml"
WITHDRAWN_BY = "20240730-pinna-v4-0-5c9179164db5@outlook.com"


@pytest.fixture(scope="module")
def claims() -> dict[str, Claim]:
    return {claim.id: claim for claim in load_claims()}


# --- metrics and units ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "unit", "direction"),
    [
        ("rtt_mean", "ns", "lower"),
        ("rtt_p1", "ns", "lower"),
        ("rtt_p99.9", "ns", "lower"),
        ("round_trips", "1/s", "higher"),
        ("pps_tx", "1/s", "higher"),
        ("pps_rx", "1/s", "higher"),
        ("tx_interrupts", "1/s", "lower"),
        ("kicks", "1/s", "lower"),
        ("throughput", "bit/s", "higher"),
        ("cpu", "percent", "lower"),
    ],
)
def test_metrics_shared_with_the_samples(name: str, unit: str, direction: str) -> None:
    spec = units.metric(name)
    assert (spec.unit, spec.direction) == (unit, direction)


def test_every_metric_is_described_and_its_unit_known() -> None:
    for name, spec in units.METRICS.items():
        assert name == spec.name
        assert spec.description.endswith(".")
        assert units.factor(spec.unit, spec.unit) == 1
        assert all(part in units.METRICS for part in spec.per or ())


@pytest.mark.parametrize(
    ("name", "value", "unit", "canonical"),
    [
        ("rtt_mean", 12.91, "us", 12910),
        ("rtt_mean", 12.91, "µs", 12910),
        ("throughput", 28.7, "Gb/s", 28.7e9),
        ("throughput", 19.51, "Mbit/s", 19.51e6),
        ("throughput", 2, "MB/s", 16e6),
        ("pps_tx", 6.45, "Mpps", 6.45e6),
        ("slab_peak", 540, "MB", 540e6),
        ("slab_peak", 1, "MiB", 1048576),
        ("cpu", 50, "%", 50),
    ],
)
def test_conversion_is_exact(name: str, value: float, unit: str, canonical: float) -> None:
    assert units.to_canonical(name, value, unit) == canonical


@pytest.mark.parametrize(
    ("name", "unit", "problem"),
    [
        # pint's own registry would let the first four pass: bit and percent are plain numbers.
        ("throughput", "1/s", "does not measure the same"),
        ("throughput", "Mpps", "does not measure the same"),
        ("slab_peak", "percent", "does not measure the same"),
        ("cpu", "byte", "does not measure the same"),
        ("rtt_mean", "Gb/s", "does not measure the same"),
        ("rtt_mean", "", "unknown unit"),
        ("rtt_mean", "parsec", "unknown unit"),
        ("rtt_mean", "3 us", "unknown unit"),
        ("rtt_mean", "us**9**9**9", "unknown unit"),
        ("rtt_mean", "(", "unknown unit"),
        ("rtt_mena", "ns", "unknown metric"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, unit: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        units.to_canonical(name, 1.0, unit)
    assert caught.value.remedy


def test_a_misspelt_metric_is_answered_with_the_near_ones() -> None:
    with pytest.raises(UserError) as caught:
        units.metric("rtt_p90.9")
    assert "rtt_p99.9" in caught.value.remedy


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (722.45, "ns", "722 ns"),
        (12910, "ns", "12.9 µs"),
        (1.5e9, "ns", "1.5 s"),
        (45.4e9, "bit/s", "45.4 Gb/s"),
        (10.7e6, "1/s", "10.7 M/s"),
        (999.96, "1/s", "1000 /s"),
        (0, "1/s", "0 /s"),
        (-150e6, "byte", "-150 MB"),
        (34.5, "percent", "34.5 %"),
        (3, "furlong", "3 furlong"),
    ],
)
def test_figures_for_people(value: float, unit: str, text: str) -> None:
    assert units.humanize(value, unit) == text


# --- the seeds' figures -------------------------------------------------------------------------


def test_every_experiment_of_the_seeds_has_claims() -> None:
    assert set(experiments()) >= {
        "vsock-direct-enqueue",
        "vsock-throughput",
        "virtio-net-napi-tx",
        "virtio-net-netperf",
        "vhost-net-rx-poll",
        "vsock-skb-merge",
    }


def test_identifiers_are_unique_and_name_their_experiment() -> None:
    found = load_claims()
    assert max(Counter(claim.id for claim in found).values()) == 1
    assert all(claim.id.startswith(f"{claim.experiment}/{claim.version}.") for claim in found)


@pytest.mark.parametrize("name", sorted({*experiments()} & {*experiment.names()}))
def test_claims_name_arms_of_their_experiment(name: str) -> None:
    # The driver before the conversion to sk_buff needs a kernel up to 6.1.62.
    arms = set(experiment.load(name).arm_names) | ({"pkt"} if name == "vsock-skb-merge" else set())
    assert all(set(claim.arms) <= arms for claim in load_claims(name))


def test_seed_000_and_its_later_versions(claims: dict[str, Claim]) -> None:
    v1 = claims["vsock-direct-enqueue/v1.latency.4096.rtt_p1"]
    assert (v1.before, v1.after, v1.unit, v1.direction) == (722.45, 602.62, "ns", "lower")
    assert v1.change == pytest.approx(602.62 / 722.45 - 1)
    assert (v1.n, v1.duration_s, v1.environment.kernel) == (50, 50.0, "6.8.11")
    assert (v1.status, v1.status_by) == ("withdrawn", WITHDRAWN_BY)
    assert v1.message_id == "20240614135543.31515-3-luigi.leonardi@outlook.com"
    assert v1.arms == ("queued", "rfc-v1")
    assert v1.params == {"payload": 4096, "direction": "h-g-h"}
    mean = claims["vsock-direct-enqueue/v1.latency.4096.rtt_mean"]
    tail = claims["vsock-direct-enqueue/v1.latency.4096.rtt_p99"]
    assert (mean.before, mean.after) == (1686.23, 1248.83)
    assert (tail.before, tail.after) == (35379.27, 17557.33)
    for version, (small, large) in {"v2": (780.83, 1650), "v3": (810, 1720)}.items():
        rows = [claims[f"vsock-direct-enqueue/{version}.latency.{p}.rtt_mean"] for p in (512, 4096)]
        assert [row.before for row in rows] == [small, large]
        assert {row.status for row in rows} == {"withdrawn"}
        assert {row.arms for row in rows} == {("queued", "direct")}
    v4 = claims["vsock-direct-enqueue/v4.latency.64.rtt_mean"]
    assert (v4.before, v4.after, v4.status, v4.arms) == (
        16780,
        13570,
        "standing",
        ("queued", "direct"),
    )
    assert v4.improvement == pytest.approx(0.1913, abs=1e-4)
    assert sum(claim.version == "v4" for claim in load_claims("vsock-direct-enqueue")) == 9


def test_iperf_tables_of_v3_and_v4(claims: dict[str, Claim]) -> None:
    by_version = Counter(claim.version for claim in load_claims("vsock-throughput"))
    assert by_version == {"v2": 1, "v3": 9, "v4": 9}
    row = claims["vsock-throughput/v4.iperf.4.131072.throughput"]
    assert (row.before, row.after) == (34.2e9, 50.5e9)


def test_all_rows_of_seed_001() -> None:
    found = load_claims("vhost-net-rx-poll")
    assert len(found) == 54 * 3
    per_block = Counter((claim.params["direction"], claim.metric) for claim in found)
    assert per_block == {
        **{
            (block, metric): 24
            for block in ("guest-rx", "guest-tx")
            for metric in ("throughput", "cpu", "throughput_per_cpu")
        },
        **{("rr", metric): 6 for metric in ("transactions", "cpu", "transactions_per_cpu")},
    }
    # Sums over the mail's columns, added up apart from the claims file.
    sums: dict[tuple[object, str], Decimal] = {}
    for claim in found:
        assert claim.published.change is not None
        key = (claim.params["direction"], claim.metric)
        sums[key] = sums.get(key, Decimal(0)) + claim.published.change
    assert {(block, metric): str(value) for (block, metric), value in sums.items()} == SUMS_001
    first = found[0]
    assert (first.before, first.is_absolute) == (None, False)
    assert first.change == pytest.approx(0.007773)
    assert first.message_id == "1408074008-4357-1-git-send-email-jasowang@redhat.com"


SUMS_001 = {
    ("guest-rx", "throughput"): "-25.9140",
    ("guest-rx", "cpu"): "-291.3252",
    ("guest-rx", "throughput_per_cpu"): "304.7811",
    ("guest-tx", "throughput"): "-24.1405",
    ("guest-tx", "cpu"): "-106.2989",
    ("guest-tx", "throughput_per_cpu"): "85.0713",
    ("rr", "transactions"): "-21.0761",
    ("rr", "cpu"): "-52.0195",
    ("rr", "transactions_per_cpu"): "33.6475",
}


def test_seed_003_and_its_merged_form(claims: dict[str, Claim]) -> None:
    rfc = claims["virtio-net-napi-tx/rfc.pktgen.other.packed.pps_tx"]
    assert (rfc.before, rfc.after, rfc.stated_change) == (8.3e6, 12.5e6, 0.506)
    assert (rfc.arms, rfc.status) == (("stock", "rfc"), "superseded")
    assert rfc.params == {"irq": "other", "ring": "packed"}
    merged = claims["virtio-net-napi-tx/merged.pktgen.same.split.tx_interrupts"]
    assert (merged.change, merged.before, merged.direction) == (-0.32, None, "lower")
    assert (merged.arms, merged.message_id) == (("stock", "merged"), UNVERIFIED)
    netperf = claims["virtio-net-netperf/merged.throughput"]
    # The figures count, not the text's +82 %.
    assert netperf.change == pytest.approx(58 / 31 - 1)
    assert netperf.stated_change == 0.82
    assert netperf.spread == (0.345, 0.019)
    words = claims["virtio-net-netperf/rfc.throughput"]
    assert (words.no_difference, words.change, words.is_absolute) == (True, 0.0, False)


def test_seed_004_and_its_later_versions(claims: dict[str, Claim]) -> None:
    peak = claims["vsock-skb-merge/v2-reply-slab.slab-peak"]
    assert (peak.before, peak.after, peak.difference) == (540e6, 390e6, -50e6)
    assert peak.arms == ("no-merge", "merge")
    assert (peak.status, peak.status_by) == ("superseded", "Yzy4tEGXSZcLYkLv@bullseye")
    corrected = claims["vsock-skb-merge/v2-reply-corrected.slab-peak"]
    assert (corrected.before, corrected.after, corrected.status) == (590e6, 540e6, "standing")
    assert corrected.message_id == peak.status_by
    typical = claims["vsock-skb-merge/v2-reply.slab-typical"]
    assert (typical.change, typical.ratio, typical.difference) == (None, None, -150e6)
    assert typical.is_absolute
    assert claims["vsock-skb-merge/v2.small"].before == 18.53e6
    assert claims["vsock-skb-merge/v2.medium"].params["sizes"] == "normal"
    for version in ("v3", "v8", "v9"):
        row = claims[f"vsock-skb-merge/{version}.large.65536.h2g.throughput"]
        assert (row.before, row.after, row.n) == (2.15e9, 3.6e9, 5)
    v10 = claims["vsock-skb-merge/v10.large.65536.g2h.throughput"]
    assert (v10.n, v10.environment.kind, v10.params["threads"]) == (10, "physical", 16)


def test_unknown_experiment_and_claim_are_answered_with_near_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_claims("vsock-direct-enque")
    assert "vsock-direct-enqueue" in caught.value.remedy
    with pytest.raises(UserError, match="no claims in"):
        load_claims(folder=tmp_path)
    with pytest.raises(UserError) as caught:
        find_claim(load_claims("vsock-throughput"), "vsock-throughput/v2.guest-to-hst")
    assert "vsock-throughput/v2.guest-to-host" in caught.value.remedy


# --- what the schema refuses --------------------------------------------------------------------

Change = Callable[[dict[str, Any]], object]


def _first(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["publications"][1]["claims"][0]
    return found


def _latency(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["publications"][0]["tables"][0]
    return found


def _write(folder: Path, change: Change | None = None) -> Path:
    content = yaml.safe_load(CLEAN.read_text())
    if change is not None:
        change(content)
    path = folder / CLEAN.name
    path.write_text(yaml.safe_dump(content))
    return path


def test_the_clean_file_is_read(tmp_path: Path) -> None:
    assert len(read_claims(_write(tmp_path))) == len(read_claims(CLEAN)) == 30


def test_a_file_that_is_still_to_be_filled_in_has_no_claims(tmp_path: Path) -> None:
    assert read_claims(_write(tmp_path, lambda c: c.update(publications=[]))) == []


REFUSED: list[tuple[str, Change, str, str]] = [
    ("unknown key", lambda c: _first(c).update(colour=1), "claims[0].colour", "unknown key"),
    ("near key", lambda c: _first(c).update(befor=1), "claims[0].befor", "did you mean before"),
    ("unknown metric", lambda c: _first(c).update(metric="slab"), "metric", "slab_peak"),
    ("unknown unit", lambda c: _first(c).update(unit="XB"), "slab_peak", "unknown unit 'XB'"),
    ("mixed units", lambda c: _first(c).update(unit="ns"), "slab_peak", "same thing as 'byte'"),
    ("direction", lambda c: _first(c).update(direction="higher"), "slab_peak", "lower is better"),
    ("no after", lambda c: _first(c).pop("after"), "claims[0]", "after is missing"),
    ("no before", lambda c: _first(c).pop("before"), "claims[0]", "before is missing"),
    ("NaN", lambda c: _first(c).update(before=math.nan), "claims[0].before", "not a finite"),
    ("infinite", lambda c: _first(c).update(after=math.inf), "claims[0].after", "not a finite"),
    ("negative", lambda c: _first(c).update(after=-3), "claims[0].after", "negative"),
    ("zero before", lambda c: _first(c).update(before=0), "claims[0].before", "not above zero"),
    ("huge", lambda c: _first(c).update(after=1e300), "claims[0].after", "too large"),
    ("text", lambda c: _first(c).update(after="400"), "claims[0].after", "not a number"),
    ("yes", lambda c: _first(c).update(after=True), "claims[0].after", "not a number"),
    ("below nothing", lambda c: _first(c).update(change=-101), "claims[0].change", "negative"),
    ("words and figure", lambda c: _first(c).update(no_difference=True), "claims[0]", "or else"),
    (
        "no figure",
        lambda c: c["publications"][1]["claims"][2].update(no_difference=False),
        "claims[2]",
        "give either",
    ),
    ("n = 0", lambda c: c["publications"][0].update(n=0), "publications[0].n", "greater than"),
    ("n = 2.5", lambda c: c["publications"][0].update(n=2.5), "publications[0].n", "integer"),
    ("n left out", lambda c: c["publications"][0].pop("n"), "publications[0].n", "required"),
    ("no time", lambda c: c["publications"][0].update(duration_s=0), "duration_s", "above zero"),
    (
        "spread",
        lambda c: c["publications"][0]["spread"].update(after=-1),
        "spread.after",
        "negative",
    ),
    (
        "message-id",
        lambda c: c["publications"][0].update(message_id="<a@b>"),
        "message_id",
        "no message-id",
    ),
    ("state", lambda c: c["publications"][1]["status"].update(state="fine"), "state", "'standing'"),
    (
        "withdrawn by whom",
        lambda c: c["publications"][1].update(status={"state": "withdrawn"}),
        "publications[1].status",
        "what withdrew",
    ),
    (
        "host",
        lambda c: c["publications"][0]["environment"].update(kind="cloud"),
        "environment.kind",
        "'nested'",
    ),
    ("arms", lambda c: c["publications"][0].update(arms=["stock"]), "arms", "required"),
    ("empty", lambda c: c["publications"][1].update(tables=[], claims=[]), "[1]", "says nothing"),
    ("none", lambda c: c.pop("publications"), "publications", "required"),
    ("newer format", lambda c: c.update(format=2), "format", "1"),
    ("other name", lambda c: c.update(experiment="other"), "experiment", "'other'"),
    ("short row", lambda c: _latency(c)["rows"][1].pop(), "tables[0]", "row 2 has 3 entries"),
    ("long row", lambda c: _latency(c)["rows"][0].append(1), "tables[0]", "row 1 has 5 entries"),
    ("cell", lambda c: _latency(c)["rows"][0].__setitem__(2, [1]), "tables[0]", "row 1, rtt_mean"),
    (
        "NaN in a cell",
        lambda c: _latency(c)["rows"][0].__setitem__(3, [1, math.nan]),
        "tables[0]",
        "row 1, rtt_p99: NaN is not a finite number",
    ),
    (
        "cell without after",
        lambda c: _latency(c)["rows"][0].__setitem__(1, [1, None]),
        "tables[0]",
        "row 1, rtt_p1: after is missing",
    ),
    (
        "key of a row",
        lambda c: _latency(c)["rows"][0].__setitem__(0, [64]),
        "tables[0]",
        "row 1, payload",
    ),
    (
        "metric of a column",
        lambda c: _latency(c)["columns"][0].update(metric="rtt"),
        "columns[0].metric",
        "unknown metric 'rtt'",
    ),
    (
        "identifier twice",
        lambda c: c["publications"][1]["claims"].append(copy.deepcopy(_first(c))),
        "publications[1]",
        "'synthetic-clean/v2.slab' is used twice",
    ),
    (
        "row twice",
        lambda c: _latency(c)["rows"].append([64, -1, -1, -1]),
        "publications[0]",
        "v1.latency.64.rtt_p1' is used twice",
    ),
]


@pytest.mark.parametrize(
    ("change", "place", "problem"),
    [case[1:] for case in REFUSED],
    ids=[case[0] for case in REFUSED],
)
def test_refused_with_file_key_and_remedy(
    tmp_path: Path, change: Change, place: str, problem: str
) -> None:
    path = _write(tmp_path, change)
    with pytest.raises(UserError) as caught:
        read_claims(path)
    assert str(path) in caught.value.message
    assert place in caught.value.message
    assert problem in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "file: "),
        (b"[]", "file: "),
        (b"just words", "file: "),
        (b"a: [1, 2", "no YAML"),
        (b"format: 1\nformat: 1\n", "key 'format' stands twice"),
        (b"a: !!python/object:os.system {}", "no YAML"),
        (b"\xff\xfe\x00", "no YAML"),
    ],
)
def test_what_is_no_claims_file(tmp_path: Path, text: bytes, problem: str) -> None:
    path = tmp_path / "synthetic-clean.yaml"
    path.write_bytes(text)
    with pytest.raises(UserError) as caught:
        read_claims(path)
    assert problem in caught.value.message
    assert str(path) in caught.value.message


def test_missing_file_and_folder_in_its_place(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UserError, match="cannot read claims file"):
            read_claims(path)


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys: list[Any] = list(node) if isinstance(node, dict) else []
    keys += range(len(node)) if isinstance(node, list) else []
    return [path, *(place for key in keys for place in _places(node[key], (*path, key)))]


PLACES = [place for place in _places(yaml.safe_load(CLEAN.read_text())) if place]
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.floats(), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


@settings(max_examples=80, deadline=None)
@given(place=st.sampled_from(PLACES), value=ODD)
def test_whatever_stands_anywhere_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, place: tuple[Any, ...], value: object
) -> None:
    def change(content: dict[str, Any]) -> None:
        node: Any = content
        for key in place[:-1]:
            node = node[key]
        node[place[-1]] = value

    path = _write(tmp_path_factory.mktemp("odd"), change)
    try:
        found = read_claims(path)
    except UserError:
        return
    changes = [claim.change for claim in found if claim.change is not None]
    assert all(math.isfinite(change) and change >= -1 for change in changes)
