"""Processes on this machine: bounded, ended with all that they started, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.fakes.processes import DEADLINE_S, alive, interrupted_when, python, script, until

from vringlab.errors import InfrastructureError
from vringlab.transport import local


def pids(path: Path, count: int) -> list[int]:
    """The process numbers that a script wrote to a file, a line each."""
    assert until(lambda: path.exists() and len(path.read_text().split()) == count)
    return [int(word) for word in path.read_text().split()]


# --- to the end ----------------------------------------------------------------------------


def test_output_of_both_streams_and_the_status() -> None:
    done = local.run(["sh", "-c", "echo out; echo err >&2; exit 3"], timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 3)
    assert done.seconds > 0


def test_text_goes_in_and_comes_out_whole() -> None:
    text = "häßlich 💥\n" * 100_000
    assert local.run(["cat"], timeout=60, input=text).stdout == text


def test_without_input_a_reader_sees_the_end_at_once() -> None:
    assert local.run(["cat"], timeout=60).stdout == ""


def test_files_as_input_and_output(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(bytes(range(256)) * 4096)
    done = local.run(["cat"], timeout=60, input=source, output=target)
    assert done.stdout == ""
    assert target.read_bytes() == source.read_bytes()


def test_output_that_is_no_text_does_no_harm() -> None:
    assert "�" in local.run(["printf", "\\377\\376"], timeout=60).stdout


def test_variables_come_on_top_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "1")
    done = local.run(["sh", "-c", "echo $OURS$THEIRS"], timeout=60, env={"THEIRS": "2"})
    assert done.stdout == "12\n"


def test_a_failure_says_what_was_run_and_what_it_said() -> None:
    with pytest.raises(InfrastructureError) as caught:
        local.run(["sh", "-c", "echo out; echo no disk >&2; exit 3"], timeout=60, remedy="buy one")
    error = caught.value
    assert (error.returncode, error.stdout, error.stderr) == (3, "out\n", "no disk\n")
    assert "no disk" in str(error)
    assert "buy one" in str(error)
    assert "exit 3" in str(error)


def test_a_missing_program_is_named_with_the_remedy() -> None:
    with pytest.raises(InfrastructureError, match="'no-such-program' is not installed") as caught:
        local.run(["no-such-program"], timeout=60, remedy_missing="install it")
    assert caught.value.remedy == "install it"


def test_a_missing_folder_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="cannot be started"):
        local.run(["true"], timeout=60, cwd=tmp_path / "gone")


# --- over the deadline, or interrupted -----------------------------------------------------


def test_at_the_deadline_the_whole_group_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    with pytest.raises(InfrastructureError, match=r"did not end within 1\.5 s") as caught:
        local.run(
            ["sh", "-c", f"sleep 1000 & echo $! > {path}; echo $$ >> {path}; echo begun; wait"],
            timeout=1.5,
        )
    assert caught.value.stdout == "begun\n"
    assert until(lambda: not any(alive(pid) for pid in pids(path, 2)))


def test_a_process_that_left_the_group_cannot_hold_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_LAST_WORDS_S", 0.2)
    path = tmp_path / "pid"
    begin = time.monotonic()
    with pytest.raises(InfrastructureError, match="did not end") as caught:
        local.run(
            ["sh", "-c", f"echo begun; setsid sh -c 'echo $$ > {path}; exec sleep 1000'"],
            timeout=1.5,
        )
    (escaped,) = pids(path, 1)
    os.kill(escaped, signal.SIGKILL)
    assert time.monotonic() - begin < DEADLINE_S
    assert caught.value.stdout == "begun\n"


def test_an_interrupted_command_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "pids"

    def begun() -> bool:
        return path.exists() and len(path.read_text().split()) == 2

    with interrupted_when(begun), pytest.raises(KeyboardInterrupt):
        local.run(
            ["sh", "-c", f"sleep 1000 & echo $! > {path}; echo $$ >> {path}; wait"], timeout=600
        )
    assert until(lambda: not any(alive(pid) for pid in pids(path, 2)))


# --- tethered ------------------------------------------------------------------------------


def test_a_tethered_command_is_as_any_other(tmp_path: Path) -> None:
    source, target = tmp_path / "in put", tmp_path / "out"
    source.write_text("content\n")
    done = local.run(
        ["sh", "-c", "cat; echo err >&2; exit 7"],
        timeout=60,
        input=source,
        output=target,
        tethered=True,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "err\n", 7)
    assert target.read_text() == "content\n"


def test_a_tethered_command_without_input_reads_nothing() -> None:
    assert local.run(["cat"], timeout=60, tethered=True).stdout == ""


def test_a_tethered_command_may_clean_up_at_the_deadline(tmp_path: Path) -> None:
    mark = tmp_path / "cleaned"
    with pytest.raises(InfrastructureError, match="did not end"):
        local.run(
            ["sh", "-c", f"trap 'echo yes > {mark}; exit' TERM; sleep 1000 & wait"],
            timeout=1.5,
            tethered=True,
        )
    assert mark.read_text() == "yes\n"


def test_a_tethered_command_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_CLEAN_UP_S", 0.2)
    path = tmp_path / "pid"
    with pytest.raises(InfrastructureError, match="did not end"):
        local.run(
            ["sh", "-c", f"trap '' TERM; echo $$ > {path}; while :; do sleep 1; done"],
            timeout=1.5,
            tethered=True,
        )
    assert until(lambda: not alive(pids(path, 1)[0]))


@pytest.mark.parametrize("tethered", [False, True])
def test_another_thread_stops_a_command_and_all_that_would_follow(
    tmp_path: Path, tethered: bool
) -> None:
    started = tmp_path / "pids"
    stop = local.Stop()

    def work() -> None:
        for _ in range(2):
            command = f"sleep 600 & echo $$ $! >> {started}; wait"
            local.run(["sh", "-c", command], timeout=600, check=False, tethered=tethered)

    with ThreadPoolExecutor(1) as pool:
        doing = pool.submit(stop.around, work)
        running = pids(started, 2)
        stop()
        with pytest.raises(InfrastructureError, match="sh was stopped"):
            doing.result(timeout=DEADLINE_S)
    assert until(lambda: not any(alive(pid) for pid in running))
    assert len(started.read_text().split()) == 2
    # Another thread's commands are none of it.
    assert local.run(["true"], timeout=60).returncode == 0


def test_kill_9_ends_a_tethered_command_and_all_that_it_started(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    stubborn = script(
        tmp_path / "stubborn",
        f"trap '' TERM; sleep 1000 & echo $! > {path}; echo $$ >> {path}; wait; sleep 1000",
    )
    owner = python(
        "import sys; from vringlab.transport import local; local._CLEAN_UP_S = 0.5\n"
        "local.run([sys.argv[1]], timeout=600, tethered=True)",
        str(stubborn),
    )
    with owner:
        running = pids(path, 2)
        assert all(alive(pid) for pid in running)
        owner.kill()
    assert until(lambda: not any(alive(pid) for pid in running))


# --- companions ----------------------------------------------------------------------------


def test_a_companion_ends_with_the_block_and_leaves_its_log(tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "pids"
    with local.companion(
        ["sh", "-c", f"echo out; echo err >&2; sleep 1000 & echo $! > {path}; wait"], log=log
    ) as process:
        (child,) = pids(path, 1)
        assert process.poll() is None
    assert process.returncode == -signal.SIGKILL
    assert until(lambda: not alive(child))
    assert log.read_text() == "out\nerr\n"


def test_a_companion_inherits_only_the_descriptors_given(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    secret, other = os.pipe()
    try:
        with local.companion(
            ["sh", "-c", f"echo hello >/proc/self/fd/{writing}; ls /proc/self/fd; sleep 1000"],
            log=tmp_path / "log",
            pass_fds=[writing],
        ):
            assert os.read(reading, 100) == b"hello\n"
            assert until(lambda: str(writing) in (tmp_path / "log").read_text().split())
    finally:
        for descriptor in (reading, writing, secret, other):
            os.close(descriptor)
    assert str(secret) not in (tmp_path / "log").read_text().split()


def test_a_companion_dies_when_its_owner_is_killed(tmp_path: Path) -> None:
    owner = python(
        "import sys, time; from pathlib import Path; from vringlab.transport import local\n"
        "with local.companion(['sleep', '1000'], log=Path(sys.argv[1])) as process:\n"
        "    print(process.pid, flush=True); time.sleep(1000)",
        str(tmp_path / "log"),
    )
    with owner:
        assert owner.stdout is not None
        companion = int(owner.stdout.readline())
        # The parent-death signal is set by a program that then becomes `sleep`.
        assert until(lambda: Path(f"/proc/{companion}/comm").read_text() == "sleep\n")
        owner.kill()
    assert until(lambda: not alive(companion))


def test_a_companion_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(InfrastructureError, match="'no-such-vm' is not installed") as caught,
        local.companion(["no-such-vm"], log=tmp_path / "log", remedy_missing="install it"),
    ):
        raise AssertionError("it cannot have started")
    assert caught.value.remedy == "install it"


def test_a_companion_that_ended_is_not_killed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its number may belong to somebody else by now.
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, _signal: killed.append(pid))
    with local.companion(["true"], log=tmp_path / "log") as process:
        assert process.wait(timeout=DEADLINE_S) == 0
    assert killed == []


def test_a_process_that_cannot_be_killed_does_not_hold_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As one that waits in a driver for ever: seen with /dev/kvm.
    monkeypatch.setattr(local, "_LAST_WORDS_S", 0.1)
    started: list[subprocess.Popen[str]] = []
    monkeypatch.setattr(local, "kill_group", started.append)
    try:
        with pytest.raises(InfrastructureError, match="did not end"):
            local.run(["sleep", "1000"], timeout=0.2)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert len(started) == 1
