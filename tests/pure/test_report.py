"""Tables, the text for a mail, the page and exports: what they say, in every shape of a run."""

from __future__ import annotations

import io
import json
import re
import zipfile
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from tests.fakes.fake_runs import (
    NET,
    SHAPES,
    VSOCK,
    as_measured,
    loaded,
    make_run,
    with_samples,
)

from vringlab.analysis.frames import RunFrames, load_run
from vringlab.analysis.stats import Interval
from vringlab.errors import InfrastructureError, UserError
from vringlab.report.export import export_crate, export_tables
from vringlab.report.html import command_again, is_measured, judged, render, write_report
from vringlab.report.mail import COLUMNS, ascii_text, configuration, mail_text
from vringlab.report.summary import (
    HEADLINE,
    amount,
    arm_order,
    change_text,
    count,
    heading,
    reason_kinds,
    span,
    summarise,
)
from vringlab.report.tables import EMPTY, aligned, arm_table

#: Elements that never have an end tag.
_VOID = {"meta", "br", "hr", "img", "link", "input"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFrames]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: loaded(folder, name) for name in (VSOCK, NET)}


@pytest.fixture(scope="module")
def vsock(runs: dict[str, RunFrames]) -> RunFrames:
    return runs[VSOCK]


@pytest.fixture(scope="module")
def net(runs: dict[str, RunFrames]) -> RunFrames:
    return runs[NET]


@pytest.fixture(scope="module")
def pages(runs: dict[str, RunFrames]) -> dict[str, str]:
    return {name: render(run) for name, run in runs.items()}


class Outline(HTMLParser):
    """Checks that tags are nested well; collects names, addresses and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.addresses: list[tuple[str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        self._attributes(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._attributes(tag, attrs)

    def _attributes(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.names.append(value or "")
            if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
                self.addresses.append((tag, value or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without a start"
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text.append(data)


def outline(page: str) -> Outline:
    found = Outline()
    found.feed(page)
    found.close()
    assert found.open == []
    return found


def words(page: str) -> str:
    return re.sub(r"\s+", " ", " ".join(outline(page).text))


def printed(table: object, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


# Words


def test_figures_have_three_digits_and_one_unit() -> None:
    assert amount(1.1e6, "ns") == "1.10 ms"
    assert amount(594274, "1/s", "pps_tx") == "594 kpps"
    assert amount(20200, "1/s", "tx_interrupts") == "20.2 k/s"
    assert amount(0.0, "1/s", "kicks") == "0 /s"
    assert span(Interval(492959, 1034567), "1/s", "pps_tx") == "[0.493, 1.03] Mpps"
    assert span(Interval(100, 900), "ns") == "[100, 900] ns"
    assert span(Interval(), "ns") == ""
    assert span(Interval(1, 1e9), "ns") == "[over x1000 wide]"


@pytest.mark.parametrize("unit", ["ns", "1/s", "bit/s", "byte", "percent", "furlongs"])
@pytest.mark.parametrize("value", [0.0, 0.001, 1.0, 99.96, 999.6, 1e6, 1e15])
def test_any_figure_has_words(value: float, unit: str) -> None:
    assert "e+" not in amount(value, unit) or value > 1e12
    assert span(Interval(value / 2, value * 2), unit) or value == 0


def test_changes_are_readable_at_any_size() -> None:
    assert change_text(1.628) == "+62.8 %"
    assert change_text(0.38) == "-62.0 %"
    assert change_text(0.0123) == "-98.77 %"
    assert change_text(25.04) == "x25"
    assert change_text(1e12) == ">x1000"
    assert change_text(1e-9) == "<-99.9 %"


def test_reasons_that_differ_in_figures_are_told_once() -> None:
    found = reason_kinds({"12 short reads of 64": 3, "7 short reads of 64": 1, "timeout": 2})
    assert found == {"such as: 12 short reads of 64": 4, "timeout": 2}


def test_counts() -> None:
    assert (count(1, "boot"), count(0, "boot"), count(2, "boot")) == (
        "1 boot",
        "0 boots",
        "2 boots",
    )


# Table


def test_reference_comes_first_then_its_twin(net: RunFrames) -> None:
    assert arm_order(net) == ("stock", "stock.aa", "rfc", "merged")
    lines = arm_table(net).sections[0].lines
    assert [line.arm for line in lines[:4]] == ["stock", "stock.aa", "rfc", "merged"]
    assert lines[0].change == ""


def test_points_are_in_the_order_of_the_experiment(
    tmp_path: Path, runs: dict[str, RunFrames]
) -> None:
    whole = loaded(tmp_path, NET, whole=True)
    points = [section.point for section in arm_table(whole).sections]
    places = [re.findall("(split|packed|same|other)", point) for point in points]
    assert places == [
        ["split", "same"],
        ["split", "other"],
        ["packed", "same"],
        ["packed", "other"],
    ]
    # Also where no such experiment is known here.
    assert len(arm_table(runs[NET]).sections) == 2


def test_the_table_has_stock_and_patched_rates_with_intervals_and_interrupts(
    net: RunFrames,
) -> None:
    text = arm_table(as_measured(net)).text()
    for metric in ("pps_tx", "pps_rx", "tx_interrupts"):
        assert metric in text
    assert re.search(r"merged +\S+ [kM]pps +\[\S+, \S+\] [kM]pps +4 +\+\d", text)
    assert "emulated host" in text
    assert "SIMULATED" not in text


def test_the_table_has_valid_round_trips_and_the_invalid_ones_with_their_reason(
    vsock: RunFrames,
) -> None:
    table = arm_table(vsock)
    text = table.text()
    assert re.search(r"direct +\S+ [µm]s +\[", text)
    assert "all 16 samples invalid (queued 4, queued.aa 4, rfc-v1 4, direct 4): simulated" in text
    assert "not to be used" in text
    invalid = [line for part in table.sections for line in part.lines if not line.row.valid]
    # Three metrics of nothing say no more than one.
    assert len(invalid) == 4
    assert {(line.figure, line.interval, line.n) for line in invalid} == {
        ("-", "all invalid", "0+4")
    }


def test_ratio_is_that_of_the_analysis(net: RunFrames) -> None:
    frame = arm_table(net).frame()
    row = frame[(frame["arm"] == "merged") & (frame["metric"] == "pps_tx")].iloc[0]
    samples = net.samples[net.samples["metric"] == "pps_tx"]
    samples = samples[samples["param_irq"] == row["param_irq"]]
    wide = samples.assign(log=np.log(samples["value"])).pivot_table(
        index=["boot", "block"], columns="arm", values="log"
    )
    boots = (wide["merged"] - wide["stock"]).groupby("boot").mean()
    assert row["ratio"] == pytest.approx(np.exp(boots.mean()))
    assert row["ratio_low"] < row["ratio"] < row["ratio_high"]


@pytest.mark.parametrize("width", [40, 72, 80, 100, 200])
def test_the_terminal_shows_every_figure_at_any_width(net: RunFrames, width: int) -> None:
    text = printed(arm_table(net), width)
    assert all(len(line) <= width for line in text.splitlines())
    if width >= 72:
        for line in arm_table(net).sections[0].lines:
            assert line.figure in text
            assert line.change in text
        assert "…" not in text


def test_markdown_has_a_row_for_each_arm(net: RunFrames) -> None:
    table = arm_table(net)
    rows = [line for line in table.markdown().splitlines() if line.startswith("| ")]
    heads = len(table.sections)
    assert len(rows) == heads + sum(len(part.lines) for part in table.sections)
    assert {line.count("|") for line in rows} == {7}


def test_metrics_can_be_chosen(vsock: RunFrames) -> None:
    table = arm_table(vsock, ["rtt_p50"])
    assert {line.metric for part in table.sections for line in part.lines} == {"rtt_p50"}


def test_columns_are_aligned() -> None:
    assert aligned([("a", "1"), ("bbb", "22")], right=(1,)) == ["  a     1", "  bbb  22"]


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("name", [VSOCK, NET])
def test_every_shape_has_a_table_and_a_text_for_a_mail(
    runs: dict[str, RunFrames], name: str, shape: str
) -> None:
    bent = with_samples(runs[name], SHAPES[shape])
    table = arm_table(bent)
    for text in (table.text(), table.markdown(), printed(table)):
        assert bent.plan.experiment in text
        assert not re.search(r"\b(nan|inf)\b", text)
    mail = mail_text(bent)
    assert mail.isascii()
    assert max(map(len, mail.splitlines())) <= COLUMNS
    assert "Traceback" not in mail


def test_statements_where_there_is_nothing_to_compare(net: RunFrames) -> None:
    assert EMPTY in arm_table(with_samples(net, SHAPES["no samples"])).text()
    assert "every sample is invalid" in arm_table(with_samples(net, SHAPES["all invalid"])).text()
    assert arm_table(net).statement == ""
    missing = with_samples(net, SHAPES["one arm missing"])
    arm = net.samples["arm"].iloc[-1]
    assert f"No sample of {arm} yet." in arm_table(missing).text()
    single = arm_table(with_samples(net, SHAPES["one block"])).text()
    assert "[1 boot: none]" in single
    assert "[n=1]" in single


def test_one_boot_is_marked_and_never_starred(net: RunFrames) -> None:
    table = arm_table(with_samples(net, SHAPES["one boot"]))
    assert "(1 boot)" in table.text()
    assert not any(" *" in line.change for part in table.sections for line in part.lines)
    assert "holds for that boot alone" in table.legend


def test_mixed_units_are_a_problem_and_no_figure(net: RunFrames) -> None:
    summary = summarise(with_samples(net, SHAPES["mixed units"]))
    assert all(row.level is None for row in summary.rows)
    assert all("mixed units" in row.problem for row in summary.rows)


def test_simulated_runs_say_so(net: RunFrames) -> None:
    assert "SIMULATED, no measurement" in heading(net)
    for text in (arm_table(net).text(), mail_text(net), render(net)):
        assert "SIMULATED" in text


# Mail


def test_a_mail_has_what_a_reviewer_asks_for(net: RunFrames) -> None:
    text = mail_text(as_measured(net))
    for wanted in ("Host:", "Guest:", "Arms:", "n:", "debian:6.12", "stock (reference)", "pps_tx"):
        assert wanted in text, wanted
    assert "Verdicts on the published figures:" in text
    assert "randomised blocks of 2 boots" in text
    command = text.partition("Again:\n")[2].replace("\\\n", "")
    again = "vringlab run virtio-net-napi-tx --profile quick --seed 7 -p ring=split"
    assert " ".join(command.split()).startswith(again)
    assert re.search(r"merged +\S+ [kM]pps \[\S+, \S+\] [kM]pps +n=4", text)


def test_a_mail_names_what_is_known_of_the_machine(net: RunFrames) -> None:
    known: dict[str, Any] = {
        **net.provenance,
        "host": {
            "accelerator": {"name": "tcg"},
            "kernel": {"release": "6.12.1"},
            "halt_poll_ns": 200000,
            "cpu": {"model": "QEMU"},
            "outer": {"cpu": {"model": "EPYC 9", "microcode": "0x1", "governor": "performance"}},
        },
        "tools": {"qemu-system-x86": "1:10.0"},
        "guest": {"spec": {"vcpus": 2, "memory_mib": 1024}},
        "settings": {"switch": "reboot"},
    }
    said = dict(configuration(summarise(replace(as_measured(net), provenance=known))))
    assert said["Host"] == (
        "emulated (tcg), EPYC 9, microcode 0x1, governor performance, Linux 6.12.1, "
        "halt_poll_ns 200000, QEMU 1:10.0"
    )
    assert "2 vCPUs, 1024 MiB" in said["Guest"]
    assert "booted afresh for each arm" in said["Module"]
    assert "QEMU" not in dict(configuration(summarise(net)))["Host"]


def test_letters_beyond_ascii_have_a_stand_in() -> None:
    assert ascii_text("1.2 µs → Jürgen, 3 \u00d7 \u4e2d") == "1.2 us -> Jurgen, 3 x ?"


def test_a_very_long_word_is_cut_at_72_columns(net: RunFrames) -> None:
    def long(samples: pd.DataFrame) -> pd.DataFrame:
        return samples.assign(valid=False, reason="x" * 300)

    text = mail_text(with_samples(net, long))
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert text.count("x") >= 300


def test_percent_signs_stay_with_their_numbers(vsock: RunFrames, net: RunFrames) -> None:
    for run in (vsock, net):
        assert not re.search(r"^\s*%", mail_text(run), flags=re.MULTILINE)


# Page


def test_a_page_is_well_formed_and_names_are_unique(pages: dict[str, str]) -> None:
    for page in pages.values():
        found = outline(page)
        assert len(found.names) == len(set(found.names))
        # Every reference inside the page leads somewhere.
        used = {a[1:] for _, a in found.addresses if a.startswith("#")}
        used |= set(re.findall(r"url\(#([^)]+)\)", page))
        assert used <= set(found.names)


def test_a_page_fetches_nothing(pages: dict[str, str]) -> None:
    for page in pages.values():
        outside = [(t, a) for t, a in outline(page).addresses if not a.startswith("#")]
        # Links to the mails; a browser follows them only when told.
        assert {tag for tag, _ in outside} <= {"a"}
        assert not re.search(r"@import|url\((?!#)|<script|<link|<iframe", page)


def test_figures_take_the_colours_of_the_page(pages: dict[str, str]) -> None:
    for page in pages.values():
        pictures = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
        assert "var(--ink)" in pictures
        assert "var(--c0)" in pictures
        for token in ("#010203", "#5b5c5d", "#dcddde", "#fefeff", "#0072b2"):
            assert token not in pictures
        # Every variable that is used is defined, in light and in dark.
        for name in set(re.findall(r"var\((--[\w-]+)\)", page)):
            assert page.count(f"{name}:") >= 2, name


def test_every_figure_is_there_wide_and_narrow_with_a_description(pages: dict[str, str]) -> None:
    for page in pages.values():
        wide = re.findall(r'<svg class="wide" role="img" aria-label="([^"]+)"', page)
        narrow = re.findall(r'<svg class="narrow" role="img" aria-label="([^"]+)"', page)
        assert wide == narrow
        assert len(wide) >= 4
        assert all("debian:6.12" in label for label in wide)


def test_a_page_has_verdicts_figures_table_time_command_and_provenance(
    pages: dict[str, str],
) -> None:
    text = words(pages[NET])
    for wanted in (
        "Verdicts",
        "published figures",
        "Figures by arm",
        "went to measuring",
        "vringlab run virtio-net-napi-tx --profile quick --seed 7 -p ring=split",
        "Provenance",
        "Not recorded",
        "SIMULATED: every figure is a random number",
    ):
        assert wanted in text, wanted
    assert "simulated short reads" in words(pages[VSOCK])


def test_a_page_shows_the_verdict_of_each_measured_claim(net: RunFrames) -> None:
    verdicts, problem = judged(net)
    assert problem == ""
    measured = [verdict for claim, verdict in verdicts if is_measured(claim, net)]
    others = len(verdicts) - len(measured)
    assert measured
    assert others
    page = render(net)
    assert page.count('<article class="verdict">') == len(measured)
    assert f"{others} published figures of this experiment" in page


def test_claims_of_another_point_are_not_measured(net: RunFrames) -> None:
    verdicts, _ = judged(net)
    split = [claim for claim, _ in verdicts if claim.params.get("ring") == "split"]
    packed = [claim for claim, _ in verdicts if claim.params.get("ring") == "packed"]
    assert all(is_measured(claim, net) for claim in split if claim.metric == "pps_tx")
    assert not any(is_measured(claim, net) for claim in packed)
    missing = with_samples(net, lambda s: s[s["arm"] != "merged"])
    assert not any(is_measured(c, missing) for c in split if c.arms[1] == "merged")


def test_text_of_the_run_cannot_become_markup(net: RunFrames) -> None:
    def evil(samples: pd.DataFrame) -> pd.DataFrame:
        bad = samples["block"] == samples["block"].max()
        reason = '<script>alert(1)</script> & "quotes"'
        return samples.assign(valid=~bad, reason=np.where(bad, reason, ""))

    page = render(with_samples(net, evil))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    outline(page)


@pytest.mark.parametrize("shape", ["no samples", "all invalid", "no figures", "one block", "wild"])
@pytest.mark.parametrize("name", [VSOCK, NET])
def test_every_shape_has_a_page(runs: dict[str, RunFrames], name: str, shape: str) -> None:
    page = render(with_samples(runs[name], SHAPES[shape]))
    text = words(page)
    assert not re.search(r"\b(nan|inf)\b", text)
    if shape in ("no samples", "all invalid", "no figures"):
        assert "No sample was measured" in text or "very sample is invalid" in text


def test_folders_of_the_owner_are_not_published(net: RunFrames) -> None:
    known = {
        **net.provenance,
        "settings": {"root": "/home/ada/vringlab", "cache": "/home/ada/.cache", "accel": "auto"},
        "host": {"qemu_argv": ["qemu", "-kernel", "/home/ada/.cache/vmlinuz"]},
        "command": ["/home/ada/vringlab/.venv/bin/vringlab", "run", "x"],
    }
    page = render(replace(net, provenance=known))
    assert "/home/ada" not in page
    assert "CACHE/vmlinuz" in page


def test_an_odd_provenance_is_shown_as_it_is(net: RunFrames) -> None:
    run = net.provenance["run"]
    for odd in ({"run": run}, {"run": run, "git": "none", "settings": None, "command": "x y"}):
        assert "<h2>Provenance</h2>" in render(replace(net, provenance=odd))


def test_the_command_has_the_seed_and_what_was_overridden(net: RunFrames) -> None:
    assert command_again(net).endswith("--profile quick --seed 7 -p ring=split")
    other = replace(net, provenance={**net.provenance, "settings": {"switch": "reboot"}})
    assert command_again(other).endswith("--switch reboot")


def test_report_is_written_beside_the_run_or_where_told(tmp_path: Path) -> None:
    path = make_run(tmp_path, NET, "smoke")
    assert write_report(path) == path / "report.html"
    assert (path / "report.html").read_text().startswith("<!DOCTYPE html>")
    out = tmp_path / "elsewhere.html"
    assert write_report(path, out) == out
    assert out.read_bytes() == (path / "report.html").read_bytes()
    with pytest.raises(InfrastructureError) as caught:
        write_report(path, tmp_path / "nowhere" / "report.html")
    assert caught.value.remedy


def test_runs_that_cannot_be_read_are_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        write_report(tmp_path / "none")
    path = make_run(tmp_path, NET, "smoke")
    document = json.loads((path / "plan.json").read_text())
    (path / "plan.json").write_text(json.dumps({**document, "format": 99}))
    with pytest.raises(UserError, match="format 99"):
        write_report(path)


def test_a_killed_run_has_a_page_that_says_how_far_it_got(tmp_path: Path) -> None:
    path = make_run(tmp_path, NET, "smoke")
    cells = sorted((path / "cells").iterdir())
    for cell in cells[1:]:
        for file in cell.iterdir():
            file.unlink()
        cell.rmdir()
    (path / "samples.parquet").unlink()
    (path / "histograms.parquet").unlink()
    text = words(write_report(path).read_text())
    assert f"1 of {len(cells)} planned samples are there" in text


# Export


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_are_exported_tidy(vsock: RunFrames, tmp_path: Path, kind: Any) -> None:
    paths = {path.stem: path for path in export_tables(vsock, tmp_path / "new", kind)}
    assert set(paths) == {"samples", "histograms", "arms", "verdicts", "provenance"}
    read = pd.read_csv if kind == "csv" else pd.read_parquet
    samples = read(paths["samples"])
    assert len(samples) == len(vsock.samples)
    assert samples["value"].sum() == pytest.approx(vsock.samples["value"].sum())
    arms = read(paths["arms"])
    assert set(arms["metric"]) <= set(HEADLINE)
    assert {"figure", "low", "high", "ratio", "ratio_low", "ratio_high", "reasons"} <= set(arms)
    assert set(read(paths["verdicts"])["claim"])


def test_an_unknown_format_is_refused(net: RunFrames, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="xlsx"):
        export_tables(net, tmp_path, "xlsx")  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("shape", list(SHAPES))
def test_every_shape_is_exported(net: RunFrames, tmp_path: Path, shape: str) -> None:
    assert len(export_tables(with_samples(net, SHAPES[shape]), tmp_path)) == 5


def test_a_crate_describes_itself_and_can_be_read_again(tmp_path: Path) -> None:
    path = make_run(tmp_path / "runs", VSOCK, "smoke")
    crate = export_crate(path, tmp_path / "out" / "crate")
    graph = json.loads((crate / "ro-crate-metadata.json").read_text())["@graph"]
    entities = {entity["@id"]: entity for entity in graph}
    root = entities["./"]
    assert root["license"]["@id"].startswith("https://")
    assert "SIMULATED" in root["description"]
    assert entities["#measurement"]["@type"] == "CreateAction"
    assert entities["#arm-queued"]["identifier"]
    files = [item["@id"] for item in root["hasPart"]]
    on_disk = [p for p in crate.rglob("*") if p.is_file() and p.name != "ro-crate-metadata.json"]
    assert len(files) == len(on_disk)
    assert {"report.html", "mail.txt", "samples.parquet", "bundle.json"} <= set(files)
    again = load_run(crate)
    assert len(again.samples) == len(load_run(path).samples)
    assert not list((tmp_path / "out").glob(".new-*"))


def test_a_crate_can_be_a_zip(tmp_path: Path) -> None:
    path = make_run(tmp_path / "runs", NET, "smoke")
    out = export_crate(path, tmp_path / "run.zip", licence="https://example.org/licence")
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
        graph = json.loads(archive.read("ro-crate-metadata.json"))["@graph"]
        root = next(entity for entity in graph if entity["@id"] == "./")
        assert root["license"]["@id"] == "https://example.org/licence"
        assert "figures/packets.svg" in archive.namelist()


def test_a_crate_never_replaces_anything(tmp_path: Path) -> None:
    path = make_run(tmp_path / "runs", NET, "smoke")
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="exists"):
        export_crate(path, tmp_path / "there")
