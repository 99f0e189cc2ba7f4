"""The table of `make bench`: pairs, ratios, and its place in the README."""

from __future__ import annotations

import pytest
from scripts.bench_table import BEGIN, END, Line, Pair, in_turn, insert, shown_ratio, table

from vringlab.errors import UserError


def line(*pairs: tuple[float, float], **more: object) -> Line:
    made = tuple(Pair(*pair) for pair in pairs)
    return Line("up", "a lab", "a guest", made, **more)  # type: ignore[arg-type]  # fields of Line


def test_the_ratio_is_that_of_pairs_and_not_of_medians() -> None:
    # The medians are 2 and 4; but where the machine was slow, both were.
    found = line((1, 4), (2, 8), (30, 3))
    assert found.ratio == 0.25
    assert "0.25 (0.25 to 10)" in found.cells[6]


def test_a_small_ratio_is_one_part_of_so_many() -> None:
    assert shown_ratio([1 / 150, 1 / 100, 1 / 200]) == "1/150 (1/200 to 1/100)"
    assert shown_ratio([0.05, 0.2, 0.3]) == "0.2 (0.05 to 0.3)"


@pytest.mark.parametrize(
    ("ratio", "ours", "met", "asked"),
    [
        (None, None, None, ""),
        (0.5, None, True, "ratio <= 0.5: yes"),
        (0.4, None, False, "ratio <= 0.4: no"),
        (None, 2.0, True, "<= 2 s: yes"),
        (0.5, 1.0, False, "ratio <= 0.5 and <= 1 s: no"),
        (1 / 150, None, False, "ratio <= 1/150: no"),
    ],
)
def test_what_was_asked_for(
    ratio: float | None, ours: float | None, met: bool | None, asked: str
) -> None:
    found = line((2, 4), at_most=ratio, ours_at_most=ours)
    assert found.met is met
    assert found.cells[-1] == asked


def test_the_order_turns_from_pair_to_pair() -> None:
    calls: list[str] = []

    def measure(side: str, value: float) -> float:
        calls.append(side)
        return value

    told: list[str] = []
    pairs = in_turn(3, lambda: measure("a", 1.0), lambda: measure("b", 2.0), told.append)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert pairs == (Pair(1.0, 2.0),) * 3
    assert told[1] == "pair 2 of 3: 1 s against 2 s, ratio 0.5"


def test_a_table_names_its_machine_and_says_each_note_once() -> None:
    text = table([line((1, 2), note="so"), line((1, 4), note="so")], "Two cores.")
    rows = text.splitlines()
    assert rows[0] == "Two cores."
    assert rows[2].count("|") == rows[3].count("|") == rows[4].count("|")
    assert rows[4] == "| up | a lab | a guest | 1 | 1 s | 2 s | **0.5 (0.5 to 0.5)** |  |"
    assert text.count("so") == 1
    assert rows[-1] == "- `up`: so"


def test_the_table_is_put_between_the_comments_and_put_there_again() -> None:
    document = f"before\n{BEGIN}\n{END}\nafter\n"
    once = insert(document, "| a |")
    assert once == f"before\n{BEGIN}\n\n| a |\n\n{END}\nafter\n"
    assert insert(once, "| a |") == once
    assert insert(once, "| b |") == once.replace("| a |", "| b |")


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}\n{BEGIN}\n", f"{BEGIN}{BEGIN}{END}"])
def test_a_document_without_the_comments_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="no place for the table") as caught:
        insert(text, "| a |")
    assert BEGIN in caught.value.remedy
