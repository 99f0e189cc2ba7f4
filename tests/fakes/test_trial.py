"""Patches made into experiments, of a run or lasting, on a toy base."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import yaml
from tests.fakes.test_stack import KERNEL, MAIN, Base
from typer.testing import CliRunner

from vringlab import cachedir, cli
from vringlab.analysis.claims import read_claims
from vringlab.campaign import experiment as experiments
from vringlab.campaign import scaffold, trial
from vringlab.campaign.experiment import OF_RUN
from vringlab.campaign.plan import make_plan
from vringlab.campaign.store import Store, own_files
from vringlab.errors import UserError
from vringlab.kernels import whole
from vringlab.kernels.patches import load_arm
from vringlab.kernels.series import read_series
from vringlab.settings import settings

TRIPLE = {"drivers/toy/toy_main.c": MAIN.replace("* 2", "* 3")}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Base:
    """A toy base in place of the image's kernel, and a collection that may be written to."""
    made = Base(tmp_path)
    (tmp_path / "collection" / "data" / "experiments").mkdir(parents=True)
    chosen = settings().model_copy(
        update={
            "root": tmp_path / "collection",
            "cache": made.cache,
            "runs": tmp_path / "runs",
        }
    )
    for module in ("kernels.buildroot", "kernels.source", "kernels.makefiles", "kernels.patches"):
        monkeypatch.setattr(f"vringlab.{module}.settings", lambda: chosen)
    for module in (
        "campaign.scaffold",
        "campaign.experiment",
        "campaign.store",
        "collect",
        "tryout",
    ):
        monkeypatch.setattr(f"vringlab.{module}.settings", lambda: chosen)
    image = SimpleNamespace(
        suite="trixie", release=KERNEL.release, version=KERNEL.version, digest="toy"
    )
    for user in (trial, scaffold):
        monkeypatch.setattr(user, "ensure_image", lambda **_: image)
    use(made, monkeypatch)
    return made


def use(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the toy base the one that is asked for."""
    found = whole.Base(base.root.kernel, base.root, None)
    for user in (trial, scaffold):
        monkeypatch.setattr(user, "prepare_base", lambda *_, **__: found)


def prepared(base: Base, *changes: dict[str, str], **options: object) -> trial.Trial:
    return trial.prepare(
        [base.series(*(changes or (TRIPLE,)))],
        ["pktgen-testpmd"],
        side="guest",
        **options,  # type: ignore[arg-type]  # whatever the test passes on
    )


def in_run(found: trial.Trial, folder: Path) -> Store:
    plan = make_plan(found.experiment, "smoke", 1)
    files = {OF_RUN: found.experiment.to_yaml(), **found.files}
    return Store.create(plan, folder / "runs", files=files)


def test_a_patch_becomes_an_experiment_of_stock_and_patched(base: Base) -> None:
    found = prepared(base)
    made = found.experiment
    assert made.arm_names == ("stock", "patched")
    assert (made.reference, made.module, made.side) == ("stock", "toy", "guest")
    assert made.name == "try-1-x-patch"
    assert made.probes is not None
    assert not isinstance(made.probes, str)
    assert [counter.function for counter in made.probes.counters] == ["scale"]
    assert made.probes.proof == {"stock": ("scale",), "patched": ("scale",)}
    plan = make_plan(made, "quick", 1)
    assert plan.twin == "stock.aa"
    assert len(plan.boots) == 4
    record = found.as_record()["patched"]
    assert (record["patches"], record["version"], record["modules"]) == (1, 1, ["toy"])
    json.dumps(record)


def test_it_lies_in_the_run_and_is_read_back_from_there(base: Base, tmp_path: Path) -> None:
    found = prepared(base)
    with in_run(found, tmp_path) as store:
        path = store.path
    again = experiments.of_run(path, found.experiment.name)
    assert again.model_dump() == found.experiment.model_dump()
    assert again.home == path
    arm = load_arm(again.patches_name, again.base_kernel, "patched", data=again.home)
    assert (arm.module, arm.side, arm.files) == ("toy", "guest", ("drivers/toy/toy_main.c",))
    arm.check_serves(KERNEL)
    stock = load_arm(again.patches_name, again.base_kernel, "stock.aa", data=again.home)
    assert stock.shipped
    assert set(own_files(path)) == {OF_RUN, *found.files}
    # An experiment of the collection has nothing of its own in its run.
    assert own_files(tmp_path) == ()


def test_several_series_are_arms_of_one_run(base: Base, tmp_path: Path) -> None:
    first = base.series(TRIPLE, name="triple.patch")
    fourfold = {
        "drivers/toy/toy_main.c": MAIN.replace("* 2", "* 4"),
        "drivers/toy/toy-alone.c": "int a;\n",
    }
    second = base.series(fourfold, name="fourfold.patch")
    found = trial.prepare([first, second], ["netperf"], side="guest")
    assert found.experiment.arm_names == ("stock", "1-triple", "1-fourfold")
    with in_run(found, tmp_path) as store:
        home = store.path
    # What one arm replaces, every arm must, or it would run with the other's.
    for arm in found.experiment.arm_names:
        loaded = load_arm(found.experiment.name, "debian:6.12", arm, data=home)
        assert loaded.modules == ("toy", "toy_alone")


def test_versions_of_one_series_are_named_so(base: Base) -> None:
    path = base.folder / "v.patch"
    found = []
    for version in (1, 2):
        text = base.series(TRIPLE).patches[0].diff
        path.write_text(
            f"From: a@b\nSubject: [PATCH v{version}] x\nMessage-ID: <{version}@x>\n\n{text}"
        )
        found.append(read_series(str(path)))
    made = trial.prepare(found, ["netperf"], side="guest")
    assert made.experiment.arm_names == ("stock", "v1", "v2")
    assert made.experiment.seed.message_id == "1@x"


def test_a_series_keeps_its_patches_apart_and_in_order(base: Base, tmp_path: Path) -> None:
    second = {"drivers/toy/toy_main.c": MAIN.replace("* 2", "* 4"), "Documentation/toy.rst": "T\n"}
    found = prepared(base, TRIPLE, second)
    names = [Path(name).name for name in found.files if "/patched/" in name]
    assert [name[:5] for name in names] == ["0001-", "0002-"]
    with in_run(found, tmp_path) as store:
        arm = load_arm(found.experiment.name, "debian:6.12", "patched", data=store.path)
    assert len(arm.patches) == 2
    assert "left out" in arm.patches[1].note
    assert any("Documentation/toy.rst" in note for note in found.notes)


def test_parameters_are_checked_before_anything_is_built(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(**_: object) -> None:
        raise AssertionError("the image was asked for")

    series = base.series(TRIPLE)
    monkeypatch.setattr(trial, "ensure_image", never)
    with pytest.raises(UserError, match="unknown parameter 'rings'"):
        trial.prepare([series], ["pktgen-testpmd"], params={"rings": ["split"]})
    with pytest.raises(UserError, match="unknown workload"):
        trial.prepare([series], ["pktgen"])
    with pytest.raises(UserError, match="nothing to try"):
        trial.prepare([], ["netperf"])
    with pytest.raises(UserError, match="does not name a base kernel") as caught:
        trial.prepare([series], ["netperf"], base="6.12")
    assert "debian:6.12" in caught.value.remedy
    for name in ("My Patch", "x" * 41, "-"):
        with pytest.raises(UserError, match="cannot be an experiment's name"):
            trial.prepare([series], ["netperf"], name=name)


def test_a_misfit_names_the_closest_base_that_takes_it(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    series = base.series(TRIPLE)
    text = MAIN.replace("value * 2", "value << 1")
    other = Base(base.folder / "other", {**base.files, "drivers/toy/toy_main.c": text})
    use(other, monkeypatch)
    with pytest.raises(UserError, match="does not apply") as caught:
        trial.prepare([series], ["netperf"], side="guest")
    assert "no other base's source is here" in caught.value.remedy
    older = replace(base.root, kernel=replace(KERNEL, spec="debian:6.1", version="6.1.192-3"))
    monkeypatch.setattr(trial, "cached_roots", lambda: (older,))
    with pytest.raises(UserError, match="does not apply") as caught:
        trial.prepare([series], ["netperf"], side="guest")
    assert "the closest base that takes it is debian:6.1 (6.1.192-3)" in caught.value.remedy
    lost = {name: text for name, text in base.files.items() if "toy_main" not in text + name}
    use(
        Base(base.folder / "lost", {**lost, "drivers/toy/Makefile": "obj-m += always.o\n"}),
        monkeypatch,
    )
    told: list[str] = []
    with pytest.raises(UserError, match="no Makefile of this base names") as caught:
        trial.prepare([series], ["netperf"], side="guest", on_step=told.append)
    assert "the closest base that takes it is debian:6.1 (6.1.192-3)" in caught.value.remedy
    assert told[-1] == "asking debian:6.1 whether it takes the patch"


def test_the_port_that_serves_the_base_is_tried(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = base.series(TRIPLE).patches[0].diff
    ports = base.folder / "ports"
    ports.mkdir()
    for name, serves, diff in (
        ("a.patch", "6.1 <= version < 6.2", text.replace("value * 2", "value + 2")),
        ("b.patch", "6.12 <= version < 6.13", text),
    ):
        (ports / name).write_text(f"Title: triple\nServes: {serves}\n\n{diff}")
    found = trial.prepare([read_series(str(ports))], ["netperf"], side="guest")
    assert "patch 1 of 1" in found.files["patches/try-triple/debian-6.12/patched.patch"]
    assert any("of 2 ports, that for 6.12 <= version < 6.13" in note for note in found.notes)
    later = replace(base.root, kernel=replace(KERNEL, spec="debian:7.x", version="7.3.4-1"))
    monkeypatch.setattr(
        trial, "prepare_base", lambda *_, **__: whole.Base(later.kernel, later, None)
    )
    with pytest.raises(UserError, match=r"no port to linux 7\.3\.4-1"):
        trial.prepare([read_series(str(ports))], ["netperf"], side="guest")


def test_modules_under_a_running_guest_take_a_boot_for_each_arm(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        **base.files,
        "drivers/toy/Makefile": "obj-m += vhost.o\n",
        "drivers/toy/vhost.c": "int v;\n",
    }
    other = Base(base.folder / "vhost", files)
    series = other.series({"drivers/toy/vhost.c": "int w;\n"})
    use(other, monkeypatch)
    found = trial.prepare([series], ["netperf"])
    assert found.experiment.side == "host"
    assert found.needs_reboot


def test_what_reaches_beyond_modules_is_compared_as_whole_kernels(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = {"drivers/toy/core.c": base.files["drivers/toy/core.c"].replace("return 3", "return 4")}
    series = base.series(core)
    with pytest.raises(UserError, match="beyond modules") as caught:
        trial.prepare([series], ["netperf"])
    assert "--build full" in caught.value.remedy
    source = base.folder / "linux-source-6.12"
    (source / "Makefile").write_text("VERSION = 6\nPATCHLEVEL = 12\nSUBLEVEL = 118\n")
    chosen = settings().model_copy(update={"cache": base.cache})
    monkeypatch.setattr(whole, "settings", lambda: chosen)
    monkeypatch.setattr(cachedir, "require_space", lambda *_: None)
    monkeypatch.setattr(trial, "source_of", lambda *_, **__: (f"tree:{source}", source))
    found = trial.prepare([series], ["netperf"], whole=True)
    made = found.experiment
    assert found.needs_reboot
    assert made.must_reboot
    assert made.base_of("stock") == f"tree:{source}"
    patched = Path(made.base_of("patched").removeprefix("tree:"))
    assert "return 4" in (patched / "drivers/toy/core.c").read_text()
    assert "return 3" in (source / "drivers/toy/core.c").read_text()
    assert made.probes is not None
    assert not isinstance(made.probes, str)
    assert [(c.function, c.module) for c in made.probes.counters] == [("core", None)]
    # The same patch on the same source is one tree, and so one build.
    assert trial.prepare([series], ["netperf"], whole=True).experiment == made
    misfit = {"drivers/toy/core.c": "int other;\n"}
    other = Base(base.folder / "other", {**base.files, "drivers/toy/core.c": "int before;\n"})
    with pytest.raises(UserError, match="does not apply to this base"):
        trial.prepare([other.series(misfit)], ["netperf"], whole=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("virtio-net: free old xmit skbs only in NAPI", "virtio-net-free-old-xmit-skbs-only-in"),
        ("***", "patch"),
        ("x" * 60, "x" * 40),
        ("Ümlaut", "mlaut"),
    ],
)
def test_titles_become_names(text: str, expected: str) -> None:
    assert trial.slug(text) == expected
    assert trial.slug(text) == trial.slug(trial.slug(text))


# --- the command line -----------------------------------------------------------------------


def run_cli(*arguments: str) -> tuple[int, str, BaseException | None]:
    done = CliRunner().invoke(cli.app, list(arguments))
    return done.exit_code, done.output, done.exception


def test_a_dry_run_shows_what_was_understood_and_makes_no_run(base: Base) -> None:
    base.series(TRIPLE)
    patch = str(base.folder / "patches" / "1-x.patch")
    code, printed, error = run_cli(
        "try", patch, "--workload", "netperf", "--side", "guest", "--dry-run", "-p", "vcpus=1"
    )
    assert code == 0, error
    assert "builds toy, on the guest's side" in printed
    assert "counted to prove its path: scale" in printed
    assert "vcpus=1" in printed
    # Four boots of stock, its twin and the patch.
    assert "12 cells" in printed
    assert not (base.folder / "runs").exists()


def test_what_is_missing_on_the_command_line_is_named(base: Base) -> None:
    base.series(TRIPLE)
    patch = str(base.folder / "patches" / "1-x.patch")
    _, _, error = run_cli("try", patch)
    assert isinstance(error, UserError)
    assert "netperf" in error.remedy
    _, _, error = run_cli("try", patch, "-w", "netperf", "--side", "guest", "--host", "moon")
    assert isinstance(error, UserError)
    assert not (base.folder / "runs").exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--tune"], "--tune is for a host of your own"),
        (["--swap-host-module"], "--swap-host-module is for a host of your own"),
        (["--need", "quiet"], "quiet"),
        (["--hosts", "no-hosts.yaml"], r"no-hosts\.yaml"),
    ],
)
def test_hosts_are_named_as_for_any_run(base: Base, options: list[str], match: str) -> None:
    base.series(TRIPLE)
    patch = str(base.folder / "patches" / "1-x.patch")
    _, _, error = run_cli("try", patch, "-w", "netperf", "--side", "guest", *options)
    assert isinstance(error, UserError)
    assert re.search(match, error.message)
    assert error.remedy
    assert not (base.folder / "runs").exists()


def test_modules_of_a_users_host_need_leave_before_a_run_is_made(base: Base) -> None:
    base.series(TRIPLE)
    patch = str(base.folder / "patches" / "1-x.patch")
    _, _, error = run_cli("try", patch, "-w", "netperf", "--side", "host", "--host", "ssh://kvm1")
    assert isinstance(error, UserError)
    assert "--swap-host-module" in error.remedy
    assert not (base.folder / "runs").exists()


def test_help_shows_addresses_whole() -> None:
    # Brackets are markup in help texts, and long words are cut off in narrow columns.
    assert "ssh://[user@]host[:port]" in run_cli("doctor", "--help")[1]
    assert "ssh://HOST" in run_cli("run", "--help")[1]


# --- lasting experiments --------------------------------------------------------------------


def test_new_writes_an_experiment_that_is_whole(base: Base) -> None:
    base.series(TRIPLE)
    patch = str(base.folder / "patches" / "1-x.patch")
    written = scaffold.write("toy-triple", patch=patch, workloads=["netperf"], side="guest")
    root = base.folder / "collection"
    assert {path.relative_to(root).as_posix() for path in written} == {
        "data/experiments/toy-triple.yaml",
        "data/claims/toy-triple.yaml",
        "data/patches/toy-triple/debian-6.12/stock.patch",
        "data/patches/toy-triple/debian-6.12/patched.patch",
        "notebooks/70_toy_triple.ipynb",
    }
    made = experiments.load_file(root / "data/experiments/toy-triple.yaml")
    assert made.arm_names == ("stock", "patched")
    assert made.seed.date <= date.today()
    arm = load_arm("toy-triple", "debian:6.12", "patched", data=root / "data")
    assert str(arm.patches[0].serves) == "6.12.118 <= version < 6.13"
    claims = root / "data/claims/toy-triple.yaml"
    assert read_claims(claims) == []
    # The form in its comments makes a claim once it is in place.
    text = claims.read_text()
    form = text[text.index("# publications:") :].replace("# ", "")
    claims.write_text(text.replace("publications: []\n", "") + form)
    (claim,) = read_claims(claims)
    assert (claim.status, claim.arms, claim.stated_change) == (
        "standing",
        ("stock", "patched"),
        0.1,
    )
    # What there is to choose is written out.
    assert made.workloads[0].matrix["direction"] == ["guest-rx"]
    assert make_plan(made, "quick", 1).cells[0].params["vcpus"] == 2
    notebook = nbformat.read(root / "notebooks/70_toy_triple.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    assert len(tagged) == 1


def test_new_without_a_patch_leaves_a_place_for_it(base: Base) -> None:
    scaffold.write("vn-idea", module="virtio_net", workloads=["pktgen-testpmd"])
    data = base.folder / "collection" / "data"
    arm = load_arm("vn-idea", "debian:6.12", "patched", data=data)
    assert arm.shipped
    assert yaml.safe_load((data / "experiments/vn-idea.yaml").read_text())["side"] == "guest"
    # Of a module that is not in the table the base's own Makefiles know.
    scaffold.write("toy-idea", module="toy-alone", workloads=["netperf"], side="guest")
    assert experiments.load_file(data / "experiments/toy-idea.yaml").module == "toy_alone"


def test_new_never_overwrites(base: Base) -> None:
    scaffold.write("once", module="virtio_net", workloads=["netperf"])
    before = {p: p.read_bytes() for p in base.folder.rglob("*once*") if p.is_file()}
    with pytest.raises(UserError, match="there already") as caught:
        scaffold.write("once", module="virtio_net", workloads=["netperf"])
    assert "data/experiments/once.yaml" in caught.value.message
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("No Name", {"module": "virtio_net", "workloads": ["netperf"]}, "cannot be"),
        ("x", {"workloads": ["netperf"]}, "patch, or the module"),
        ("x", {"module": "virtio_net"}, "what shall measure"),
        ("x", {"module": "toy", "workloads": ["netperf"]}, "not known"),
        ("x", {"module": "toys", "workloads": ["netperf"], "side": "guest"}, "no module 'toys'"),
        ("x", {"module": "virtio_net", "workloads": ["netper"]}, "unknown workload"),
        ("x", {"module": "virtio_net", "workloads": ["netperf"], "base": "x"}, "not name a base"),
    ],
)
def test_new_refuses_what_is_half_said(
    base: Base, name: str, options: dict[str, object], match: str
) -> None:
    with pytest.raises(UserError, match=match):
        scaffold.write(name, **options)  # type: ignore[arg-type]  # whatever the case says
    assert not list((base.folder / "collection").rglob("x*"))
