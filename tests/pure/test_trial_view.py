"""What is said of a patch of which nothing was published, in words, mails, pages and commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.fake_runs import NET, SHAPES, loaded, with_samples

from vringlab.analysis.frames import RunFrames, load_run
from vringlab.analysis.pairing import PARAM
from vringlab.report import trial_view
from vringlab.report.html import command_again, render
from vringlab.report.mail import mail_text
from vringlab.settings import settings

MESSAGE_ID = "20250218023908.1755-1-jasowang@redhat.com"


@pytest.fixture(scope="module")
def recorded() -> RunFrames:
    """A patch that was tried on the embedded host."""
    return load_run(settings().data / "recorded" / "try-napi-tx")


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> RunFrames:
    """A simulated run, as if its patches had been tried."""
    run = loaded(tmp_path_factory.mktemp("runs"), NET)
    series = {"title": "x", "version": 2, "patches": 3, "message_id": "", "kind": "patch"}
    tried = {arm: {**series, "source": f"/home/ada/{arm}.patch"} for arm in ("rfc", "merged")}
    return replace(run, provenance={**run.provenance, "try": tried})


def with_try(run: RunFrames, **changes: Any) -> RunFrames:
    """The run with other words on what was tried."""
    tried: Mapping[str, Any] = run.provenance["try"]
    changed = {arm: {**known, **changes} for arm, known in tried.items()}
    return replace(run, provenance={**run.provenance, "try": changed})


def test_an_effect_is_told_with_interval_direction_and_noise(recorded: RunFrames) -> None:
    (rate,) = [item for item in trial_view.findings(recorded) if item.metric == "pps_tx"]
    assert (rate.arm, rate.word, rate.better) == ("patched", "effect seen", True)
    assert re.search(r"\+\d+\.\d % \[\+\d+\.\d %, \+\d+\.\d %\], better", rate.sentence)
    assert "two equal arms came out" in rate.sentence
    assert any("path of patched exercised" in line for line in trial_view.lines(recorded))


def test_equal_arms_have_no_effect_and_the_smallest_that_would_have_been_seen(
    net: RunFrames,
) -> None:
    samples = net.samples
    keys = ["block", "metric", f"{PARAM}irq"]
    stock = samples[samples["arm"] == "stock"].set_index(keys)["value"]
    same = samples.set_index(keys).index.map(stock.to_dict()).to_numpy()
    noise = 1 + 0.01 * ((samples["block"] + samples["position"]) % 3)
    found = trial_view.findings(replace(net, samples=samples.assign(value=same * noise)))
    assert {item.word for item in found} == {"no effect seen"}
    assert all("would have found with 80 % power" in item.sentence for item in found)


def test_a_path_that_never_ran_is_not_exercised_whatever_the_figures(recorded: RunFrames) -> None:
    known = {**recorded.provenance, "exercised": {"patched": {"exercised": False, "points": []}}}
    found = trial_view.findings(replace(recorded, provenance=known))
    assert {item.word for item in found} == {"not exercised"}
    assert all("say nothing of the patch" in item.sentence for item in found)


def test_one_block_is_insufficient(net: RunFrames) -> None:
    found = trial_view.findings(with_samples(net, SHAPES["one block"]))
    assert {item.word for item in found} == {"insufficient data"}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_words(net: RunFrames, shape: str) -> None:
    run = with_samples(net, SHAPES[shape])
    assert "What this run says of the patch" in mail_text(run)
    assert "<h2>Verdicts</h2>" in render(run)


def test_a_mail_names_the_patch_and_what_was_seen(recorded: RunFrames) -> None:
    text = mail_text(recorded)
    assert f"<{MESSAGE_ID}>" in text
    assert "(v1, one patch," in re.sub(r"\s+", " ", text)
    assert "- patched: effect seen: pps_tx" in text
    assert "No published figure" not in text
    assert all(len(line) <= 72 for line in text.splitlines())


def test_the_command_tries_the_same_patch_again(recorded: RunFrames, net: RunFrames) -> None:
    assert command_again(recorded) == (
        "vringlab try merged.patch --base debian:6.12 --side guest --workload pktgen-testpmd "
        "--profile quick --seed 1 -p ring=packed -p irq=same -p ring_size=256 -p burst=256"
    )
    assert command_again(net).startswith("vringlab try rfc.patch merged.patch --base")
    assert "/home/ada" not in mail_text(net)
    mailed = with_try(recorded, kind="message-id", source=f"https://lore/{MESSAGE_ID}/")
    assert command_again(mailed).startswith(f"vringlab try {MESSAGE_ID} --base")
    ranged = with_try(recorded, kind="git range", source="v6.12..mine")
    assert "try v6.12..mine --tree TREE --base" in command_again(ranged)
    whole = replace(recorded, plan=replace(recorded.plan, module="vmlinux"))
    assert "--build full" in command_again(whole)


def test_what_else_nobody_published_figures_of_is_told_too() -> None:
    run = load_run(settings().data / "recorded" / "vsock-fast-path")
    text = mail_text(run)
    assert "No published figure" in text
    assert re.search(r"direct: (no )?effect seen", text)
    assert re.search(r"direct: (no )?effect seen", render(run))
