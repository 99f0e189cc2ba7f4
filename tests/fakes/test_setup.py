"""scripts/setup against stand-ins for Python, pip, apt-get, id and sudo."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: What the script calls and no test replaces.
REAL = "bash cat cut cp dirname env flock id mkdir mv rm sed sha256sum sort touch tr"
#: What it looks for as a command, see `needs` there.
TOOLS = "mmdebstrap bwrap newuidmap gensquashfs gcc make git ssh-keygen"

# Stands for the base interpreter and, copied by its `-m venv`, for the environment's own. It
# writes down what it was asked to install, and fails once for each line in the file `pip-fails`.
PYTHON = """#!/bin/bash
here={here}
case "$*" in
    *"-m venv"*)
        echo venv >>"$here/log"
        target=${{@: -1}}
        rm -rf "$target"; mkdir -p "$target/bin"
        touch "$target/pyvenv.cfg"; cp "$here/bin/python3" "$target/bin/python" ;;
    *"-m pip"*)
        echo "pip $*" >>"$here/log"
        if [ -e "$here/pip-fails" ]; then rm "$here/pip-fails"; exit 1; fi ;;
esac
"""
# Provides the command `bwrap`, as the package bubblewrap does.
APT = """#!/bin/bash
echo "apt $*" >>{here}/log
case "$*" in *" install "*)
    [ -e {here}/apt-fails ] && exit 100
    cp {here}/bin/make {here}/bin/bwrap ;;
esac
"""


@dataclass
class Machine:
    """A folder with a checkout and the only commands that its set-up can see."""

    home: Path

    @property
    def tree(self) -> Path:
        return self.home / "a tree"

    @property
    def stamp(self) -> Path:
        return self.tree / ".venv" / ".vringlab-stamp"

    def command(self, name: str, text: str) -> None:
        path = self.home / "bin" / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *arguments: str, tree: Path | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str((tree or self.tree) / "scripts" / "setup"), *arguments],
            env={
                "PATH": str(self.home / "bin"),
                "VRINGLAB_OS_RELEASE": str(self.home / "os-release"),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def set_up(self, *arguments: str, tree: Path | None = None) -> tuple[int, str]:
        process = self.start(*arguments, tree=tree)
        output, _ = process.communicate()
        return process.returncode, output

    def log(self) -> list[str]:
        """What was asked of the stand-ins since the last call."""
        path = self.home / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    (tmp_path / "bin").mkdir()
    (made.tree / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup", made.tree / "scripts")
    (made.tree / "pyproject.toml").write_text("[project]\n")
    (made.tree / "requirements.lock").write_text("one==1\n")
    (tmp_path / "os-release").write_text('ID=debian\nVERSION_ID="13"\n')
    for name in REAL.split():
        found = shutil.which(name)
        assert found is not None, name
        (tmp_path / "bin" / name).symlink_to(found)
    for name in TOOLS.split():
        made.command(name, "#!/bin/bash\n")
    made.command("python3", PYTHON.format(here=tmp_path))
    made.command("apt-get", APT.format(here=tmp_path))
    made.command("id", "#!/bin/bash\necho 0\n")
    return made


def kinds(log: list[str]) -> list[str]:
    return [line.split()[0] for line in log]


def test_first_run_installs_and_second_does_nothing(machine: Machine) -> None:
    assert machine.set_up()[0] == 0
    log = machine.log()
    assert kinds(log) == ["venv", "pip", "pip"]
    assert "--require-hashes" in log[1]
    assert "-r requirements.lock" in log[1]
    assert machine.set_up() == (0, "")
    assert machine.log() == []


def test_failed_pip_leaves_no_stamp_and_is_tried_again(machine: Machine) -> None:
    (machine.home / "pip-fails").touch()
    status, output = machine.set_up()
    assert status == 1
    assert "run the set-up again" in output
    assert not machine.stamp.exists()
    machine.log()
    assert machine.set_up()[0] == 0
    # Made anew: pip may have been stopped in the middle of a package.
    assert kinds(machine.log()) == ["venv", "pip", "pip"]


def test_failed_upgrade_takes_the_old_stamp_away(machine: Machine) -> None:
    machine.set_up()
    (machine.tree / "requirements.lock").write_text("one==2\n")
    (machine.home / "pip-fails").touch()
    assert machine.set_up()[0] == 1
    assert not machine.stamp.exists()


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml"])
def test_changed_requirements_are_installed(machine: Machine, name: str) -> None:
    machine.set_up()
    machine.log()
    (machine.tree / name).write_text("# changed\n")
    assert machine.set_up()[0] == 0
    assert kinds(machine.log()) == ["pip", "pip"]


@pytest.mark.parametrize("broken", ["pyvenv.cfg", "bin/python"])
def test_half_made_environment_is_made_anew(machine: Machine, broken: str) -> None:
    machine.set_up()
    machine.log()
    (machine.tree / ".venv" / broken).unlink()
    assert machine.set_up()[0] == 0
    assert kinds(machine.log()) == ["venv", "pip", "pip"]


def test_copied_tree_does_not_trust_the_stamp(machine: Machine) -> None:
    machine.set_up()
    machine.log()
    copy = machine.home / "copy"
    shutil.copytree(machine.tree, copy)
    assert machine.set_up(tree=copy)[0] == 0
    assert kinds(machine.log()) == ["venv", "pip", "pip"]
    assert machine.set_up(tree=copy) == (0, "")


def test_two_set_ups_take_turns(machine: Machine) -> None:
    running = [machine.start() for _ in range(3)]
    for process in running:
        process.communicate()
    assert [process.returncode for process in running] == [0, 0, 0]
    assert kinds(machine.log()) == ["venv", "pip", "pip"]


def test_root_installs_only_what_is_missing(machine: Machine) -> None:
    (machine.home / "bin" / "bwrap").unlink()
    assert machine.set_up()[0] == 0
    update, install = [line for line in machine.log() if line.startswith("apt")]
    assert update.endswith(" update")
    assert install.endswith(" install --no-install-recommends bubblewrap")


def test_failed_install_is_an_error_and_nothing_follows(machine: Machine) -> None:
    (machine.home / "bin" / "bwrap").unlink()
    (machine.home / "apt-fails").touch()
    status, output = machine.set_up()
    assert status == 1
    assert "apt-get failed" in output
    assert kinds(machine.log()) == ["apt", "apt"]


@pytest.mark.parametrize(
    ("os_release", "line"),
    [
        ("ID=debian", "sudo apt-get install --no-install-recommends bubblewrap"),
        ("ID=ubuntu\nID_LIKE=debian", "sudo apt-get install --no-install-recommends bubblewrap"),
        ("ID=fedora", "sudo dnf install bubblewrap"),
        ("ID=arch", "by Debian's package names: bubblewrap"),
    ],
)
def test_without_rights_the_line_to_run_is_printed(
    machine: Machine, os_release: str, line: str
) -> None:
    (machine.home / "bin" / "bwrap").unlink()
    (machine.home / "os-release").write_text(os_release + "\n")
    machine.command("id", "#!/bin/bash\necho 1000\n")
    machine.command("sudo", "#!/bin/bash\nexit 1\n")
    status, output = machine.set_up()
    assert status == 2
    assert line in output
    assert machine.log() == []


def test_sudo_without_a_password_is_used(machine: Machine) -> None:
    (machine.home / "bin" / "bwrap").unlink()
    machine.command("id", "#!/bin/bash\necho 1000\n")
    machine.command("sudo", '#!/bin/bash\nshift; case $1 in true) ;; *) exec "$@" ;; esac\n')
    assert machine.set_up()[0] == 0
    assert kinds(machine.log()) == ["apt", "apt", "venv", "pip", "pip"]


def test_python_that_does_not_work_is_passed_over(machine: Machine) -> None:
    machine.command("python3.13", "#!/bin/bash\necho 'pyenv: not this version' >&2; exit 127\n")
    status, output = machine.set_up()
    assert status == 0
    assert "making .venv with" in output
    assert "python3.13" not in output


def test_unknown_argument_is_refused(machine: Machine) -> None:
    status, output = machine.set_up("--tests")
    assert status == 2
    assert "unknown argument: --tests" in output
    assert "scripts/setup --test" in output
    assert machine.log() == []


def test_only_tests_need_a_browser(machine: Machine) -> None:
    machine.command("id", "#!/bin/bash\necho 1000\n")
    status, output = machine.set_up("--test")
    assert (status, "chromium" in output) == (2, True)
    assert machine.set_up()[0] == 0


def test_help_names_the_exit_statuses() -> None:
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "setup", "--help"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0
    assert "Exit status:" in done.stdout
    assert "set -euo" not in done.stdout
