"""Makes environment.yml, and on request requirements.lock, from pyproject.toml.

pyproject.toml is the one place where a requirement is written. Run without options after an
edit there, with `--lock` to resolve the versions anew as well (needs the registry), and with
`--check` to learn whether the three files agree (needs neither network nor uv).
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

#: Requirements that conda users get from conda-forge, there under the same name. The others are
#: left to pip, which is always right though slower; a conda package is only a convenience.
CONDA_FORGE = frozenset(
    {
        "dask",
        "distributed",
        "hypothesis",
        "ipywidgets",
        "jinja2",
        "jupyterlab",
        "matplotlib",
        "mypy",
        "nbclient",
        "nbformat",
        "nbval",
        "numpy",
        "packaging",
        "pandas",
        "pandas-stubs",
        "papermill",
        "paramiko",
        "pint",
        "pyarrow",
        "pydantic",
        "pydantic-settings",
        "pytest",
        "pytest-timeout",
        "pyyaml",
        "rich",
        "ruff",
        "scipy",
        "seaborn",
        "statsmodels",
        "tqdm",
        "typer",
    }
)

_ENVIRONMENT_HEADER = """\
# Made from pyproject.toml by scripts/sync_environment.py; do not edit.
# For conda users: `conda env create -f environment.yml`. It takes the newest versions allowed;
# the versions that the tests ran with are in requirements.lock, which `make setup` installs.
"""
_LOCK_HEADER = """\
# Made from pyproject.toml by scripts/sync_environment.py --lock; do not edit.
# For every Python from {minimum} on; the sum tells whether pyproject.toml has moved on since.
# requirements sha256:{digest}
"""
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)", re.MULTILINE)


class SyncError(Exception):
    """The files cannot be made or do not agree; the message has the remedy."""


@dataclass(frozen=True)
class Project:
    """What pyproject.toml asks for.

    Attributes:
        name: The distribution's name.
        python: The lowest Python version, such as `3.11`.
        run: Requirements of the library and the notebooks.
        dev: Requirements of the tests.
        build: Requirements of the build backend; in the lock so that nothing is built unpinned.
    """

    name: str
    python: str
    run: tuple[Requirement, ...]
    dev: tuple[Requirement, ...]
    build: tuple[Requirement, ...]

    @property
    def all(self) -> tuple[Requirement, ...]:
        """Everything that the lock answers for."""
        return self.run + self.dev + self.build

    @property
    def digest(self) -> str:
        """Sum over the requirements and the Python version, whatever their order."""
        lines = sorted(str(requirement) for requirement in self.all)
        return hashlib.sha256("\n".join([self.python, *lines]).encode()).hexdigest()


def read_project(text: str) -> Project:
    """Parse pyproject.toml.

    Raises:
        SyncError: `requires-python` is not a plain lower bound.
    """
    table = tomllib.loads(text)
    project = table["project"]
    bound = re.fullmatch(r">=\s*(\d+\.\d+)", project["requires-python"])
    if bound is None:
        raise SyncError("requires-python must read `>=X.Y`: the lock is resolved from there up")
    return Project(
        name=project["name"],
        python=bound[1],
        run=tuple(map(Requirement, project["dependencies"])),
        dev=tuple(map(Requirement, project["optional-dependencies"]["dev"])),
        build=tuple(map(Requirement, table["build-system"]["requires"])),
    )


def _conda_spec(requirement: Requirement) -> str:
    if requirement.marker or requirement.extras or requirement.url:
        raise SyncError(
            f"{requirement}: conda knows no markers, extras or addresses; "
            "take it out of CONDA_FORGE to leave it to pip"
        )
    # `==1.2.*` is `=1.2` in conda's language; the comparisons are the same.
    parts = [
        re.sub(r"^==(.*)\.\*$", r"=\1", str(part))
        for part in sorted(requirement.specifier, key=str)
    ]
    return requirement.name + ",".join(parts)


def environment_text(project: Project) -> str:
    """The text of environment.yml."""
    from_conda, from_pip = [], []
    for requirement in sorted(project.run + project.dev, key=lambda entry: entry.name.lower()):
        if canonicalize_name(requirement.name) in CONDA_FORGE:
            from_conda.append(_conda_spec(requirement))
        else:
            from_pip.append(str(requirement))
    lines = [
        f"name: {project.name}",
        "channels:",
        "  - conda-forge",
        "  - nodefaults",
        "dependencies:",
        f"  - python>={project.python}",
        "  - pip",
        *(f"  - {spec}" for spec in from_conda),
        "  - pip:",
        *(f"      - {spec}" for spec in from_pip),
        "      - --editable .",
    ]
    return _ENVIRONMENT_HEADER + "\n".join(lines) + "\n"


def resolve(project: Project, current: str, *, upgrade: bool) -> str:
    """The text of requirements.lock, resolved by uv for every Python and platform.

    Args:
        project: What is to be resolved.
        current: The present lock; its versions are kept where they still fit.
        upgrade: Take the newest versions instead.

    Raises:
        SyncError: uv is missing, or found no solution.
    """
    uv = shutil.which("uv")
    if uv is None:
        raise SyncError(
            "uv is needed to resolve the lock: `pipx install uv`, or pip in an own venv"
        )
    with tempfile.TemporaryDirectory() as folder:
        # In a folder of its own, so that uv's notes on where a package comes from have no path.
        source, lock = Path(folder, "pyproject"), Path(folder, "lock")
        source.write_text("".join(f"{requirement}\n" for requirement in project.all))
        lock.write_text(current)
        command = [
            *(uv, "pip", "compile", "--quiet", "--no-config", "--universal"),
            *("--python-version", project.python, "--generate-hashes"),
            *("--no-header", "--no-emit-index-url", "--no-emit-find-links"),
            *(["--upgrade"] if upgrade else []),
            *("--output-file", lock.name, source.name),
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SyncError(f"uv found no solution (exit {done.returncode}):\n{done.stderr}")
        body = lock.read_text()
    return _LOCK_HEADER.format(minimum=project.python, digest=project.digest) + body


def disagreements(project: Project, environment: str, lock: str) -> Iterator[str]:
    """What keeps the three files from agreeing, one sentence each."""
    if environment != environment_text(project):
        yield "environment.yml is not what pyproject.toml gives"
    if f"sha256:{project.digest}\n" not in lock:
        yield "requirements.lock was resolved from other requirements than pyproject.toml's"
    pins: dict[str, set[str]] = {}
    for pin in _PIN.finditer(lock):
        pins.setdefault(canonicalize_name(pin["name"]), set()).add(pin["version"])
    for requirement in project.all:
        versions = pins.get(canonicalize_name(requirement.name), set())
        if not versions:
            yield f"requirements.lock does not pin {requirement.name}"
        for version in sorted(versions):
            if not requirement.specifier.contains(version, prereleases=True):
                yield f"requirements.lock pins {requirement.name} {version}, not {requirement}"


def _write(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text:
        return
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)
    print(f"wrote {path.name}")


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the command; returns its exit status: 0, or 1 when the files disagree or fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing, say what disagrees")
    parser.add_argument("--lock", action="store_true", help="also resolve requirements.lock")
    parser.add_argument("--upgrade", action="store_true", help="with --lock: newest versions")
    options = parser.parse_args(arguments)
    if (options.check and options.lock) or (options.upgrade and not options.lock):
        parser.error("--check and --lock exclude each other, and --upgrade needs --lock")
    environment, lock = root / "environment.yml", root / "requirements.lock"
    try:
        project = read_project((root / "pyproject.toml").read_text())
        if options.lock:
            _write(lock, resolve(project, _read(lock), upgrade=options.upgrade))
        if not options.check:
            _write(environment, environment_text(project))
        problems = list(disagreements(project, _read(environment), _read(lock)))
    except SyncError as error:
        problems = [str(error)]
    for problem in problems:
        print(f"sync_environment: {problem}", file=sys.stderr)
    if problems:
        print("remedy: python scripts/sync_environment.py [--lock]", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
