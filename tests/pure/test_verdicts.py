"""Verdicts on simulated runs with known truth, and on broken ones."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vringlab.analysis import claims
from vringlab.analysis.sequential import SequentialPlan, decide
from vringlab.analysis.simulate import Design, Noise, as_samples, simulate
from vringlab.analysis.stats import Interval, adjust
from vringlab.analysis.verdicts import compare, decide_claim, judge, judge_all

QUIET = Noise(run=0.02, slow=0.05, interaction=0.005)
DATA = Path(__file__).resolve().parents[2] / "data" / "claims"


@dataclass(frozen=True)
class Where:
    kind: str = "physical"
    kernel: str = "6.9.8"


@dataclass(frozen=True)
class Claim:
    """The least that a verdict needs."""

    ratio: float | None = 0.8
    id: str = "vsock/v4.64.rtt_mean"
    metric: str = "rtt_mean"
    unit: str = "ns"
    params: dict[str, object] = field(default_factory=lambda: {"payload": 64})
    before: float | None = 16780.0
    after: float | None = None
    difference: float | None = None
    n: int | None = 50
    environment: Where = Where()
    status: str = "standing"
    status_by: str = ""
    version: str = "v4"
    message_id: str = "x@y"
    arms: tuple[str, str] = ("queued", "direct")
    workload: str = "fio"


def run(
    ratio: float = 0.8,
    boots: int = 5,
    blocks: int = 4,
    seed: int = 1,
    noise: Noise = QUIET,
    workload: str = "fio",
    payload: int = 64,
    **more: Any,
) -> pd.DataFrame:
    design = Design(boots, blocks)
    logs = simulate(design, noise, ratio, 1, seed)[:, 0]
    return as_samples(
        logs, design, workload=workload, params={"payload": payload}, host_kind="emulated", **more
    )


# --------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("truth", "claimed", "word"),
    [
        (0.80, 0.80, "reproduced"),
        (0.70, 0.80, "reproduced"),
        (0.50, 0.80, "same direction, other size"),
        (0.92, 0.60, "same direction, other size"),
        (1.00, 0.80, "no effect seen"),
        (1.25, 0.80, "contradicted"),
        (1.60, 1.62, "reproduced"),
        (0.70, 1.62, "contradicted"),
        (1.00, 1.003, "reproduced"),
        (1.30, 1.003, "contradicted"),
        (0.97, 0.95, "reproduced"),
    ],
)
def test_words(truth: float, claimed: float, word: str) -> None:
    verdict = judge(Claim(claimed), run(truth, 10, 5), draws=0)
    assert verdict.word == word
    assert verdict.sentence.startswith(word)


def test_wide_interval_is_insufficient_and_says_what_is_needed() -> None:
    verdict = judge(Claim(0.95), run(0.95, 3, 2, noise=Noise()), draws=0)
    assert verdict.word == "insufficient data"
    assert verdict.evidence.required is not None
    assert verdict.evidence.required.boots > 3
    assert f"needed: {verdict.evidence.required.blocks} blocks" in verdict.sentence
    assert verdict.evidence.smallest_detectable is not None


def test_no_effect_names_the_smallest_detectable_one() -> None:
    verdict = judge(Claim(0.8), run(1.0, 10, 5), draws=0)
    smallest = verdict.evidence.smallest_detectable
    assert smallest is not None
    assert 1.0 < smallest < 1.2
    assert f"{100 * (smallest - 1):.1f} %" in verdict.sentence


def test_withdrawn_figure_is_invalid_with_the_measurement_beside() -> None:
    verdict = judge(Claim(status="withdrawn", status_by="the v4 cover letter"), run(), draws=0)
    assert verdict.word == "invalid as published"
    assert "withdrawn by the v4 cover letter" in verdict.sentence
    assert verdict.as_record()["ratio"] == pytest.approx(0.8, rel=0.1)


def _points(**ran: bool) -> dict[str, object]:
    """What the provenance says of an arm, from `p64=False`: the point of payload 64 did not run."""
    points = [
        {"workload": "fio", "params": {"payload": int(name[1:])}, "exercised": value}
        for name, value in ran.items()
    ]
    return {"exercised": any(ran.values()), "points": points}


@pytest.mark.parametrize(
    ("provenance", "seen"),
    [
        ({}, None),
        ({"exercised": {"direct": {"exercised": True, "points": []}}}, True),
        ({"exercised": {"direct": {"exercised": False, "points": []}}}, False),
        ({"exercised": {"direct": {"exercised": None, "points": []}}}, None),
        # Of the points that the claim is about, not of others.
        ({"exercised": {"direct": _points(p64=False, p4096=True)}}, False),
        ({"exercised": {"direct": _points(p64=True, p4096=False)}}, True),
        ({"exercised": {"direct": _points(p4096=False)}}, False),
        ({"arms": {"direct": {"build_id": "ab"}}}, None),
        ({"exercised": {"rfc-v1": {"exercised": True, "points": []}}}, None),
        ({"exercised": "yes"}, None),
    ],
)
def test_exercised_is_read_from_the_provenance(
    provenance: dict[str, object], seen: bool | None
) -> None:
    verdict = judge(Claim(), run(), provenance, draws=0)
    assert verdict.evidence.exercised is seen
    assert verdict.word == ("not exercised" if seen is False else "reproduced")
    assert judge(Claim(), run(), provenance, exercised=True, draws=0).word == "reproduced"


def test_only_a_difference_is_not_comparable_on_an_emulated_host() -> None:
    claim = Claim(ratio=None, before=None, difference=-50e6, metric="slab_peak", unit="byte")
    frame = run(0.9, metric="slab_peak", base=540e6)
    verdict = judge(claim, frame, draws=0)
    assert verdict.word == "not comparable"
    assert "emulated" in verdict.sentence
    physical = frame.assign(host_kind="physical")
    assert judge(claim, physical, draws=0).word == "reproduced"
    assert judge(claim, physical, draws=0).evidence.claimed == pytest.approx(0.907, abs=0.01)


def test_figures_are_compared_on_physical_hosts_only() -> None:
    emulated = judge(Claim(), run(), draws=0)
    assert any("not comparable" in line for line in emulated.details)
    physical = judge(Claim(), run().assign(host_kind="physical"), draws=0)
    assert physical.evidence.comparable
    assert any("a factor of 6" in line for line in physical.details)
    unknown = replace(Claim(), environment=Where("unknown", ""))
    assert not judge(unknown, run().assign(host_kind="physical"), draws=0).evidence.comparable


def test_noise_floor_must_be_passed() -> None:
    frame = run(0.97, 5, 4, noise=Noise(run=0.005, slow=0.0))
    assert judge(Claim(0.97), frame, draws=0).word == "reproduced"
    twin = (frame["arm"] == "queued.aa").to_numpy()
    frame.loc[twin, "value"] *= 1.06
    verdict = judge(Claim(0.97), frame, draws=0)
    assert verdict.word == "insufficient data"
    assert "noise floor" in verdict.sentence
    assert any("beyond chance" in line for line in verdict.details)


def test_without_twin_it_is_judged_and_said() -> None:
    frame = run()
    verdict = judge(Claim(), frame[frame["arm"] != "queued.aa"], draws=0)
    assert verdict.word == "reproduced"
    assert any("No noise floor" in line for line in verdict.details)


# ---------------------------------------------------------------------------- boots and scope


def test_one_boot_is_insufficient_unless_asked_of_that_boot() -> None:
    frame = run(0.8, 1, 6)
    verdict = judge(Claim(), frame, draws=0)
    assert verdict.word == "insufficient data"
    assert "for that boot alone" in verdict.sentence
    here = judge(Claim(), frame, draws=0, scope="these boots")
    assert here.word == "reproduced"
    assert "within these 1 boots alone" in here.sentence


def test_n_of_one_reports_what_is_needed() -> None:
    # A report on the list, 2021-09-01: 318K against 316K, one run each.
    frame = run(316 / 318, 1, 1, noise=Noise(run=0, slow=0, boot=0), metric="round_trips")
    claim = Claim(316 / 318, metric="round_trips", unit="1/s", before=318e3, after=316e3, n=1)
    verdict = judge(claim, frame, draws=0)
    assert verdict.word == "insufficient data"
    assert verdict.evidence.required is not None
    assert verdict.evidence.required.assumed
    # (1.96 + 0.84)^2 x 0.05^2 / log(316/318)^2 is 493, and t needs a little more.
    assert 493 < verdict.evidence.required.blocks < 500
    assert "needed:" in verdict.sentence
    assert any("from one run" in line for line in verdict.details)


def test_sequential_decision_brings_its_own_interval() -> None:
    frame = run(0.8, 5, 2)
    plan = SequentialPlan(20, blocks_per_boot=2, claimed=0.8)
    decision = decide(frame, plan, "rtt_mean", "direct", "queued", {"payload": 64})
    assert decision.stop
    verdict = judge(Claim(), frame, draws=0, decision=decision)
    assert verdict.evidence.interval == decision.interval
    assert verdict.word == "reproduced"
    assert "look " in verdict.sentence


@pytest.mark.parametrize(
    ("truth", "claimed", "word"),
    [
        (0.8, 0.8, "reproduced"),
        (1.0, 0.8, "no effect seen"),
        (1.25, 0.8, "contradicted"),
        (1.0, 1.0, "reproduced"),
    ],
)
def test_until_decided_reaches_the_verdict_of_the_full_design(
    truth: float, claimed: float, word: str
) -> None:
    frame = run(truth, 10, 2)
    plan = SequentialPlan(20, blocks_per_boot=2)
    assert judge(Claim(claimed), frame, draws=0).word == word
    for block in range(1, 21):
        so_far = frame[frame["block"] <= block]
        decision, verdict = decide_claim(Claim(claimed), so_far, plan)
        if decision.stop:
            break
        assert verdict.word in ("insufficient data", word)
    assert verdict.word == word
    assert block <= 16
    assert decision.units * 2 == block


def test_until_decided_goes_on_through_faults() -> None:
    frame = run(0.8, 10, 2)
    bad = frame.assign(valid=False, reason="short reads")
    plan = SequentialPlan(20, blocks_per_boot=2)
    decision, verdict = decide_claim(Claim(), bad, plan)
    assert not decision.stop
    assert "short reads" in decision.why
    assert verdict.word == "insufficient data"
    decision, _ = decide_claim(Claim(metric="speed"), frame, plan)
    assert "unknown metric" in decision.why


# ---------------------------------------------------------------------------- other workloads


def test_second_tool_stands_in_when_the_claims_own_is_invalid() -> None:
    own = run(seed=1).assign(valid=False, reason="short reads")
    other = run(seed=2, workload="vsock-pingpong")
    other["cell_id"] += "-2"
    frame = pd.concat([own, other], ignore_index=True)
    verdict = judge(Claim(), frame, draws=0)
    assert verdict.word == "reproduced"
    assert "by vsock-pingpong" in verdict.sentence
    assert any("instead of fio" in line and "short reads" in line for line in verdict.details)
    frame["valid"] = True
    assert "by fio" in judge(Claim(), frame, draws=0).sentence


# ----------------------------------------------------------------------------------- bad input


def with_value(value: float) -> pd.DataFrame:
    frame = run()
    frame.loc[3, "value"] = value
    return frame


@pytest.mark.parametrize(
    ("frame", "claim", "hint"),
    [
        (run().assign(valid=False, reason="0 throughput"), Claim(), "0 throughput"),
        (run()[run()["arm"] == "queued"], Claim(), "no sample is of arm 'direct'"),
        (run().assign(value=100.0), Claim(), "last digit"),
        (with_value(math.nan), Claim(), "finite"),
        (with_value(-4.0), Claim(), "negative"),
        (run().assign(unit=["ns", "us"] * 30), Claim(), "mixed units"),
        (run(), Claim(metric="speed"), "unknown metric"),
        (run(), Claim(metric="throughput", unit="bit/s"), "throughput"),
        (run(), Claim(params={"payload": 4096}), "payload=4096"),
        (run(), Claim(params={"ring": "split"}), "no parameter 'ring'"),
        (run(), Claim(ratio=0.0), "no ratio"),
        (run().iloc[:0], Claim(), "no sample"),
        (pd.DataFrame(), Claim(), "lack the columns"),
        (run().drop(columns=["boot"]), Claim(), "lack the columns boot"),
        (pd.concat([run(), run()]), Claim(), "more than once"),
    ],
)
def test_faults_of_the_data_become_the_verdict(
    frame: pd.DataFrame, claim: Claim, hint: str
) -> None:
    verdict = judge(claim, frame, draws=0)
    assert verdict.word == "insufficient data"
    assert hint in verdict.sentence
    json.dumps(verdict.as_record(), allow_nan=False)


def test_invalid_samples_and_outliers_are_told() -> None:
    frame = run()
    frame.loc[frame["cell_id"] == "b003-direct", "reason"] = "pinning drifted"
    frame.loc[frame["reason"] != "", "valid"] = False
    frame.loc[frame["cell_id"] == "b007-direct", "value"] *= 5
    verdict = judge(Claim(), frame, draws=0)
    text = " ".join(verdict.details)
    assert "1 samples are invalid: pinning drifted" in text
    assert "Blocks far from the others, kept: 7 (direct)" in text


# ---------------------------------------------------------------------------------- many claims


def test_many_claims_are_adjusted_for_their_number() -> None:
    frames = []
    for payload in range(1, 21):
        part = run(1.0, 6, 4, seed=payload, payload=payload, noise=Noise())
        part["cell_id"] += f"-{payload}"
        frames.append(part)
    frame = pd.concat(frames, ignore_index=True)
    listed = [Claim(0.9, id=f"c{p}", params={"payload": p}) for p in range(1, 21)]
    alone = judge_all(listed, frame, draws=0, method=None)
    together = judge_all(listed, frame, draws=0)
    p = [v.evidence.effect.p for v in alone if v.evidence.effect]
    assert [v.p_adjusted for v in together] == pytest.approx(adjust(p))
    positive = {"reproduced", "same direction, other size", "contradicted"}
    assert sum(v.word in positive for v in together) <= sum(v.word in positive for v in alone)
    assert not any(v.word in positive for v in together)


def test_false_verdicts_on_equal_arms_are_rare() -> None:
    wrong = 0
    for seed in range(150):
        frame = run(1.0, 3, 2, seed=seed, noise=Noise(interaction=0.02))
        word = judge(Claim(0.9), frame, draws=0).word
        wrong += word in ("reproduced", "same direction, other size", "contradicted")
    # At 5 % at most: 18 of 150 would be 3.9 standard errors above.
    assert wrong < 18


def test_all_published_claims_get_a_verdict_from_any_run() -> None:
    frame = run()
    for verdict in judge_all(claims.load_claims(folder=DATA), frame, draws=0):
        assert verdict.word in (
            "insufficient data",
            "invalid as published",
            "reproduced",
            "not comparable",
        )
        assert verdict.sentence.endswith(".")
        json.dumps(verdict.as_record(), allow_nan=False, default=str)


# --------------------------------------------------------------------------------------- rules


@given(st.floats(0.2, 5.0), st.floats(0.2, 5.0), st.floats(1.001, 3.0), st.floats(0.0, 0.2))
def test_turning_claim_and_measurement_round_keeps_the_word(
    claimed: float, estimate: float, width: float, floor: float
) -> None:
    interval = Interval(estimate / width, estimate * width)
    turned = Interval(1 / interval.high, 1 / interval.low)
    one, _ = compare(claimed, estimate, interval, floor)
    two, _ = compare(1 / claimed, 1 / estimate, turned, floor)
    # The border of "no change" is not symmetric to the last digit.
    if abs(abs(np.log(claimed)) - np.log(1.01)) > 1e-6:
        assert one == two


@given(st.floats(0.2, 5.0), st.floats(1.001, 3.0), st.floats(0.0, 0.2))
def test_reproduced_needs_an_interval_beyond_the_noise_floor(
    estimate: float, width: float, floor: float
) -> None:
    interval = Interval(estimate / width, estimate * width)
    word, _ = compare(1.5, estimate, interval, floor)
    if word == "reproduced":
        assert interval.low > math.exp(floor)
    if word == "contradicted":
        assert interval.high < math.exp(-floor)


def test_unknown_interval_never_gives_a_confident_word() -> None:
    assert compare(0.8, 0.8, Interval())[0] == "insufficient data"
