"""Parameters of a notebook: what papermill only warns of is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from vringlab.errors import UserError
from vringlab.report.parameters import NotebookParameters


class Parameters(NotebookParameters):
    host: str
    boots: int = 1
    folder: Path | None = None


def test_parameters_are_read_from_the_names_of_a_notebook() -> None:
    names = {"host": "replay", "boots": 2, "folder": "runs", "In": [""], "Out": {}, "_": 3}
    assert Parameters.read(names) == Parameters(host="replay", boots=2, folder=Path("runs"))


def test_objects_of_later_cells_are_no_parameters() -> None:
    names = {"host": "replay", "Path": Path, "pytest": pytest, "claims": [object()], "f": print}
    assert Parameters.read(names).host == "replay"


@pytest.mark.parametrize(
    ("names", "problem", "remedy"),
    [
        ({"host": "replay", "hots": "a"}, "unknown parameter 'hots'", "did you mean host"),
        ({"host": "replay", "many": [1, 2]}, "unknown parameter 'many'", "boots, folder, host"),
        ({"host": "replay", "deep": {"a": [None]}}, "unknown parameter 'deep'", "known"),
        ({"host": "replay", "boots": "two"}, "boots: ", "known: host, boots, folder"),
        ({}, "host: Field required", "known: host, boots, folder"),
    ],
)
def test_what_does_not_fit_is_refused(names: dict[str, object], problem: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        Parameters.read(names)
    assert problem in caught.value.message
    assert remedy in caught.value.remedy
