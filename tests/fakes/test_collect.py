"""Getting a run: what is replayed, what is measured, and what is refused. No machine is started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import cast

import pytest

from vringlab import collect as collecting
from vringlab.analysis.frames import bundle
from vringlab.campaign import session
from vringlab.campaign.fake import FakeSession
from vringlab.campaign.hosts import Host
from vringlab.campaign.plan import guest_options
from vringlab.campaign.runner import Interrupted, execute
from vringlab.campaign.store import Store
from vringlab.collect import collect, open_lab, plan_run
from vringlab.errors import InfrastructureError, UserError
from vringlab.settings import Settings, settings
from vringlab.transcript import Exchange, Load, Transcript, tour

VSOCK = "vsock-direct-enqueue"
PKTGEN = "virtio-net-napi-tx"


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Run folders and recordings of this test alone; experiments as they are."""
    data = tmp_path / "collection" / "data"
    data.mkdir(parents=True)
    for name in ("experiments", "claims", "patches"):
        (data / name).symlink_to(settings().data / name)
    monkeypatch.setenv("VRINGLAB_ROOT", str(data.parent))
    monkeypatch.setenv("VRINGLAB_RUNS", str(tmp_path / "runs"))
    settings.cache_clear()
    yield settings()
    monkeypatch.undo()
    settings.cache_clear()


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> list[FakeSession]:
    """Sessions without machines take the place of real ones; they are listed here."""
    opened: list[FakeSession] = []

    @contextmanager
    def open_fake(*_: object, **options: object) -> Iterator[FakeSession]:
        with FakeSession(effects={"merged": 0.6}) as fake:
            assert options["switch"] in ("swap", "reboot")
            opened.append(fake)
            yield fake

    monkeypatch.setattr(session, "open_session", open_fake)
    return opened


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated recording of two boots of two blocks, made once."""
    folder = tmp_path_factory.mktemp("bundled")
    _, plan = plan_run(PKTGEN, "quick", params={"irq": ["same"]})
    with Store.create(plan, folder / "runs") as store:
        path = execute(store, FakeSession).path
    return bundle(path, folder / "bundle")


@pytest.fixture
def recorded(bundled: Path, own_settings: Settings) -> Path:
    return shutil.copytree(bundled, own_settings.data / "recorded" / PKTGEN)


def test_measuring_makes_a_run_folder_and_gives_what_is_on_disk(
    machines: list[FakeSession], own_settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    run = collect(PKTGEN, host="embedded", profile="smoke", seed=7, arms=["rfc"])
    assert run.complete
    assert run.path.parent == own_settings.runs_dir
    assert run.plan.seed == 7
    assert run.plan.arms == ("stock", "rfc", "stock.aa")
    assert run.simulated
    assert "3 of 3 cells" in capsys.readouterr().err
    assert len(machines) == 1


def test_with_reboot_each_block_is_a_boot(machines: list[FakeSession]) -> None:
    run = collect(VSOCK, host="embedded", switch="reboot", params={"payload": [64]})
    assert len(machines) == 1
    assert run.samples.groupby("boot")["block"].nunique().eq(1).all()
    assert set(run.samples["param_payload"]) == {64}


@pytest.mark.parametrize(
    ("done", "hosts", "editions"),
    [
        (0, 1, [1]),
        (1, 1, [2]),
        (2, 1, [3]),
        (3, 1, [0]),
        # Boots are dealt to the hosts in turn, and a host without one restores nothing.
        (0, 3, [1, 2, 3]),
        (3, 2, [0, 0]),
    ],
)
def test_a_host_is_opened_with_the_guest_of_the_boot_that_it_measures_first(
    monkeypatch: pytest.MonkeyPatch,
    own_settings: Settings,
    done: int,
    hosts: int,
    editions: list[int],
) -> None:
    asked: list[object] = []

    @contextmanager
    def open_fake(*_: object, **options: object) -> Iterator[FakeSession]:
        asked.append(options["first"])
        with FakeSession() as fake:
            yield fake

    def measure_on(openers: Mapping[str, Callable[[], object]], *_: object) -> None:
        for opener in openers.values():
            with cast(AbstractContextManager[object], opener()):
                pass

    monkeypatch.setattr(session, "open_session", open_fake)
    monkeypatch.setattr(collecting, "_measure_on", measure_on)
    experiment, plan = plan_run(PKTGEN, "quick", params={"irq": ["same"], "ring": ["split"]})
    assert (len(plan.boots), plan.restores) == (4, 3)
    first = [cell for cell in plan.cells if plan.boots.index(cell.boot) < done]
    stopped = FakeSession(faults={len(first) + 1: InfrastructureError("broken")})
    with Store.create(plan, own_settings.runs_dir) as store:
        with pytest.raises(InfrastructureError, match="broken"):
            execute(store, lambda: stopped)
        names = ["embedded", "embedded-2", "embedded-3"][:hosts]
        collecting.measure(
            experiment, store, hosts=[Host(url="embedded", name=name) for name in names]
        )
    options = guest_options(plan)
    assert options
    assert asked == [(options, edition) for edition in editions]


def test_a_recording_is_read_without_any_machine(
    recorded: Path, machines: list[FakeSession]
) -> None:
    run = collect(PKTGEN)
    assert run.path == recorded
    assert run.notes == ()
    assert machines == []


@pytest.mark.parametrize(
    "name", [lambda path: path, lambda path: path.name, lambda _: "latest", lambda _: "smoke"]
)
def test_a_run_made_here_is_replayed_by_path_or_name(
    machines: list[FakeSession], name: Callable[[Path], object]
) -> None:
    made = collect(PKTGEN, host="embedded", profile="smoke")
    machines.clear()
    found = collect(PKTGEN, host=f"replay:{name(made.path)}")
    assert found.run_id == made.run_id
    assert machines == []


def test_a_relative_path_is_found_from_any_folder(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert collect(PKTGEN, host=f"replay:data/recorded/{PKTGEN}").path == recorded
    monkeypatch.chdir(recorded.parent)
    assert collect(PKTGEN, host=f"replay:{PKTGEN}").path.resolve() == recorded


def test_another_profile_than_the_recorded_one_is_said(recorded: Path) -> None:
    (note,) = collect(PKTGEN, profile="full").notes
    assert "recording is of profile quick, and full was asked for" in note
    assert recorded.exists()


@pytest.mark.usefixtures("recorded")
def test_a_recording_is_narrowed_to_what_is_asked_for() -> None:
    run = collect(PKTGEN, params={"ring": "packed", "ring_size": ["256"]}, arms=["merged"])
    assert set(run.samples["param_ring"]) == {"packed"}
    assert set(run.samples["arm"]) == {"stock", "stock.aa", "merged"} == set(run.plan.arms)
    assert run.complete
    assert set(run.histograms["cell_id"]) <= set(run.samples["cell_id"])


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("options", "problem", "remedy"),
    [
        ({"host": "embeded"}, "unknown host 'embeded'", "`embedded` measures here"),
        ({"host": "replay:nowhere"}, "no run 'nowhere' in", "20261231T000000-other"),
        ({"profile": "fast"}, "unknown profile 'fast'", "smoke, quick, full"),
        ({"arms": ["direct"]}, "no arm 'direct'", "stock, rfc, merged, stock.aa"),
        ({"params": {"irq": "other"}}, "no irq=other", "it has irq=same"),
        ({"params": {"payload": 64}}, "no parameter 'payload'", "ring, irq"),
        ({"params": {"irq": []}}, "no parameter 'irq' with a value", "it has irq=same"),
    ],
)
def test_what_a_recording_cannot_be_is_refused(
    options: dict[str, object], problem: str, remedy: str, own_settings: Settings
) -> None:
    (own_settings.runs_dir / "20261231T000000-other").mkdir(parents=True)
    with pytest.raises(UserError) as caught:
        collect(PKTGEN, **options)  # type: ignore[arg-type]  # wrong on purpose
    assert problem in caught.value.message
    assert remedy in caught.value.remedy


def test_a_recording_that_is_not_there_is_named_with_those_that_are(recorded: Path) -> None:
    with pytest.raises(UserError) as caught:
        collect(VSOCK)
    assert VSOCK in caught.value.message
    assert PKTGEN in caught.value.remedy
    with pytest.raises(UserError, match="a run of experiment 'virtio-net-napi-tx', not of"):
        collect(VSOCK, host=f"replay:{recorded}")


def test_an_unknown_host_makes_no_run_folder(own_settings: Settings) -> None:
    with pytest.raises(UserError):
        collect(PKTGEN, host="kvm1")
    assert not own_settings.runs_dir.exists()


def test_a_failure_keeps_the_run_and_says_how_to_continue(
    monkeypatch: pytest.MonkeyPatch, own_settings: Settings
) -> None:
    broken = FakeSession(faults={2: InfrastructureError("fio is missing")})
    monkeypatch.setattr(session, "open_session", lambda *_, **__: broken)
    with pytest.raises(InfrastructureError, match="vringlab resume"):
        collect(PKTGEN, host="embedded", profile="smoke")
    (folder,) = own_settings.runs_dir.iterdir()
    assert len(list((folder / "cells").iterdir())) == 1


def test_an_interrupted_kernel_is_told_how_to_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = FakeSession(faults={2: KeyboardInterrupt()})
    monkeypatch.setattr(session, "open_session", lambda *_, **__: stopped)
    with pytest.raises(Interrupted, match="1 of 3 cells are kept"):
        collect(PKTGEN, host="embedded", profile="smoke")


def test_steps_stand_in_the_cell_of_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    collecting.print_step("booting")
    assert capsys.readouterr().err == "  booting\n"
    monkeypatch.setattr("vringlab.campaign.progress.in_notebook", lambda: True)
    collecting.print_step("booting")
    assert capsys.readouterr().out == "  booting\n"


# A lab to look around in


def exchange(command: str, stdout: str, arm: str = "", **more: object) -> Exchange:
    return Exchange.model_validate(
        {"machine": "guest", "command": command, "stdout": stdout, "arm": arm, "seconds": 1, **more}
    )


@pytest.fixture
def transcript(own_settings: Settings) -> Path:
    document = Transcript(
        recorded="2026-01-02T03:04:05+00:00",
        vringlab="0",
        host_kind="emulated",
        experiment=VSOCK,
        arms=("queued", "direct"),
        steps={"boot": 1.5},
        provenance={},
        loads=(Load(arm="queued", module="m", build_id="aa", seconds=0.5),),
        exchanges=(
            exchange("id", "before\n"),
            exchange("id", "after\n", "queued"),
            exchange("seq 100", "\n".join(map(str, range(100)))),
            exchange("false", "", stderr="no\n", returncode=3),
        ),
    )
    path = own_settings.data / "recorded" / "host-and-guest" / "transcript.json"
    path.parent.mkdir(parents=True)
    path.write_text(document.model_dump_json())
    return path


def test_a_recorded_lab_answers_as_the_real_one_did(
    transcript: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = open_lab()
    assert "RECORDED on 2026-01-02: what a real emulated host" in repr(lab)
    assert "seconds" in lab.provisioning()
    lab.guest.run("id", "false")
    assert capsys.readouterr().out == "guest# id\nbefore\nguest# false\nno\n[exit status 3]\n"
    lab.load("queued")
    assert capsys.readouterr().out == "queued: m replaced in 0.5 s, build-id aa is loaded\n"
    assert lab.guest.output("id") == "after\n"
    lab.guest.run("seq 100")
    assert "[60 more lines]" in capsys.readouterr().out
    lab.close()
    lab.close()
    with open_lab(f"replay:{transcript}") as again:
        assert again.guest.output("id") == "before\n"


@pytest.mark.usefixtures("transcript")
def test_a_recorded_lab_refuses_what_was_not_recorded() -> None:
    lab = open_lab()
    with pytest.raises(UserError) as caught:
        lab.guest.run("uname")
    assert "host='embedded'" in caught.value.remedy
    assert "seq 100" in caught.value.remedy
    with pytest.raises(UserError, match="no answer of the host to: id"):
        lab.host.run("id")
    with pytest.raises(UserError, match="was not loaded"):
        lab.load("direct")
    with pytest.raises(UserError, match="no arm 'merged'"):
        lab.load("merged")


def test_a_damaged_or_missing_transcript_is_named(transcript: Path) -> None:
    document = json.loads(transcript.read_text())
    for text in ("{", json.dumps({**document, "format": 2}), json.dumps({**document, "x": 1})):
        transcript.write_text(text)
        with pytest.raises(UserError, match="no recorded session of this version"):
            open_lab()
    transcript.unlink()
    with pytest.raises(UserError, match="cannot read"):
        open_lab()
    with pytest.raises(UserError, match="unknown host 'kvm1'"):
        open_lab("kvm1")


def test_a_tour_is_what_a_notebook_asks_of_its_lab(tmp_path: Path) -> None:
    def cell(source: str) -> dict[str, object]:
        return {"cell_type": "code", "source": source.splitlines(keepends=True)}

    path = tmp_path / "a.ipynb"
    cells = [cell('lab.host.run("a", "b")\nlab.load("x"); lab.guest.run("c")'), cell("print(1)")]
    path.write_text(json.dumps({"cells": cells}))
    assert tour(path) == [("host", "a"), ("host", "b"), ("load", "x"), ("guest", "c")]
    path.write_text("{}")
    with pytest.raises(UserError, match="cannot read notebook"):
        tour(path)
