"""A patch that nobody has written an experiment for: fitted to a base, and made into one.

The experiment exists for its run alone and lies in the run's folder, patches and all, so that the
run can be continued, shown and reported on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vringlab.cachedir import OnStep
from vringlab.campaign.experiment import (
    Arm,
    Counter,
    Experiment,
    Probes,
    Profile,
    Seed,
    Value,
    WorkloadUse,
)
from vringlab.errors import UserError
from vringlab.image.build import Image, ensure_image
from vringlab.kernels.base import BaseKernel, check_spec
from vringlab.kernels.buildroot import BuildRoot, cached_roots
from vringlab.kernels.patches import Side
from vringlab.kernels.series import Series
from vringlab.kernels.stack import (
    FittedPatch,
    Stack,
    choose_side,
    fit,
    takes,
    watch_tree,
)
from vringlab.kernels.whole import patched_tree, prepare_base, source_of, source_version

REFERENCE = "stock"
_PATCHED = "patched"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")

#: How much is measured; as the collection's own experiments, but what a smoke run says of an
#: unknown patch must have an interval, so it has several blocks.
PROFILES: Mapping[str, Profile] = {
    "smoke": Profile(boots=1, blocks_per_boot=3, duration_s=1, restores=1),
    "quick": Profile(boots=4, blocks_per_boot=1, duration_s=6, restores=2),
    "full": Profile(boots=10, blocks_per_boot=5, duration_s=10),
}

#: Modules of the KVM host that a running guest uses: replaced only while there is none.
_UNDER_GUEST = frozenset({"vhost", "vhost_vsock", "kvm", "kvm_amd", "kvm_intel"})


@dataclass(frozen=True)
class Trial:
    """Patches made into an experiment.

    Attributes:
        experiment: The experiment.
        kernel: The base kernel.
        stacks: By arm the series as it applies.
        files: Text by path of the patch files, from the experiment's home.
        needs_reboot: Whether the arms can be loaded only while no guest runs.
    """

    experiment: Experiment
    kernel: BaseKernel
    stacks: Mapping[str, Stack]
    files: Mapping[str, str]
    needs_reboot: bool

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know, one sentence each."""
        found: list[str] = []
        for arm, stack in self.stacks.items():
            found += [f"{arm}: {line}" for line in (*stack.series.notes, *stack.fuzz)]
            left = sorted({path for item in stack.patches for path in item.left_out})
            if left:
                found.append(f"{arm}: not built and left out: {', '.join(left)}")
            found += [f"{arm}: {why}" for why in stack.unseen.values()]
            found += [
                f"{arm}: {', '.join(w.changed)} is counted by {w.function}, into which the "
                "compiler puts it"
                for w in stack.watched
                if w.function not in w.changed
            ]
        return tuple(dict.fromkeys(found))

    def as_record(self) -> dict[str, Any]:
        """For provenance: what was asked for, exactly, and how it was made to fit."""
        return {
            arm: {
                **stack.series.as_record(),
                "modules": [module.name for module in stack.modules],
                "fuzz": list(stack.fuzz),
                "functions": [watched.function for watched in stack.watched],
                "not_seen": dict(stack.unseen),
            }
            for arm, stack in self.stacks.items()
        }


def check_name(name: str) -> None:
    """Refuse what cannot be an experiment's name.

    Raises:
        UserError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot be an experiment's name",
            remedy="use a-z, 0-9, dashes and underscores, at most 40",
        )


def prepare(
    series: Sequence[Series],
    workloads: Sequence[str],
    *,
    base: str = "debian:6.12",
    side: Side | None = None,
    params: Mapping[str, Sequence[Value]] | None = None,
    name: str | None = None,
    whole: bool = False,
    on_step: OnStep = lambda _: None,
) -> Trial:
    """Make an experiment of patches: stock against each of the series.

    Args:
        series: The series; each becomes an arm.
        workloads: Workloads that measure them.
        base: The base kernel.
        side: Whose modules are replaced; found by their names when None.
        params: Values by parameter of the workloads.
        name: The experiment's name; made from the first title when None.
        whole: Build whole kernels and boot them, for patches that reach beyond modules.
        on_step: Told what takes time.

    Raises:
        UserError: a series has no port to the base, or does not fit it (the message names the
            closest base that takes it), touches nothing that is built or more than modules; a bad
            name, an unknown base, workload or parameter.
        InfrastructureError: a tool, the network or the disk failed.
    """
    if not series or not workloads:
        raise UserError("nothing to try", remedy="name a patch, and a workload to measure it with")
    name = name or f"try-{slug(series[0].title, 32)}"
    # Before anything is fetched or built: a misspelt parameter is told at once.
    check_name(name)
    check_spec(base)
    drafted = _draft(name, series, workloads, base).override(params or {})
    drafted.points("quick")
    image = ensure_image(on_step=on_step)
    if whole:
        return _of_kernels(drafted, series, base, image, on_step)
    found = prepare_base(base, image, on_step=on_step)
    kernel, root = found.kernel, found.root
    series = [item.port_for(kernel) for item in series]
    drafted = _draft(name, series, workloads, base).override(params or {})
    stacks = dict(
        zip(
            drafted.arm_names[1:],
            (_fitted(item, root, side, on_step) for item in series),
            strict=True,
        )
    )
    modules = tuple(dict.fromkeys(m.name for stack in stacks.values() for m in stack.modules))
    chosen = choose_side(modules, side)
    if chosen == "host" and found.bundle is not None:
        raise UserError(
            f"modules of the KVM host are built for the kernel that it runs, {image.release}",
            remedy="leave --base out: other base kernels are booted by guests",
        )
    experiment = drafted.model_copy(
        update={"module": modules[0], "side": chosen, "probes": _probes(stacks)}
    )
    return Trial(
        experiment=experiment,
        kernel=kernel,
        stacks=stacks,
        files=_files(experiment, kernel, stacks, modules),
        needs_reboot=chosen == "host" and bool(_UNDER_GUEST & set(modules)),
    )


def _of_kernels(
    drafted: Experiment, series: Sequence[Series], base: str, image: Image, on_step: OnStep
) -> Trial:
    """Arms that are whole kernels: the base's source as it is, and with each of the series."""
    spec, tree = source_of(base, image, on_step=on_step)
    kernel = BaseKernel(base, "", source_version(tree), "")
    series = [item.port_for(kernel) for item in series]
    arms = [drafted.arms[0].model_copy(update={"base_kernel": spec})]
    stacks: dict[str, Stack] = {}
    for arm, item in zip(drafted.arms[1:], series, strict=True):
        diffs = [patch.diff for patch in item.patches]
        patched = patched_tree(tree, diffs, on_step=on_step)
        arms.append(arm.model_copy(update={"base_kernel": f"tree:{patched}"}))
        fitted = tuple(FittedPatch(patch, patch.diff, (), ()) for patch in item.patches)
        stacks[arm.name] = Stack(item, (), (), fitted, watch_tree(item, patched), {})
    experiment = drafted.model_copy(
        update={"module": "vmlinux", "arms": tuple(arms), "probes": _probes(stacks)}
    )
    files = _files(experiment, kernel, stacks, ("vmlinux",))
    return Trial(experiment, kernel, stacks, files, needs_reboot=True)


def _fitted(series: Series, root: BuildRoot, side: Side | None, on_step: OnStep) -> Stack:
    try:
        return fit(series, root, side=side, on_step=on_step)
    except UserError as error:
        if re.search("does not apply|does not have|no Makefile of", error.message):
            error.remedy = f"{error.remedy}; {closest(series, root, on_step)}"
            if series.base_commit:
                error.remedy += f"; it was made on commit {series.base_commit[:12]}"
        raise


def closest(series: Series, root: BuildRoot, on_step: OnStep = lambda _: None) -> str:
    """Which other base takes a series, in words; only those whose source is here are asked.

    Args:
        series: The series.
        root: Build root of the base that does not take it.
        on_step: Told what takes time.
    """
    others = [item for item in cached_roots() if item.kernel.name != root.kernel.name]

    def distance(item: BuildRoot) -> int:
        (a, b), (c, d) = item.kernel.number[:2], root.kernel.number[:2]
        return abs((a - c) * 100 + b - d)

    for other in sorted(others, key=distance):
        on_step(f"asking {other.kernel.spec} whether it takes the patch")
        if takes(series, other):
            return f"the closest base that takes it is {other.kernel.spec} ({other.kernel.version})"
    asked = ", ".join(item.kernel.spec for item in others)
    if asked:
        return f"of the other bases whose source is here ({asked}) none takes it"
    return "no other base's source is here to be asked"


def slug(text: str, limit: int = 40) -> str:
    """A text as a name: lower case, digits and single dashes, not longer than `limit`."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if len(plain) > limit:
        plain = plain[: limit + 1].rpartition("-")[0] or plain[:limit]
    return plain.strip("-") or "patch"


def _arm_names(series: Sequence[Series]) -> tuple[str, ...]:
    if len(series) == 1:
        return (_PATCHED,)
    versions = [f"v{item.version}" for item in series]
    if len(set(versions)) == len(versions):
        return tuple(versions)
    stems = [slug(Path(item.source).name.partition(".")[0], 32) for item in series]
    if len(set(stems)) == len(stems) and REFERENCE not in stems:
        return tuple(stems)
    return tuple(f"{_PATCHED}-{number}" for number in range(1, len(series) + 1))


def _draft(name: str, series: Sequence[Series], workloads: Sequence[str], base: str) -> Experiment:
    first = series[0]
    arms = [Arm(name=REFERENCE, summary="The base kernel's module as it is.")]
    for arm, item in zip(_arm_names(series), series, strict=True):
        count = f"{item.total} patches" if item.total > 1 else "one patch"
        of = f", <{item.message_id}>" if item.message_id else ""
        arms.append(Arm(name=arm, summary=f"{item.title} (v{item.version}, {count}{of})"))
    date = first.date or datetime.now(UTC).date().isoformat()
    return Experiment(
        name=name,
        title=first.title,
        summary=f"Tried with vringlab try: {'; '.join(item.title for item in series)}.",
        seed=Seed(
            message_id=first.message_id,
            subject=first.title,
            date=datetime.fromisoformat(date).date(),
            file=Path(first.source).name,
        ),
        base_kernel=base,
        module="unknown",
        side="guest",
        reference=REFERENCE,
        arms=tuple(arms),
        claims=f"{name}.yaml",
        workloads=tuple(WorkloadUse(workload=item, matrix={}) for item in workloads),
        profiles=dict(PROFILES),
    )


def _probes(stacks: Mapping[str, Stack]) -> Probes | None:
    """What is counted: the functions that the patches change, by arm; None when none can be."""
    counters: dict[tuple[str, str], Counter] = {}
    proof: dict[str, tuple[str, ...]] = {}
    for arm, stack in stacks.items():
        names = []
        for watched in stack.watched:
            key = (watched.function, watched.module)
            if key not in counters:
                counters[key] = Counter(
                    name=_counter_name(watched.function, counters.values()),
                    function=watched.function,
                    module=watched.module or None,
                    shows=f"Calls of {watched.function}, which holds what the patch changes.",
                )
            names.append(counters[key].name)
        if names:
            proof[arm] = tuple(names)
    if not counters:
        return None
    proof[REFERENCE] = tuple(item.name for item in counters.values())
    return Probes(counters=tuple(counters.values()), proof=proof)


def _counter_name(function: str, taken: Iterable[Counter]) -> str:
    names = {item.name for item in taken}
    # Underscores are as good as dashes here, and leave the function's name as it is.
    plain = re.sub(r"[^a-z0-9_-]", "-", function.lower()).lstrip("_-")[:36] or "function"
    number = 1
    name = plain
    while name in names:
        number += 1
        name = f"{plain}-{number}"
    return name


def _files(
    experiment: Experiment,
    kernel: BaseKernel,
    stacks: Mapping[str, Stack],
    modules: Sequence[str],
) -> dict[str, str]:
    folder = f"patches/{experiment.patches_name}/{kernel.name}"
    common = {
        "Module": ", ".join(modules),
        "Side": experiment.side,
        "Serves": serves(kernel),
    }
    header = {"Title": "the module as the base kernel has it", **common, "Diff": "none"}
    files = {f"{folder}/{REFERENCE}.patch": f"{_header(header)}\nThe reference arm.\n"}
    for arm, stack in stacks.items():
        kept = [item for item in stack.patches if item.diff]
        for item in kept:
            place = f"{arm}/{item.patch.number:04}-{slug(item.patch.subject, 50)}"
            path = f"{folder}/{place if len(kept) > 1 else arm}.patch"
            files[path] = _patch_text(item, stack.series, common)
    return files


def _patch_text(item: FittedPatch, series: Series, common: Mapping[str, str]) -> str:
    notes = [*item.said]
    if item.left_out:
        notes.append(f"left out, since it is not built: {', '.join(item.left_out)}")
    if item.patch.commit:
        notes.append(f"commit {item.patch.commit}")
    fields = {
        "Title": item.patch.subject,
        **common,
        **({"From-Message-Id": f"<{item.patch.message_id}>"} if item.patch.message_id else {}),
        **({"Note": "; ".join(notes)} if notes else {}),
    }
    place = f"patch {item.patch.number} of {series.total}, version {series.version}"
    author = f", by {item.patch.author}" if item.patch.author else ""
    return (
        f"{_header(fields)}\nTaken from {Path(series.source).name}: {place}{author}.\n\n{item.diff}"
    )


def _header(fields: Mapping[str, str]) -> str:
    return "".join(f"{name}: {' '.join(value.split())}\n" for name, value in fields.items())


def serves(kernel: BaseKernel, *, series: bool = False) -> str:
    """The versions that a patch is known to apply to, as a `Serves:` line has them.

    Args:
        kernel: The base it was fitted to.
        series: All further versions of the stable series, rather than this one alone.
    """
    numbers = kernel.number[:2] if series else kernel.number
    high = (*numbers[:-1], numbers[-1] + 1)
    return f"{'.'.join(map(str, kernel.number))} <= version < {'.'.join(map(str, high))}"
