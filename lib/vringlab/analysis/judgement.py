"""The claims of a run's experiment, judged by the run: at its end, or after each block.

A run that was stopped early (`--until-decided`) is judged by the intervals of its looks, which
are wider than those of a design fixed in advance; the plan of the looks is in its provenance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from vringlab.analysis.claims import Claim, experiments, load_claims
from vringlab.analysis.frames import RunFrames, load_run
from vringlab.analysis.sequential import SequentialPlan
from vringlab.analysis.verdicts import Verdict, decide_claim, judge_all
from vringlab.campaign.plan import Plan
from vringlab.campaign.store import Store
from vringlab.errors import UserError

#: Key of the plan of looks in provenance.json.
SEQUENTIAL = "sequential"


def sequential_plan(plan: Plan) -> SequentialPlan:
    """Looks after each boot from the third on, up to the boots of the plan.

    Raises:
        UserError: the plan has too few boots to stop early.
    """
    blocks = len(plan.block_sizes)
    return SequentialPlan(max_blocks=blocks, blocks_per_boot=blocks // len(plan.boots))


def decidable(claims: Sequence[Claim], plan: Plan) -> list[Claim]:
    """Claims that a run of this plan can decide.

    They stand, state a ratio, and their arms and parameters are measured.
    """

    def measured(claim: Claim) -> bool:
        return any(
            all(str(cell.params.get(name)) == str(value) for name, value in claim.params.items())
            for cell in plan.cells
        )

    arms = {cell.arm_name for cell in plan.cells}
    return [
        claim
        for claim in claims
        if claim.status != "withdrawn"
        and claim.change is not None
        and set(claim.arms) <= arms
        and measured(claim)
    ]


def asked(plan: Plan) -> tuple[list[Claim], SequentialPlan]:
    """The claims that a run can decide early, and its looks; call it before a run is made.

    Raises:
        UserError: no claim can be decided by this plan, or it has too few boots.
    """
    claims = decidable(load_claims(plan.experiment), plan)
    if not claims:
        raise UserError(
            f"no standing claim of {plan.experiment} is about what this run measures",
            remedy="measure the claims' arms and parameters (vringlab audit lists the claims), or "
            "leave --until-decided out",
        )
    return claims, sequential_plan(plan)


def until_decided(
    store: Store, tell: Callable[[str], None] = lambda _: None
) -> Callable[[Store], bool]:
    """What ends a run when all its claims are decided, for `runner.execute`.

    The plan of looks is fixed here, before anything is measured, and kept with the run.

    Args:
        store: The run.
        tell: Told after each boot how many claims are decided.

    Raises:
        UserError: as for `asked`.
    """
    claims, looks = asked(store.plan)
    store.update_provenance({SEQUENTIAL: asdict(looks)})

    def decided(opened: Store) -> bool:
        opened.consolidate()
        run = load_run(opened.path)
        measured = set(run.samples["metric"])
        # A metric that no workload here gives would keep the run going for nothing.
        current = [claim for claim in claims if claim.metric in measured]
        open_ = [
            claim
            for claim in current
            if not decide_claim(claim, run.samples, looks, run.provenance)[0].stop
        ]
        tell(f"{len(current) - len(open_)} of {len(current)} claims are decided")
        return not open_

    return decided


def verdicts_of(run: RunFrames, draws: int = 0) -> list[Verdict]:
    """All claims of the run's experiment, judged by it; none where nothing was published.

    Args:
        run: The run.
        draws: Draws of the bootstrap that stands beside the interval.
    """
    # A patch that was tried under the name of an experiment is not what was published on.
    if run.tried or run.plan.experiment not in experiments():
        return []
    claims = load_claims(run.plan.experiment)
    stored: dict[str, Any] | None = run.provenance.get(SEQUENTIAL)
    if stored is None:
        return judge_all(claims, run.samples, run.provenance, draws=draws)
    if isinstance(stored["looks"], list):
        stored = {**stored, "looks": tuple(stored["looks"])}
    looks = SequentialPlan(**stored)
    early = {claim.id for claim in decidable(claims, run.plan)}
    fixed = {
        verdict.claim.id: verdict
        for verdict in judge_all(
            [claim for claim in claims if claim.id not in early],
            run.samples,
            run.provenance,
            draws=draws,
        )
    }
    return [
        decide_claim(claim, run.samples, looks, run.provenance, draws=draws)[1]
        if claim.id in early
        else fixed[claim.id]
        for claim in claims
    ]
