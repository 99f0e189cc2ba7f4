"""What is compared: arms, workloads with their matrix, and how much of it a profile measures.

An experiment is one YAML file in `data/experiments/`; a new one needs no edit elsewhere.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from vringlab.errors import UserError
from vringlab.settings import settings
from vringlab.workloads import base
from vringlab.workloads.base import Workload

PROFILES = ("smoke", "quick", "full")

#: The experiment's own file in the folder of a run that has one (`vringlab try`).
OF_RUN = "experiment.yaml"

#: How the twin of the reference arm is named: the same module measured under a second name.
TWIN_SUFFIX = ".aa"

FindWorkload = Callable[[str], Workload]

Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*$", max_length=80)]
# Names become parts of folder names and of patch paths. A dot is kept for the twin's suffix.
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=40)]
BaseKernelName = Annotated[str, StringConstraints(pattern=r"^(debian|git|tarball|tree):.+$")]
ProfileName = Annotated[str, StringConstraints(pattern=rf"^({'|'.join(PROFILES)})$")]
Value = bool | int | float | str
Matrix = dict[str, Annotated[list[Value], Field(min_length=1)]]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Seed(_Strict):
    """The mail whose claim is tested."""

    message_id: str
    subject: str
    date: date
    file: str


class Arm(_Strict):
    """One variant of the kernel under test; its patches lie under `data/patches/`.

    Attributes:
        name: Its name.
        summary: What it is, one line.
        base_kernel: For an arm that is a kernel as it is, without a patch: that kernel.
    """

    name: Name
    summary: str
    base_kernel: BaseKernelName | None = None


class Counter(_Strict):
    """Calls of one kernel function, counted in a pass that is not timed.

    Attributes:
        name: Its name in `proof`, in shares and in what is recorded.
        function: The kernel function.
        shows: What its calls mean, one sentence.
        module: Module that holds it; the kernel itself when None.
        within: Only calls made while this function runs in the same thread, as the innermost of
            all `within` functions. A share by caller needs no sight of functions that the
            compiler has put inside others.
        returns: Only calls that return so: `zero`, `nonzero`, `negative` (an error) or
            `nonnegative`.
    """

    name: Name
    function: Identifier
    shows: str
    module: Identifier | None = None
    within: Identifier | None = None
    returns: Literal["zero", "nonzero", "negative", "nonnegative"] | None = None


class Share(_Strict):
    """One count as a share of several, in percent: `of` / sum of `among`."""

    name: Name
    of: Name
    among: Annotated[tuple[Name, ...], Field(min_length=1)]
    shows: str


class Probes(_Strict):
    """What is counted to see which path a packet takes, and which count proves an arm's path.

    Attributes:
        counters: What is counted, on the experiment's side.
        proof: By arm the counters of which one must be above 0: the path that the arm is about.
        shares: Counts put in relation.
    """

    counters: Annotated[tuple[Counter, ...], Field(min_length=1)]
    proof: dict[Name, Annotated[tuple[Name, ...], Field(min_length=1)]]
    shares: tuple[Share, ...] = ()

    @model_validator(mode="after")
    def _known(self) -> Self:
        names = [counter.name for counter in self.counters]
        if len(set(names)) < len(names):
            raise ValueError("a counter is named twice")
        used = [name for proof in self.proof.values() for name in proof]
        used += [name for share in self.shares for name in (share.of, *share.among)]
        if unknown := sorted(set(used) - set(names)):
            raise ValueError(f"no counter {', '.join(unknown)} ({', '.join(names)})")
        return self


class WorkloadProfile(_Strict):
    """What one profile changes of one workload.

    Attributes:
        matrix: Values by parameter, in place of the workload's own.
        duration_s: Timed window in seconds.
        skip: Whether the profile leaves this use of the workload out.
    """

    matrix: Matrix = Field(default_factory=dict)
    duration_s: float | None = Field(default=None, gt=0)
    skip: bool = False


class WorkloadUse(_Strict):
    """One workload of an experiment and the values of its parameters.

    A workload may be used several times: one matrix is a product, and not every combination of
    values has a meaning.

    Attributes:
        workload: Its name.
        matrix: Values by parameter.
        profiles: What a profile changes.
    """

    workload: Name
    matrix: Matrix
    profiles: dict[ProfileName, WorkloadProfile] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _subsets(self) -> Self:
        for profile, use in self.profiles.items():
            for param, values in use.matrix.items():
                outside = [value for value in values if value not in self.matrix.get(param, ())]
                if outside:
                    raise ValueError(
                        f"profile {profile}: {param}={outside} is not in the matrix of "
                        f"{self.workload}"
                    )
        return self

    def skipped(self, profile: str) -> bool:
        """Whether that profile leaves it out."""
        use = self.profiles.get(profile)
        return use is not None and use.skip

    def values(self, profile: str) -> dict[str, list[Value]]:
        """The matrix as that profile measures it."""
        use = self.profiles.get(profile)
        return {**self.matrix, **(use.matrix if use else {})}


class Profile(_Strict):
    """How much is measured.

    Attributes:
        boots: Guest lifetimes.
        blocks_per_boot: Randomised rounds of all arms in each.
        duration_s: Timed window of one cell in seconds, where the workload sets no other.
        aa: Whether the reference arm is measured a second time as its twin.
        arms: The arms of this profile; all when empty. The reference is always among them.
        block: What is measured of all arms before the next: every point (`round`), or one
            (`point`). The latter switches arms more often and is for matrices of hours, of which
            a kill may cost only one point.
        paths: Whether it is seen, in passes that are not timed, which path the packets take.
        restores: How many of the boots, the first ones, are restored from saved labs where that
            is possible: each from another one, so that each is another boot. The rest boots cold.
    """

    boots: int = Field(ge=1)
    blocks_per_boot: int = Field(ge=1)
    duration_s: float = Field(gt=0)
    aa: bool = True
    arms: tuple[Name, ...] = ()
    block: Literal["round", "point"] = "round"
    paths: bool = True
    restores: int = Field(default=0, ge=0)


@dataclass(frozen=True)
class Point:
    """One workload with one value for each of its parameters, timed for `duration_s` seconds."""

    workload: str
    params: Mapping[str, Value]
    duration_s: float


class Experiment(_Strict):
    """One experiment file."""

    name: Name
    title: str
    summary: str
    seed: Seed
    base_kernel: BaseKernelName
    module: str
    side: Literal["guest", "host"]
    patches: Name | None = None
    reference: Name
    arms: Annotated[tuple[Arm, ...], Field(min_length=1)]
    claims: str
    probes: Probes | Name | None = None
    #: What every host must have, such as a tag of hosts.yaml or `cpus>=8`: see `campaign.hosts`.
    needs: tuple[str, ...] = ()
    workloads: Annotated[tuple[WorkloadUse, ...], Field(min_length=1)]
    profiles: dict[ProfileName, Profile]

    #: Folder of its patches, of an experiment that lies in a run; the collection's otherwise.
    _home: Path | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        arms = [arm.name for arm in self.arms]
        twice = sorted({arm for arm in arms if arms.count(arm) > 1})
        if twice:
            raise ValueError(f"arm named twice: {', '.join(twice)}")
        if self.reference not in arms:
            raise ValueError(f"reference {self.reference!r} is not an arm ({', '.join(arms)})")
        own = self.probes.proof if isinstance(self.probes, Probes) else {}
        stray = sorted(set(own) - set(arms))
        if stray:
            raise ValueError(f"probes: no arm {', '.join(stray)} ({', '.join(arms)})")
        missing = [name for name in PROFILES if name not in self.profiles]
        if missing:
            raise ValueError(f"no profile {', '.join(missing)}")
        for name, profile in self.profiles.items():
            unknown = [arm for arm in profile.arms if arm not in arms]
            if unknown:
                raise ValueError(f"profile {name}: unknown arm {', '.join(unknown)}")
            if all(use.skipped(name) for use in self.workloads):
                raise ValueError(f"profile {name} leaves out every workload")
        return self

    @property
    def arm_names(self) -> tuple[str, ...]:
        """Names of the arms in the file's order."""
        return tuple(arm.name for arm in self.arms)

    @property
    def patches_name(self) -> str:
        """The folder of `data/patches/` with the arms, which experiments may share."""
        return self.patches or self.name

    @property
    def home(self) -> Path:
        """The folder whose `patches/` has its arms: the collection's `data`, or its run's."""
        return self._home or settings().data

    def at(self, home: Path) -> Experiment:
        """The experiment, with its patches below another folder than the collection's."""
        moved = self.model_copy()
        moved._home = home
        return moved

    def is_kernel_arm(self, arm: str) -> bool:
        """Whether an arm is a kernel as it is; its guests are booted, nothing is loaded."""
        return any(item.base_kernel is not None for item in self.arms if item.name == arm)

    def base_of(self, arm: str) -> str:
        """The base kernel of an arm."""
        own = next((item.base_kernel for item in self.arms if item.name == arm), None)
        return own or self.base_kernel

    @property
    def must_reboot(self) -> bool:
        """Whether the arms differ in what only a boot changes."""
        return len({self.base_of(arm) for arm in self.arm_names}) > 1

    def to_yaml(self) -> str:
        """The experiment as its file has it."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)

    @property
    def counted(self) -> Probes | None:
        """What is counted to see which path packets take; another experiment's where it says so.

        Raises:
            UserError: that one does not exist, or refers to yet another.
        """
        if not isinstance(self.probes, str):
            return self.probes
        other = load(self.probes).probes
        if isinstance(other, str):
            raise UserError(
                f"probes of {self.name}: {self.probes} has none of its own",
                remedy=f"name {other} instead",
            )
        return other

    @property
    def claims_path(self) -> Path:
        """The file with the published figures; it need not exist."""
        return settings().data / "claims" / self.claims

    def profile(self, name: str) -> Profile:
        """The profile of that name.

        Raises:
            UserError: there is none.
        """
        if name not in self.profiles:
            raise UserError(
                f"unknown profile {name!r}", remedy=f"choose one of: {', '.join(PROFILES)}"
            )
        return self.profiles[name]

    def with_boots(self, profile: str, boots: int) -> Experiment:
        """The experiment with another number of guest lifetimes in one profile.

        Raises:
            UserError: an unknown profile, or no boot.
        """
        if boots < 1:
            raise UserError(f"a run of {boots} boots measures nothing", remedy="give 1 or more")
        changed = self.profile(profile).model_copy(update={"boots": boots})
        return self.model_copy(update={"profiles": {**self.profiles, profile: changed}})

    def one_block_per_boot(self) -> Experiment:
        """The experiment with as many blocks, each a boot of its own.

        For arms that are booted fresh: the guests of one block then share an identity, and no
        two blocks do, so that the statistics count blocks and not guests as independent.
        """
        profiles = {
            name: profile.model_copy(
                update={"boots": profile.boots * profile.blocks_per_boot, "blocks_per_boot": 1}
            )
            for name, profile in self.profiles.items()
        }
        return self.model_copy(update={"profiles": profiles})

    def arms_of(self, profile: str, selected: Sequence[str] = ()) -> tuple[str, ...]:
        """Arms to measure, in the file's order; the reference is always among them.

        Args:
            profile: Name of the profile, whose own selection holds when `selected` is empty.
            selected: Arms asked for by the user.

        Raises:
            UserError: an arm that the experiment does not have.
        """
        chosen = tuple(selected) or self.profile(profile).arms or self.arm_names
        for arm in chosen:
            if arm not in self.arm_names:
                raise UserError(
                    f"unknown arm {arm!r} of {self.name}{_nearest(arm, self.arm_names)}",
                    remedy=f"choose from: {', '.join(self.arm_names)}",
                )
        return tuple(arm for arm in self.arm_names if arm in chosen or arm == self.reference)

    def points(self, profile: str, find: FindWorkload = base.find) -> tuple[Point, ...]:
        """Every workload with every combination of its parameters, in the file's order.

        Each point names all parameters of its workload, so that what was measured does not
        depend on defaults that change later.

        Raises:
            UserError: an unknown profile or workload, or a combination that it refuses.
        """
        default_s = self.profile(profile).duration_s
        points: dict[str, Point] = {}
        for use in self.workloads:
            if use.skipped(profile):
                continue
            workload = find(use.workload)
            own = use.profiles.get(profile)
            duration_s = own.duration_s if own and own.duration_s else default_s
            matrix = use.values(profile)
            for values in itertools.product(*matrix.values()):
                checked = base.parse_params(workload, dict(zip(matrix, values, strict=True)))
                point = Point(use.workload, checked.model_dump(mode="json"), duration_s)
                # A dictionary rather than a list: `-p payload=64,64` is one point.
                points[json.dumps([point.workload, dict(point.params)], sort_keys=True)] = point
        return tuple(points.values())

    def override(
        self, params: Mapping[str, Sequence[object]], find: FindWorkload = base.find
    ) -> Experiment:
        """The experiment with other values of some parameters, in all profiles.

        A parameter applies to each workload that has it. A value must be accepted by the
        workload's own model, not stand in the file's matrix. Of values that only some workloads
        accept, each keeps its own, and one that is left with none is not measured.

        Args:
            params: Values by parameter, as text (`-p payload=64`) or already typed.
            find: Finds a workload by name.

        Raises:
            UserError: a parameter that no workload has, or a value that none accepts; lists
                what is allowed.
        """
        uses = list(self.workloads)
        for param, values in params.items():
            uses = _replace_values(self.name, uses, param, list(values), find)
        return self.model_copy(update={"workloads": tuple(uses)})


def _replace_values(
    experiment: str, uses: list[WorkloadUse], param: str, values: list[object], find: FindWorkload
) -> list[WorkloadUse]:
    models = {use.workload: find(use.workload).params for use in uses}
    known = sorted({name for model in models.values() for name in model.model_fields})
    if param not in known:
        raise UserError(
            f"unknown parameter {param!r} of {experiment}{_nearest(param, known)}",
            remedy=f"known parameters: {', '.join(known)}",
        )
    if not values:
        raise UserError(f"parameter {param!r} has no value", remedy=f"say {param}=VALUE[,VALUE]")
    having = [use for use in uses if param in models[use.workload].model_fields]
    accepted: dict[int, list[Value]] = {id(use): [] for use in having}
    for value in values:
        answers = {
            id(use): _accepted(models[use.workload], use.matrix, param, value) for use in having
        }
        # What one use takes as it is need not be forced upon another, where it does not fit the
        # other parameters.
        taken = {use: typed for use, (typed, _) in answers.items() if typed is not None}
        found = {use: typed for use, typed in taken.items() if answers[use][1]} or taken
        if not found:
            allowed = "; ".join(
                f"{_allowed(models[name], param)} ({name})"
                for name in dict.fromkeys(use.workload for use in having)
            )
            raise UserError(
                f"{param}={value} is not a value of {experiment}",
                remedy=f"allowed {param}: {allowed}",
            )
        for use, typed in found.items():
            accepted[use].append(typed)
    return [
        _with_values(use, param, accepted[id(use)]) if id(use) in accepted else use
        for use in uses
        if accepted.get(id(use), True)
    ]


def _with_values(use: WorkloadUse, param: str, values: list[Value]) -> WorkloadUse:
    profiles = {
        name: own.model_copy(
            update={"matrix": {key: v for key, v in own.matrix.items() if key != param}}
        )
        for name, own in use.profiles.items()
    }
    return use.model_copy(update={"matrix": {**use.matrix, param: values}, "profiles": profiles})


def _accepted(
    model: type[base.Params], matrix: Matrix, param: str, value: object
) -> tuple[Value | None, bool]:
    """`value` as the model's field holds it, and whether it fits the other parameters.

    None where the field refuses it. The other parameters take their first value of the matrix; a
    refusal that names another place than this field does not fit, but may with other values.
    """
    point = {name: values[0] for name, values in matrix.items()}
    try:
        checked = model.model_validate({**point, param: value})
    except ValidationError as error:
        # Of a choice between numbers, pydantic takes none that is written as text.
        if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
            return _accepted(model, matrix, param, int(value))
        refused = any(item["loc"][:1] == (param,) for item in error.errors())
        return (None if refused else str(value)), False
    return checked.model_dump(mode="json", include={param})[param], True


def _allowed(model: type[base.Params], param: str) -> str:
    """What a field accepts, in words, from the model's JSON schema."""
    schema = model.model_json_schema()
    field = schema["properties"][param]
    for part in [field, *field.get("allOf", ()), *field.get("anyOf", ())]:
        reference = part.get("$ref", "")
        target = schema.get("$defs", {}).get(reference.rpartition("/")[2], part)
        if "enum" in target:
            return ", ".join(map(str, target["enum"]))
        if "const" in target:
            return str(target["const"])
    signs = {
        "minimum": ">=",
        "exclusiveMinimum": ">",
        "maximum": "<=",
        "exclusiveMaximum": "<",
        "multipleOf": "a multiple of",
        "pattern": "matching",
    }
    bounds = [f"{sign} {field[key]}" for key, sign in signs.items() if key in field]
    return " ".join([str(field.get("type", "any value")), " and ".join(bounds)]).strip()


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def parse_overrides(texts: Sequence[str]) -> dict[str, list[str]]:
    """`["payload=64,512", "ring=packed"]` as values by parameter; repeated names add up.

    Raises:
        UserError: a text without a name, an equals sign or a value.
    """
    parsed: dict[str, list[str]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        found = [value.strip() for value in values.split(",") if value.strip()]
        if not name.strip() or not found:
            raise UserError(
                f"cannot read parameter {text!r}", remedy="write NAME=VALUE or NAME=VALUE,VALUE"
            )
        parsed.setdefault(name.strip(), []).extend(found)
    return parsed


def names() -> list[str]:
    """Names of the experiments in `data/experiments/`, sorted."""
    return sorted(path.stem for path in (settings().data / "experiments").glob("*.yaml"))


def load(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        UserError: there is none (lists those that exist), or its file is not usable.
    """
    known = names()
    if name not in known:
        raise UserError(
            f"unknown experiment {name!r}{_nearest(name, known)}",
            remedy=f"choose one of: {', '.join(known) or 'none found'} "
            f"(files in {settings().data / 'experiments'})",
        )
    return load_file(settings().data / "experiments" / f"{name}.yaml")


def of_run(folder: Path, name: str) -> Experiment:
    """The experiment of a run: the run's own where its folder has one, else the collection's.

    Args:
        folder: The run's folder.
        name: Name of its experiment.

    Raises:
        UserError: as for `load`.
    """
    own = folder / OF_RUN
    return _read(own).at(folder) if own.is_file() else load(name)


def load_file(path: Path) -> Experiment:
    """The experiment in one YAML file, whose stem must be the experiment's name.

    Raises:
        UserError: the file cannot be read, is no YAML, or breaks the schema; names the places.
    """
    experiment = _read(path)
    if experiment.name != path.stem:
        raise UserError(
            f"{path} holds experiment {experiment.name!r}",
            remedy=f"name the file {experiment.name}.yaml",
        )
    return experiment


def _read(path: Path) -> Experiment:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        experiment = Experiment.model_validate(content)
    except OSError as error:
        raise UserError(
            f"cannot read experiment file {path}: {error.strerror}",
            remedy="check the path and its permissions",
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        shown = re.sub(r"\s+", " ", str(error))
        raise UserError(f"{path} is no YAML: {shown}", remedy="mend the file") from None
    except ValidationError as error:
        problems = "\n".join(
            f"  {'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}"
            for item in error.errors()
        )
        raise UserError(
            f"{path} is not an experiment:\n{problems}", remedy="mend the places named above"
        ) from None
    return experiment
