"""The rules of the project that no linter knows: see the section of each test."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
import yaml
from IPython.core.inputtransformer2 import TransformerManager
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "lib" / "vringlab"

# --- pyproject.toml, environment.yml and requirements.lock agree ----------------------------


@pytest.fixture(scope="module")
def sync() -> ModuleType:
    path = ROOT / "scripts" / "sync_environment.py"
    spec = importlib.util.spec_from_file_location("sync_environment", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _read(name: str) -> str:
    return (ROOT / name).read_text()


@cache
def _pins() -> dict[str, set[str]]:
    pins: dict[str, set[str]] = {}
    for line in _read("requirements.lock").splitlines():
        if line and line[0] not in " #":
            name, _, version = line.split()[0].partition("==")
            pins.setdefault(canonicalize_name(name), set()).add(version)
    return pins


def test_generated_files_are_those_of_pyproject(sync: ModuleType) -> None:
    project = sync.read_project(_read("pyproject.toml"))
    problems = sync.disagreements(project, _read("environment.yml"), _read("requirements.lock"))
    assert list(problems) == [], "run scripts/sync_environment.py --lock"


def test_conda_environment_has_the_names_and_bounds_of_pyproject(sync: ModuleType) -> None:
    # Read as conda does, not through the generator, which could be wrong twice.
    environment = yaml.safe_load(_read("environment.yml"))
    entries = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (by_pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert by_pip[-1] == "--editable ."
    entries += by_pip[:-1]
    found = {}
    for entry in entries:
        name, bounds = re.fullmatch(r"([\w.-]+)(.*)", entry).groups()  # type: ignore[union-attr]
        found[name] = ",".join(
            re.sub(r"^=([\d.]+)$", r"==\1.*", bound) for bound in bounds.split(",")
        )
    project = sync.read_project(_read("pyproject.toml"))
    wanted = {entry.name: str(entry.specifier) for entry in project.run + project.dev}
    assert found == {**wanted, "python": f">={project.python}", "pip": ""}


def test_lock_has_a_hash_for_every_pin() -> None:
    logical = _read("requirements.lock").replace("\\\n", " ").splitlines()
    pins = [line for line in logical if line and line[0] not in " #"]
    assert len(pins) > 50
    assert [line for line in pins if "--hash=sha256:" not in line] == []


def test_lock_is_closed_over_the_installed_requirements(sync: ModuleType) -> None:
    missing = []
    todo = list(sync.read_project(_read("pyproject.toml")).all)
    seen = set()
    while todo:
        requirement: Requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        if name not in _pins():
            missing.append(name)
            continue
        for text in metadata.requires(name) or ():
            below = Requirement(text)
            extras = requirement.extras or {""}
            if below.marker is None or any(below.marker.evaluate({"extra": e}) for e in extras):
                todo.append(below)
    assert missing == []


def test_installed_versions_are_those_of_the_lock() -> None:
    wrong = {
        name: metadata.version(name)
        for name, versions in _pins().items()
        if _installed(name) and metadata.version(name) not in versions
    }
    assert wrong == {}, "run make setup"


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ('"numpy>=1.26"', '"numpy>=99"', "pins numpy"),
        ('"numpy>=1.26"', '"numpy>=1.26", "no-such-package"', "does not pin no-such-package"),
        ('"numpy>=1.26"', '"numpy>=1.0"', "resolved from other requirements"),
        ('"numpy>=1.26"', '"numpy>=1.0"', "environment.yml is not"),
    ],
)
def test_a_changed_requirement_is_noticed(
    sync: ModuleType, before: str, after: str, problem: str
) -> None:
    text = _read("pyproject.toml")
    assert before in text
    project = sync.read_project(text.replace(before, after))
    found = sync.disagreements(project, _read("environment.yml"), _read("requirements.lock"))
    assert any(problem in sentence for sentence in found)


# --- imports go downwards only --------------------------------------------------------------

#: From the bottom up; those of one row may use each other as long as no circle comes of it.
LAYERS = (
    {"errors", "settings"},
    {"cachedir"},
    {"transport"},
    {"image", "kernels"},
    {"lab"},
    {"workloads"},
    {"campaign"},
    {"analysis"},
    {"report"},
    {"collect", "transcript", "tryout"},
    {"cli", "cli_lab", "cli_patches", "__main__"},
)
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}


def _module_name(path: Path) -> str:
    parts = path.relative_to(LIBRARY.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _imports(node: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """All modules that `node` imports, absolute; also in functions, but not for types only."""
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        children = node.orelse
    elif isinstance(node, ast.Import):
        yield from ((node.lineno, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parents, base] if base else parents)
        yield node.lineno, base
        # `from vringlab import lab` names the layer only here.
        yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
    for child in children:
        yield from _imports(child, package)


def _edges(path: Path) -> Iterator[tuple[str, str, str]]:
    """(layer, imported layer, place) for each import of the library by a module of it."""
    name = _module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text(), path.name)
    for line, imported in _imports(tree, package):
        parts = imported.split(".")
        if parts[0] == "vringlab" and len(parts) > 1 and not parts[1].startswith("__version"):
            yield (
                name.split(".")[1] if "." in name else "",
                parts[1],
                f"{path.relative_to(ROOT)}:{line}",
            )


def _all_modules() -> list[Path]:
    return sorted(LIBRARY.rglob("*.py"))


def test_every_module_belongs_to_a_layer() -> None:
    names = {_module_name(path).split(".")[1] for path in _all_modules() if path.parent != LIBRARY}
    names |= {path.stem for path in LIBRARY.glob("*.py")} - {"__init__"}
    assert names - set(RANK) == set()


def test_imports_go_downwards_only() -> None:
    upward = [
        f"{place}: {source or 'vringlab'} must not import {target}"
        for path in _all_modules()
        for source, target, place in _edges(path)
        if RANK.get(source, -1) < RANK.get(target, len(LAYERS))
    ]
    assert upward == []


def test_layers_of_one_row_make_no_circle() -> None:
    below: dict[str, set[str]] = {name: set() for name in RANK}
    for path in _all_modules():
        for source, target, _ in _edges(path):
            if source and source != target:
                below[source].add(target)
    while free := [name for name, targets in below.items() if not targets & set(below)]:
        for name in free:
            del below[name]
    assert below == {}


def test_the_import_reader_sees_what_it_should() -> None:
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from vringlab.cli import main
else:
    import vringlab.errors
def function():
    from ..lab import guest
    from vringlab import report
"""
    seen = {name for _, name in _imports(ast.parse(source), "vringlab.transport")}
    assert seen >= {"vringlab.errors", "vringlab.lab", "vringlab.lab.guest", "vringlab.report"}
    assert not any(name.startswith("vringlab.cli") for name in seen)


def _loaded_by(code: str) -> set[str]:
    code += "\nimport sys; print(' '.join(sys.modules))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_command_line_starts_without_heavy_imports() -> None:
    heavy = {"numpy", "scipy", "pandas", "matplotlib", "seaborn", "pyarrow", "paramiko", "dask"}
    assert _loaded_by("import vringlab.cli") & heavy == set()


def test_analysis_touches_files_only() -> None:
    modules = [
        _module_name(path) for path in _all_modules() if LIBRARY / "analysis" in path.parents
    ]
    loaded = _loaded_by("".join(f"import {name}\n" for name in modules))
    machines = {"paramiko", *(f"vringlab.{name}" for name in ("transport", "lab", "kernels"))}
    assert loaded & machines == set()


# --- notebooks are thin ---------------------------------------------------------------------

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
#: Notebooks kept with outputs and counts, for strict nbval runs.
GOLDEN: frozenset[str] = frozenset()


def _notebook(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def _code_cells(path: Path) -> list[Any]:
    return [cell for cell in _notebook(path).cells if cell.cell_type == "code"]


def _trees(path: Path) -> Iterator[tuple[int, ast.Module]]:
    plain = TransformerManager()  # type: ignore[no-untyped-call]
    for number, cell in enumerate(_code_cells(path)):
        yield number, ast.parse(plain.transform_cell(cell.source))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
    assert {path.name for path in NOTEBOOKS} >= GOLDEN


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_valid_and_runs_on_the_python3_kernel(path: Path) -> None:
    notebook = _notebook(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_one_parameters_cell(path: Path) -> None:
    tagged = [cell for cell in _code_cells(path) if "parameters" in cell.metadata.get("tags", ())]
    assert len(tagged) == 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_long_function(path: Path) -> None:
    long = [
        f"cell {number}: {node.name}"
        for number, tree in _trees(path)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (node.end_lineno or node.lineno) - node.lineno + 1 > 5
    ]
    assert long == [], "move it into the library"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_leaves_machines_to_the_library(path: Path) -> None:
    imported = {name.split(".")[0] for _, tree in _trees(path) for _, name in _imports(tree, "")}
    assert imported & {"subprocess", "paramiko"} == set()
    # `!command` and `%%bash` start processes as well.
    calls = [cell for cell in _code_cells(path) if re.search(r"^\s*(!|%%)", cell.source, re.M)]
    assert calls == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    if path.name in GOLDEN:
        return
    kept = [cell for cell in _code_cells(path) if cell.outputs or cell.execution_count is not None]
    assert kept == [], "clear the outputs before committing"


# --- nothing of the machine that made it ----------------------------------------------------

# Written with an escape each, so that they do not match their own text.
MACHINE_PATHS = rb"/work/(?:main|shared|\.library)|/tmp/\bbash_jobs|/opt/\bpypi|\.pyenv/\bversions"
REGISTRIES = (
    rb"\bpypi\.org|pythonhosted\.org|(?:deb|security|snapshot|ftp\.\w+)\.debian\.org"
    rb"|archive\.ubuntu\.com|registry\.npmjs\.org|conda\.anaconda\.org|proxy\.golang\.org"
)


def _tracked() -> list[Path]:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=False
    )
    if done.returncode == 0:
        names = os.fsdecode(done.stdout).split("\0")
        return [path for name in names if name and (path := ROOT / name).is_file()]
    # A copy without its history: all that the ignore file does not name.
    ignored = {".venv", "runs", "__pycache__", ".git", "build", "dist"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(
            part in ignored or part.endswith((".egg-info", "_cache", ".hypothesis"))
            for part in path.relative_to(ROOT).parts
        )
    ]


@pytest.mark.parametrize(
    ("pattern", "what"), [(MACHINE_PATHS, "path of a machine"), (REGISTRIES, "registry host")]
)
def test_tracked_files_name_no(pattern: bytes, what: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {what} {match[0].decode()}"
        for path in _tracked()
        if (match := re.search(pattern, path.read_bytes()))
    ]
    assert found == []


def test_the_patterns_find_what_they_should() -> None:
    assert re.search(MACHINE_PATHS, b'"/work' + b'/main/lib"')
    assert re.search(REGISTRIES, b"http://deb" + b".debian.org/debian")
    assert len(_tracked()) > 10


# --- every public module says what it is for ------------------------------------------------


@pytest.mark.parametrize("path", _all_modules(), ids=lambda path: _module_name(path))
def test_module_has_a_docstring(path: Path) -> None:
    private = path.stem.startswith("_") and not path.stem.startswith("__")
    assert private or ast.get_docstring(ast.parse(path.read_text()))


# --- scripts and targets --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scripts/setup", ".ci/run"])
def test_shell_scripts_are_executable_and_parse(name: str) -> None:
    path = ROOT / name
    assert os.access(path, os.X_OK)
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_make_lists_every_target_for_people() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "-C", str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MAKEFLAGS": "", "MAKELEVEL": "0"},
    )
    assert done.returncode == 0, done.stderr
    listed = {line.split()[1] for line in done.stdout.splitlines()}
    assert listed >= {"setup", "run", "test", "test-fast", "lab", "notebooks", "clean"}
