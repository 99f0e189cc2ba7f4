"""The planner: order, balance, stability, and its file."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vringlab.campaign import experiment as experiments
from vringlab.campaign.experiment import Arm, Experiment, Profile, Value, WorkloadUse
from vringlab.campaign.fake import find
from vringlab.campaign.plan import Cell, Plan, make_plan
from vringlab.errors import UserError

GOLD = [
    (["arm0.aa", "arm1", "arm0"], ["other/turned", "other/plain", "fake/plain"]),
    (["arm0", "arm0.aa", "arm1"], ["fake/plain", "other/turned", "other/plain"]),
    (["arm1", "arm0", "arm0.aa"], ["other/turned", "fake/plain", "other/plain"]),
]


def experiment(
    arms: int = 3, payloads: int = 3, boots: int = 2, blocks: int = 2, aa: int = 1
) -> Experiment:
    """A made-up experiment with the number of everything at will."""
    profile = Profile(boots=boots, blocks_per_boot=blocks, duration_s=1, aa=bool(aa))
    return experiments.load("vsock-direct-enqueue").model_copy(
        update={
            "arms": tuple(Arm(name=f"arm{n}", summary="-") for n in range(arms)),
            "reference": "arm0",
            "workloads": (
                WorkloadUse(workload="fake", matrix={"payload": list(range(1, payloads + 1))}),
                WorkloadUse(workload="other", matrix={"mode": ["plain", "turned"]}),
            ),
            "profiles": dict.fromkeys(experiments.PROFILES, profile),
        }
    )


def plan(seed: int = 1, **size: int) -> Plan:
    return make_plan(experiment(**size), "quick", seed, find=find)


def blocks_of(made: Plan) -> list[list[Cell]]:
    return [list(cells) for _, cells in itertools.groupby(made.cells, lambda cell: cell.block)]


def arm_order(block: list[Cell]) -> list[str]:
    return [name for name, _ in itertools.groupby(cell.arm_name for cell in block)]


def point(cell: Cell) -> tuple[str, str]:
    return cell.workload, json.dumps(dict(cell.params), sort_keys=True)


def test_the_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    assert plan(7) == plan(7)
    assert [c.cell_id for c in plan(7).cells] != [c.cell_id for c in plan(8).cells]


def test_the_order_for_a_seed_does_not_change_between_versions() -> None:
    # A run of an older version must be repeatable: this order is a promise.
    made = plan(2024, arms=2, payloads=1, boots=1, blocks=3)
    found = [
        (arm_order(block), [f"{c.workload}/{c.params['mode']}" for c in block[:3]])
        for block in blocks_of(made)
    ]
    assert found == GOLD


@given(
    st.integers(0, 2**64),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
)
def test_every_block_measures_every_arm_once_at_every_point(
    seed: int, arms: int, payloads: int, boots: int, blocks: int, aa: bool
) -> None:
    made = plan(seed, arms=arms, payloads=payloads, boots=boots, blocks=blocks, aa=aa)
    assert len(made.arms) == arms + aa
    points = payloads + 2
    assert len(made.cells) == boots * blocks * len(made.arms) * points
    assert len({cell.cell_id for cell in made.cells}) == len(made.cells)
    for number, block in enumerate(blocks_of(made), 1):
        assert {cell.block for cell in block} == {number}
        # One guest lifetime for all that is compared.
        assert {cell.boot for cell in block} == {f"b{(number - 1) // blocks + 1:02}"}
        assert [cell.position for cell in block] == list(range(1, len(block) + 1))
        # One visit of each arm, so one switch; the points in the same order for each.
        assert sorted(arm_order(block)) == sorted(made.arms)
        visits = [
            [point(cell) for cell in cells]
            for _, cells in itertools.groupby(block, lambda cell: cell.arm_name)
        ]
        assert all(visit == visits[0] for visit in visits)
        assert len(set(visits[0])) == points


def test_a_block_may_be_one_point_so_that_a_kill_costs_no_more() -> None:
    base = experiment()
    profile = base.profiles["full"].model_copy(update={"block": "point"})
    wanted = base.model_copy(update={"profiles": {**base.profiles, "full": profile}})
    made = make_plan(wanted, "full", 3, find=find)
    blocks = blocks_of(made)
    points = 3 + 2
    assert len(blocks) == 2 * 2 * points
    assert len({cell.cell_id for cell in made.cells}) == len(made.cells)
    for number, block in enumerate(blocks, 1):
        assert {cell.block for cell in block} == {number}
        assert len({point(cell) for cell in block}) == 1
        assert sorted(cell.arm_name for cell in block) == sorted(made.arms)
        assert {cell.boot for cell in block} == {f"b{(number - 1) // (2 * points) + 1:02}"}
    # Each round measures every point once, in an order of its own.
    rounds = [blocks[start : start + points] for start in range(0, len(blocks), points)]
    orders = [[point(block[0]) for block in part] for part in rounds]
    assert all(len(set(order)) == points for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_the_twin_loads_the_reference_under_its_own_name() -> None:
    made = plan()
    assert made.twin == "arm0.aa"
    assert {(cell.arm, cell.arm_name) for cell in made.cells} == {
        ("arm0", "arm0"),
        ("arm1", "arm1"),
        ("arm2", "arm2"),
        ("arm0", "arm0.aa"),
    }
    assert make_plan(experiment(aa=0), "quick", 1, find=find).twin is None


@pytest.mark.parametrize(("arms", "cycle"), [(1, 2), (2, 6), (3, 4), (4, 10), (5, 6)])
def test_arms_are_balanced_over_positions_and_over_what_precedes_them(
    arms: int, cycle: int
) -> None:
    # With the twin there is one arm more than named here.
    n = arms + 1
    made = plan(3, arms=arms, payloads=1, boots=2 * cycle, blocks=1)
    orders = [arm_order(block) for block in blocks_of(made)]
    for start in range(0, 2 * cycle, n):
        places = Counter(
            (place, arm) for order in orders[start : start + n] for place, arm in enumerate(order)
        )
        assert set(places.values()) == {1}
        assert len(places) == n * n
    for half in (orders[:cycle], orders[cycle:]):
        followed = Counter(pair for order in half for pair in itertools.pairwise(order))
        assert len(followed) == n * (n - 1)
        assert len(set(followed.values())) == 1


def test_the_order_of_points_changes_between_blocks() -> None:
    made = plan(5, payloads=6, boots=5, blocks=2)
    orders = {tuple(point(cell) for cell in block[:8]) for block in blocks_of(made)}
    assert len(orders) == 10


def test_a_longer_plan_begins_with_the_shorter_one() -> None:
    short, long = plan(9, boots=2), plan(9, boots=6)
    assert long.cells[: len(short.cells)] == short.cells


def test_ids_are_readable_and_safe_as_folder_names() -> None:
    made = plan()
    assert re.fullmatch(
        r"b01-k01-p01-arm\d(\.aa)?-(fake|other)-payload=\d+,mode=(plain|turned)",
        made.cells[0].cell_id,
    )
    assert all(re.fullmatch(r"[A-Za-z0-9_.,=+-]{1,120}", cell.cell_id) for cell in made.cells)
    assert all(cell.cell_id.startswith("b") for cell in made.cells)


def test_a_plan_survives_its_file() -> None:
    made = make_plan(experiment(), "quick", 4, {"payload": ["2", 3]}, ["arm2"], find)
    again = Plan.from_json(made.to_json())
    assert again == made
    assert again.to_json() == made.to_json()
    assert {cell.params["payload"] for cell in again.cells if cell.workload == "fake"} == {2, 3}
    assert again.arms == ("arm0", "arm2", "arm0.aa")


def restoring(boots: int, restores: int) -> Plan:
    base = experiment(boots=boots)
    profile = base.profiles["quick"].model_copy(update={"restores": restores})
    wanted = base.model_copy(update={"profiles": {**base.profiles, "quick": profile}})
    return make_plan(wanted, "quick", 1, find=find)


@pytest.mark.parametrize(
    ("restores", "editions"), [(0, [0, 0, 0]), (2, [1, 2, 0]), (3, [1, 2, 3]), (9, [1, 2, 3])]
)
def test_the_first_boots_are_restored_each_from_a_lab_of_its_own(
    restores: int, editions: list[int]
) -> None:
    made = restoring(3, restores)
    assert [made.edition(boot) for boot in made.boots] == editions
    again = Plan.from_json(made.to_json())
    assert again == made
    assert [again.edition(boot) for boot in again.boots] == editions


def test_how_boots_come_up_is_not_part_of_the_order() -> None:
    assert restoring(3, 2).cells == restoring(3, 0).cells


def test_a_plan_of_before_there_were_saved_labs_boots_cold() -> None:
    document = json.loads(restoring(3, 2).to_json())
    del document["restores"]
    old = Plan.from_json(json.dumps(document))
    assert old == restoring(3, 0)
    assert [old.edition(boot) for boot in old.boots] == [0, 0, 0]


@pytest.mark.parametrize("name", experiments.names())
def test_a_quick_run_mixes_restored_and_cold_boots_and_a_full_one_boots_cold(name: str) -> None:
    shipped = experiments.load(name)
    quick, full = (make_plan(shipped, profile, 1) for profile in ("quick", "full"))
    # A saved lab's guest has the image's kernel.
    kernels = any(map(shipped.is_kernel_arm, shipped.arm_names))
    assert quick.restores == 0 if kernels else 0 < quick.restores < len(quick.boots)
    assert full.restores == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[: len(text) // 2], "damaged"),
        (lambda _: "", "damaged"),
        (lambda _: "[]", "damaged"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "format 2"),
        (lambda text: text.replace('"seed"', '"sed"'), "sed"),
        (lambda text: text.replace('"block"', '"blok"'), "blok"),
    ],
)
def test_a_damaged_plan_is_refused(change: Callable[[str], str], says: str) -> None:
    with pytest.raises(UserError) as caught:
        Plan.from_json(change(plan().to_json()), "here/plan.json")
    assert "here/plan.json" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("profile", "overrides", "arms"),
    [("slow", {}, []), ("quick", {"payloads": [1]}, []), ("quick", {}, ["arm9"])],
)
def test_wrong_names_are_user_errors(
    profile: str, overrides: dict[str, list[Value]], arms: list[str]
) -> None:
    with pytest.raises(UserError):
        make_plan(experiment(), profile, 1, overrides, arms, find)


def test_what_a_plan_says_of_itself() -> None:
    made = plan(boots=3)
    assert made.boots == ("b01", "b02", "b03")
    assert made.workloads == tuple(dict.fromkeys(cell.workload for cell in made.cells))
    assert sorted(p["payload"] for p in made.points("fake")) == [1, 2, 3]
    assert made.measuring_s == len(made.cells)
    assert set(made.block_sizes.values()) == {20}


@pytest.mark.parametrize("name", experiments.names())
def test_a_quick_run_measures_for_minutes(name: str) -> None:
    made = make_plan(experiments.load(name), "quick", 1)
    assert 60 < made.measuring_s < 800
    # Balance over positions needs as many blocks as there are arms.
    assert len(made.block_sizes) >= len(made.arms)


@pytest.mark.parametrize("name", experiments.names())
def test_a_full_run_has_as_many_runs_of_every_point_and_arm_as_the_mail(name: str) -> None:
    # Fifty in seed 000, which stands in for those that state none; ten in seed 004.
    made = make_plan(experiments.load(name), "full", 1)
    assert len(made.boots) == 10
    counts = Counter((cell.arm_name, point(cell)) for cell in made.cells)
    assert set(counts.values()) == {10 if name == "vsock-skb-merge" else 50}


def test_the_full_vsock_run_is_timed_as_in_the_mail() -> None:
    made = make_plan(experiments.load("vsock-direct-enqueue"), "full", 1)
    assert {cell.duration_s for cell in made.cells} == {50.0}


def test_the_cost_of_a_cell_does_not_grow_with_the_plan() -> None:
    def cost(cells: int) -> float:
        sized = experiment(arms=4, payloads=3, boots=cells // 25, blocks=1)
        start = time.process_time()
        made = make_plan(sized, "quick", 1, find=find)
        Plan.from_json(made.to_json())
        return (time.process_time() - start) / len(made.cells)

    # Other jobs run beside the tests: the best of some tries counts.
    for _ in range(5):
        small = min(cost(1_000) for _ in range(10))
        if cost(100_000) <= 1.2 * small:
            return
    pytest.fail("a cell of 100,000 costs over 1.2 times a cell of 1,000")
