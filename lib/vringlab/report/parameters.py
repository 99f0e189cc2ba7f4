"""Parameters of a notebook, checked before anything is loaded or started.

papermill only warns of a parameter that the notebook does not have, and then runs with the
default. The cell after the parameters refuses it instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from vringlab.analysis.units import nearest
from vringlab.errors import UserError

# IPython's own histories, the only plain values that it puts beside the user's.
_IPYTHON = frozenset({"In", "Out"})


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


class NotebookParameters(BaseModel):
    """Base of a notebook's parameters, one field for each name of its parameters cell."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, names: Mapping[str, object]) -> Self:
        """The parameters among the names of a notebook.

        Plain values count: text, numbers, lists of them. What later cells make out of them are
        objects, so the cell can be run again.

        Args:
            names: The notebook's `globals()`, read in the cell after the parameters.

        Raises:
            UserError: a parameter that the notebook does not have, that is missing, or whose
                value is out of range; the remedy lists the known ones.
        """
        given = {
            name: value
            for name, value in names.items()
            if not name.startswith("_") and name not in _IPYTHON and _is_plain(value)
        }
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            problems = "; ".join(
                _problem(item["type"], item["loc"], item["msg"]) for item in error.errors()
            )
        known = tuple(cls.model_fields)
        unknown = [name for name in given if name not in known]
        raise UserError(
            f"parameters of this notebook are not usable: {problems}",
            remedy=nearest(unknown[0], known) if unknown else f"known: {', '.join(known)}",
        )


def _problem(kind: str, place: tuple[int | str, ...], message: str) -> str:
    name = ".".join(map(str, place))
    return f"unknown parameter {name!r}" if kind == "extra_forbidden" else f"{name}: {message}"
