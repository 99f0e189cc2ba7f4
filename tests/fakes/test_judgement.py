"""Claims judged after each block: what can be decided, when a run ends, and by which interval."""

from __future__ import annotations

from pathlib import Path

import pytest

from vringlab.analysis import judgement
from vringlab.analysis.claims import load_claims
from vringlab.analysis.frames import load_run
from vringlab.analysis.verdicts import decide_claim, judge
from vringlab.campaign import experiment as experiments
from vringlab.campaign.fake import FakeSession
from vringlab.campaign.plan import Plan, make_plan
from vringlab.campaign.runner import RunResult, execute
from vringlab.campaign.store import Store
from vringlab.errors import UserError
from vringlab.settings import settings

NAME = "vsock-direct-enqueue"


def plan_of(boots: int, arms: tuple[str, ...] = ("direct",), payload: int = 64) -> Plan:
    chosen = experiments.load(NAME).with_boots("quick", boots)
    return make_plan(chosen, "quick", 1, {"payload": [payload]}, arms)


def run_of(tmp_path: Path, boots: int, effect: float, noise: float = 0.01) -> RunResult:
    told: list[str] = []
    with Store.create(plan_of(boots), tmp_path) as store:
        result = execute(
            store,
            lambda: FakeSession(effects={"direct": effect}, noise=noise),
            until=judgement.until_decided(store, told.append),
        )
    assert any("claims are decided" in line for line in told)
    return result


def test_only_standing_claims_about_what_is_measured_can_be_decided() -> None:
    claims = load_claims(NAME)
    found = judgement.decidable(claims, plan_of(10))
    assert {claim.metric for claim in found} == {"rtt_p1", "rtt_mean", "rtt_p99"}
    assert all(claim.status != "withdrawn" and claim.params["payload"] == 64 for claim in found)
    # Nobody claims anything of this message size, and seed 000's own figures were withdrawn.
    assert judgement.decidable(claims, plan_of(10, payload=3584)) == []
    assert judgement.decidable(claims, plan_of(10, arms=("rfc-v1",))) == []
    with pytest.raises(UserError, match="no standing claim"):
        judgement.asked(plan_of(10, arms=("rfc-v1",)))


def test_too_few_boots_cannot_stop_early() -> None:
    with pytest.raises(UserError, match="deciding early needs"):
        judgement.asked(plan_of(2))


def test_experiment_of_which_nothing_was_published_has_no_verdicts(tmp_path: Path) -> None:
    plan = make_plan(experiments.load("vsock-fast-path"), "smoke", 1)
    with Store.create(plan, tmp_path) as store:
        execute(store, lambda: FakeSession(effects={}, noise=0.01))
        path = store.path
    assert judgement.verdicts_of(load_run(path)) == []
    with pytest.raises(UserError, match="no claims for experiment 'vsock-fast-path'"):
        judgement.asked(plan)


def test_clear_effect_ends_the_run_earlier_than_noise_does(tmp_path: Path) -> None:
    clear = run_of(tmp_path / "clear", 10, effect=0.5)
    assert clear.status == "decided"
    assert clear.done < clear.total / 2
    # Noise ends it too, once an effect of the claimed size has become hopeless.
    noisy = run_of(tmp_path / "noisy", 10, effect=1.0, noise=1.0)
    assert noisy.done > clear.done


def test_decided_run_is_judged_by_its_looks(tmp_path: Path) -> None:
    run = load_run(run_of(tmp_path, 10, effect=0.8).path)
    verdicts = {verdict.claim.id: verdict for verdict in judgement.verdicts_of(run)}
    assert set(verdicts) == {claim.id for claim in load_claims(NAME)}
    early = {claim.id for claim in judgement.decidable(load_claims(NAME), run.plan)}
    assert early
    for name, verdict in verdicts.items():
        assert verdict.evidence.basis.startswith("look") == (name in early)


def test_early_decisions_agree_with_the_whole_of_a_recorded_run() -> None:
    run = load_run(settings().data / "recorded" / "virtio-net-napi-tx")
    looks = judgement.sequential_plan(run.plan)
    early = 0
    for claim in judgement.decidable(load_claims(run.plan.experiment), run.plan):
        decision, verdict = decide_claim(claim, run.samples, looks, run.provenance)
        whole = judge(claim, run.samples, run.provenance, draws=0)
        if decision.outcome in ("effect", "no effect"):
            assert verdict.word == whole.word, claim.id
            early += decision.units < looks.units
    assert early, "the recording has claims that are decided before its last boot"
