"""The JSON report of one of our own tools, found in what it printed and checked by its model."""

from __future__ import annotations

import json
import re
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from vringlab.errors import InfrastructureError

Report = TypeVar("Report", bound=BaseModel)


def read_report(
    text: str, *, tool: str, start: re.Pattern[str], model: type[Report], remedy: str
) -> Report:
    """The report in a tool's output, whatever stands around it.

    Args:
        text: Everything that the tool printed.
        tool: Its name, for messages.
        start: Where a report begins.
        model: What a report holds.
        remedy: What to do when there is no whole report.

    Raises:
        InfrastructureError: no report, one cut off or damaged, or one of another form.
    """
    match = start.search(text)
    if match is None:
        raise InfrastructureError(f"{tool} printed no report", remedy=remedy, stdout=text)
    try:
        found, _ = json.JSONDecoder().raw_decode(text, match.start())
        return model.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InfrastructureError(
            f"the report of {tool} has an unusable {where}: {first['msg']}",
            remedy="the tool in the image and this library differ: build the image again",
            stdout=text,
        ) from None
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise InfrastructureError(
            f"the report of {tool} is cut off or damaged: {reason}", remedy=remedy, stdout=text
        ) from None
