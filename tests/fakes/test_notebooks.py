"""Every notebook: how it is written, that it runs from any folder, and what it refuses.

`make test` also runs them all by nbval; it is old, so what matters is checked here by nbclient.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from tests.fakes.fake_runs import NET, VSOCK, make_counted

from vringlab.campaign import experiment as experiments
from vringlab.campaign.fake import FakeSession
from vringlab.campaign.plan import make_plan
from vringlab.campaign.runner import execute
from vringlab.campaign.store import Store
from vringlab.settings import settings
from vringlab.transcript import FILE, FOLDER, Transcript, tour

HERE = settings().root / "notebooks"
NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
#: Notebooks that look at one run, with its experiment.
OF_A_RUN = {
    "00_quickstart": "virtio-net-napi-tx",
    "10_vsock_ping_pong": "vsock-direct-enqueue",
    "20_virtio_net_pktgen": "virtio-net-napi-tx",
    "30_vhost_net": "vhost-net-rx-poll",
    "40_vsock_streams_and_slab": "vsock-skb-merge",
    "90_verdicts": "virtio-net-napi-tx",
    "91_is_it_noise": "virtio-net-napi-tx",
}
#: Generous: other jobs may have the processors.
TIMEOUT_S = 600
#: A kernel whose port another one took answers no cell, ever.
CELL_S = 150

MANY_FIGURES = ("30_vhost_net", "40_vsock_streams_and_slab")
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]  # nbformat's


def code(path: Path) -> list[Any]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def run(notebook: Any, folder: Path) -> None:
    """Execute a notebook in `folder`; an error in a cell is raised."""
    client = NotebookClient(
        notebook, timeout=CELL_S, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    client.execute()


def with_parameters(path: Path, **values: object) -> Any:
    """The notebook with other values in its parameters cell, as a user would type them."""
    notebook = read(path)
    cell = next(c for c in notebook.cells if "parameters" in c.metadata.get("tags", ()))
    names = {line.partition(" = ")[0] for line in cell.source.splitlines()}
    assert set(values) <= names
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in values.items())
    return notebook


_SHOWN = ("text/plain", "text/html", "text/markdown")


def text_of(notebook: Any) -> str:
    """All text that the cells printed or showed."""
    parts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            parts.append(output.get("text", ""))
            data = output.get("data", {})
            parts += [
                data[kind] for kind in ("text/plain", "text/html", "text/markdown") if kind in data
            ]
    return "\n".join(parts)


def test_all_notebooks_are_found() -> None:
    names = {path.stem for path in NOTEBOOKS}
    assert {*OF_A_RUN, "01_host_and_guest", "02_claims", "50_why_is_it_faster"} <= names


# How they are written


@each
def test_a_notebook_is_stripped_and_names_the_kernel_that_every_environment_has(
    path: Path,
) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in code(path):
        assert cell.outputs == []
        assert cell.execution_count is None


@each
def test_a_notebook_has_one_parameters_cell_of_plain_values_checked_by_the_next(
    path: Path,
) -> None:
    cells = code(path)
    tagged = [n for n, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", ())]
    assert tagged == [0]
    assert all(isinstance(line, ast.Assign) for line in ast.parse(cells[0].source).body)
    assert ".read(globals())" in cells[1].source


@each
def test_a_notebook_is_prose_and_short_cells_that_touch_no_machine(path: Path) -> None:
    cells = read(path).cells
    assert cells[0].source.startswith("# ")
    kinds = "".join(cell.cell_type[0] for cell in cells)
    assert "cccc" not in kinds, "prose stands between the cells"
    for cell in code(path):
        tree = ast.parse(cell.source)
        lines = [line for line in cell.source.splitlines() if line.strip()]
        assert len(lines) <= 12, cell.source
        assert cell.metadata.get("tags", []) in ([], ["parameters"]), "papermill and nbval differ"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.Lambda):
                assert (node.end_lineno or 0) - node.lineno < 5, cell.source
            names = [alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name")]
            names += [getattr(node, "module", None) or ""]
            for name in names:
                assert name.split(".")[0] not in ("subprocess", "paramiko", "os"), cell.source


@each
def test_links_between_notebooks_lead_somewhere(path: Path) -> None:
    for cell in read(path).cells:
        for part in cell.source.split("](")[1:]:
            target = part.partition(")")[0]
            assert (HERE / target).exists(), target


def test_the_notebook_on_hosts_asks_only_what_was_recorded() -> None:
    recorded = Transcript.model_validate_json((settings().data / FOLDER / FILE).read_bytes())
    answers = {(str(each.machine), each.command) for each in recorded.exchanges}
    answers |= {("load", load.arm) for load in recorded.loads}
    asked = tour(HERE / "01_host_and_guest.ipynb")
    assert asked
    assert set(asked) <= answers, "record it anew: python -m vringlab.transcript"
    assert recorded.host_kind in ("emulated", "nested", "physical")
    text = recorded.model_dump_json()
    assert "CACHE" in text
    assert str(Path.home()) + "/" not in text
    assert str(settings().root) + "/" not in text


# That they run


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(
    "path",
    [
        # Two minutes for these alone; nbval runs them once in any case.
        pytest.param(path, marks=pytest.mark.long if path.stem in MANY_FIGURES else ())
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs_with_its_defaults_twice_from_any_folder(
    path: Path, tmp_path: Path
) -> None:
    notebook = read(path)
    # Again in the same kernel: what later cells left behind must not be taken for parameters.
    again = [nbformat.from_dict({**cell, "id": f"{cell['id']}-again"}) for cell in notebook.cells]  # type: ignore[no-untyped-call]  # nbformat's
    notebook.cells += again
    run(notebook, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A simulated run of each experiment, as small as can be: one block of one boot."""
    found = {}
    for name in set(OF_A_RUN.values()):
        plan = make_plan(experiments.load(name), "smoke", 1)
        with Store.create(plan, tmp_path_factory.mktemp("runs")) as store:
            found[name] = execute(store, FakeSession).path
    return found


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_notebook_bears_a_run_too_small_for_any_answer_and_says_it_is_simulated(
    name: str, simulated: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "figures"
    notebook = with_parameters(
        HERE / f"{name}.ipynb",
        host=f"replay:{simulated[OF_A_RUN[name]]}",
        profile="smoke",
        figures_folder=str(folder),
    )
    run(notebook, tmp_path)
    text = text_of(notebook)
    assert "SIMULATED" in text
    assert "reproduced" not in text
    assert "insufficient data" in text
    written = {file.suffix for file in (folder / OF_A_RUN[name]).iterdir()}
    assert written == {".png", ".svg"}


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("kind", ["counted", "one block", "not counted"])
def test_the_notebook_on_instructions_bears_what_runs_have(
    kind: str, simulated: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "figures"
    names = (VSOCK, NET)
    recorded = {name: str(simulated[name]) for name in names}
    if kind != "not counted":
        boots = 1 if kind == "one block" else 3
        work = {"direct": 0.4, "merged": 0.4}
        recorded = {
            name: str(make_counted(tmp_path / "runs", name, boots=boots, work=work))
            for name in names
        }
    notebook = with_parameters(
        HERE / "50_why_is_it_faster.ipynb",
        recorded=recorded,
        params={},
        arms={},
        figures_folder=str(folder),
    )
    run(notebook, tmp_path)
    text = text_of(notebook)
    assert "SIMULATED" in text
    said = {
        "counted": ("fewer instructions", "By instructions, a change of", "queue_work_on"),
        "one block": ("not available: rtt_mean: one block has no spread", "an assumed spread"),
        "not counted": ("This run has no instructions to show: it was not asked for",),
    }
    for words in said[kind]:
        assert words in text
    for name in names:
        assert (folder / name / "pairs.png").is_file()
        assert (folder / name / "functions.png").is_file() == (kind != "not counted")


# What they refuse


@pytest.mark.timeout(TIMEOUT_S)
@each
def test_papermill_stops_at_a_parameter_that_a_notebook_does_not_have(
    path: Path, tmp_path: Path
) -> None:
    command = [
        *(sys.executable, "-m", "papermill", "--kernel", "python3", "--no-progress-bar"),
        *("-p", "hots", "embedded", str(path), str(tmp_path / "out.ipynb")),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode != 0
    assert "unknown parameter 'hots'" in done.stderr
    executed = [cell for cell in code(tmp_path / "out.ipynb") if cell.execution_count]
    assert len(executed) <= 4, "it went on after the refusal"
