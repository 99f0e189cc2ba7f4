"""The files of a new experiment: YAML, patches, claims and a notebook. Never overwrites one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vringlab.cachedir import OnStep
from vringlab.campaign.experiment import Arm, Experiment, Seed, WorkloadUse
from vringlab.campaign.files import write_new, writing
from vringlab.campaign.trial import PROFILES, REFERENCE, check_name, prepare, serves
from vringlab.errors import UserError
from vringlab.image.build import ensure_image
from vringlab.kernels import makefiles
from vringlab.kernels.base import check_spec
from vringlab.kernels.buildroot import BuildRoot
from vringlab.kernels.patches import Side
from vringlab.kernels.series import Series, read_series
from vringlab.kernels.source import MODULES
from vringlab.kernels.stack import choose_side
from vringlab.kernels.whole import prepare_base
from vringlab.settings import settings
from vringlab.workloads import base as workload_base

_CLAIMS_HEAD = """\
# The figures that were published with the patch; each gets a verdict (`vringlab audit` checks the
# file). As long as there are none, a run says what it sees without them.
"""
_CLAIMS_FORM = """\
# A form to be filled in, in place of the line above. Of a change give its percentage, or both
# figures (`before` and `after`); of none, `no_difference: true`. The state is `standing`, or
# `withdrawn` or `superseded` with what did it in `by`.
"""


def write(
    name: str,
    *,
    patch: str | None = None,
    module: str | None = None,
    workloads: Sequence[str] = (),
    base: str = "debian:6.12",
    tree: Path | None = None,
    side: Side | None = None,
    on_step: OnStep = lambda _: None,
) -> list[Path]:
    """Write the files of a new experiment.

    Args:
        name: Its name.
        patch: A patch, as `vringlab try` takes it.
        module: Without a patch, the module that its arms change.
        workloads: Workloads that measure it.
        base: The base kernel.
        tree: Git tree of a range.
        side: Whose module is replaced.
        on_step: Told what takes time.

    Returns:
        The files written.

    Raises:
        UserError: a bad name, neither patch nor module, an unknown workload, a file that is
            there already, or as for `trial.prepare`.
        InfrastructureError: a file cannot be written.
    """
    check_name(name)
    if (patch is None) == (module is None):
        raise UserError(
            "an experiment needs a patch, or the module that its arms will change",
            remedy="say --from PATCH, or --module NAME",
        )
    if not workloads:
        raise UserError(
            "what shall measure the experiment?",
            remedy=f"say --workload with one of: {', '.join(workload_base.names())}",
        )
    root = settings().root
    notebook = f"notebooks/70_{name.replace('-', '_')}.ipynb"
    taken = [
        path
        for path in (
            *(f"data/{kind}/{name}.yaml" for kind in ("experiments", "claims")),
            f"data/patches/{name}",
            notebook,
        )
        if (root / path).exists()
    ]
    if taken:
        raise UserError(
            f"{', '.join(taken)} {'is' if len(taken) == 1 else 'are'} there already",
            remedy="choose another name, or remove what is there",
        )
    if patch is not None:
        series = read_series(patch, tree=tree)
        experiment, patches = _of_patch(name, series, workloads, base, side, on_step)
    else:
        assert module is not None, "refused above"
        experiment, patches = _of_module(name, module, workloads, base, side, on_step)
    files = {
        f"data/experiments/{name}.yaml": experiment.to_yaml(),
        f"data/claims/{name}.yaml": _claims(experiment),
        **{f"data/{path}": text for path, text in patches.items()},
        notebook: _notebook(experiment),
    }
    written = []
    for path, text in files.items():
        with writing(root / path):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            write_new(root / path, text.encode("utf-8", "surrogateescape"))
        written.append(root / path)
    return written


def _of_patch(
    name: str,
    series: Series,
    workloads: Sequence[str],
    base: str,
    side: Side | None,
    on_step: OnStep,
) -> tuple[Experiment, Mapping[str, str]]:
    trial = prepare([series], workloads, base=base, side=side, name=name, on_step=on_step)
    only, wide = serves(trial.kernel), serves(trial.kernel, series=True)
    files = {
        path: text.replace(f"Serves: {only}\n", f"Serves: {wide}\n", 1)
        for path, text in trial.files.items()
    }
    # Written out, so that whoever edits the file sees what there is to choose.
    update = {"summary": f"Taken from {trial.experiment.seed.file}.", "workloads": _uses(workloads)}
    return trial.experiment.model_copy(update=update), files


def _uses(workloads: Sequence[str]) -> tuple[WorkloadUse, ...]:
    """Workloads with one value for each parameter, the default."""
    defaults = {
        name: workload_base.find(name).params().model_dump(mode="json") for name in workloads
    }
    return tuple(
        WorkloadUse(workload=name, matrix={param: [value] for param, value in values.items()})
        for name, values in defaults.items()
    )


def _of_module(
    name: str,
    module: str,
    workloads: Sequence[str],
    base: str,
    side: Side | None,
    on_step: OnStep,
) -> tuple[Experiment, Mapping[str, str]]:
    module = module.replace("-", "_")
    chosen = choose_side([module], side)
    uses = _uses(workloads)
    check_spec(base)
    image = ensure_image(on_step=on_step)
    found = prepare_base(base, image, on_step=on_step)
    kernel = found.kernel
    _require_module(module, found.root, on_step)
    experiment = Experiment(
        name=name,
        title=f"{module}: say in one line what the patch does",
        summary="Say what the patch changes, and what its mail claims.",
        seed=Seed(message_id="unknown", subject="unknown", date="2000-01-01", file="none"),
        base_kernel=base,
        module=module,
        side=chosen,
        reference=REFERENCE,
        arms=(
            Arm(name=REFERENCE, summary="The base kernel's module as it is."),
            Arm(name="patched", summary="With the patch."),
        ),
        claims=f"{name}.yaml",
        workloads=uses,
        profiles=dict(PROFILES),
    )
    head = f"Module: {module}\nSide: {chosen}\nServes: {serves(kernel, series=True)}\nDiff: none\n"
    folder = f"patches/{name}/{kernel.name}"
    empty = (
        "Put the diff, from the kernel's top folder, below this text, and take the line "
        "`Diff: none` away.\n"
    )
    return experiment, {
        f"{folder}/{REFERENCE}.patch": f"Title: the module as it is\n{head}\nThe reference arm.\n",
        f"{folder}/patched.patch": f"Title: say what it does\n{head}\n{empty}",
    }


def _require_module(name: str, root: BuildRoot, on_step: OnStep) -> None:
    if name in MODULES:
        return
    version = root.kernel.version
    index = makefiles.ensure_index(root.archive, version, on_step=on_step)
    if makefiles.find_place(name, index, makefiles.read_config(root.config)) is None:
        raise UserError(
            f"linux {version} builds no module {name!r}",
            remedy="name it as `lsmod` does; of a patch, --from finds it",
        )


def _claims(experiment: Experiment) -> str:
    """A claims file without a claim, and a form for the first in its comments."""
    seed = experiment.seed
    workload = experiment.workloads[0].workload
    metric, unit, direction = _METRIC.get(workload, ("throughput", "Gb/s", "higher"))
    form: dict[str, Any] = {
        "publications": [
            {
                "version": "v1",
                "message_id": seed.message_id if "@" in seed.message_id else "unverified",
                "date": None,
                "source": seed.file,
                "status": {"state": "standing"},
                "arms": [experiment.reference, experiment.arm_names[-1]],
                "environment": {"kind": "unknown", "kernel": None, "text": ""},
                "path": experiment.module,
                "tool": workload,
                "workload": workload,
                "n": None,
                "duration_s": None,
                "claims": [
                    {
                        "id": "example",
                        "metric": metric,
                        "unit": unit,
                        "direction": direction,
                        "change": 10,
                    }
                ],
            }
        ]
    }
    known = {"format": 1, "experiment": experiment.name, "title": experiment.title}
    comment = "".join(f"# {line}\n" for line in _yaml(form).splitlines())
    return f"{_CLAIMS_HEAD}{_yaml({**known, 'publications': []})}\n{_CLAIMS_FORM}{comment}"


def _yaml(document: Mapping[str, Any]) -> str:
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=98)


#: What the first claim of a workload is most often about.
_METRIC: Mapping[str, tuple[str, str, str]] = {
    "fio-vsock-pingpong": ("rtt_mean", "us", "lower"),
    "vsock-pingpong": ("rtt_mean", "us", "lower"),
    "pktgen-testpmd": ("pps_tx", "kpps", "higher"),
    "netperf": ("throughput", "Gb/s", "higher"),
    "vsock-stream": ("throughput", "Gb/s", "higher"),
}


def _notebook(experiment: Experiment) -> str:
    """A notebook in the form of the collection's: parameters, run, where, arms, verdicts."""
    arms = "\n".join(f"| `{arm.name}` | {arm.summary} |" for arm in experiment.arms)
    cells = (
        f"# {experiment.title}\n\n{experiment.summary}\n\n| arm | |\n|---|---|\n{arms}\n\n"
        "## Parameters\n\n"
        "- `host`: `replay` reads the recording `data/recorded/"
        f"{experiment.name}`, `replay:RUN` a run of yours; `embedded` measures on this machine.\n"
        "- `profile`: `smoke`, `quick` or `full`. `params`, `arms`: other values; none for the "
        "experiment's own.\n"
        "- `figures_folder`: where to write the figures; nowhere when `None`.",
        'host = "replay"\nprofile = "quick"\nseed = 1\nparams = {}\narms = []\nswitch = "swap"\n'
        "figures_folder = None",
        "from vringlab.collect import RunParameters\n\n"
        "parameters = RunParameters.read(globals())\n"
        f'run = parameters.run("{experiment.name}")',
        "## What was measured, and where",
        "from vringlab.report.claim_figures import shown\n"
        "from vringlab.report.notebook import about, arms_of\n\nshown(about(run))",
        "shown(arms_of(run))",
        "## Arms against the reference\n\nBlock by block: within one block all arms were measured "
        "in one guest, in an order drawn from the seed.",
        "from vringlab.report.notebook import keep_figures, show_arms, show_figures\n\n"
        "show_arms(run)",
        'show_figures(run, "effects")\nkeep_figures(run, parameters.figures_folder)',
        "## What it says of the patch\n\nAn effect is seen where the interval excludes both no "
        "change and the noise of two equal arms.",
        "from vringlab.report import trial_view\n\nshown(trial_view.table(run))",
        "## Verdicts on what was published",
        "from vringlab.analysis.judgement import verdicts_of\n"
        "from vringlab.report.verdict_view import verdict_table\n\n"
        "verdict_table(verdicts_of(run))",
    )
    texts = [_cell(experiment.name, number, text) for number, text in enumerate(cells)]
    document = {
        "cells": texts,
        "metadata": {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _cell(name: str, number: int, text: str) -> dict[str, Any]:
    lines = [f"{line}\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    cell: dict[str, Any] = {"id": f"{name}-{number:02}", "metadata": {}, "source": lines}
    if text.startswith("#"):
        return {"cell_type": "markdown", **cell}
    if text.startswith("host = "):
        cell["metadata"] = {"tags": ["parameters"]}
    return {"cell_type": "code", "execution_count": None, "outputs": [], **cell}
