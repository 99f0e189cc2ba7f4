"""The page in a real browser at three widths: nothing is cut, nothing overlaps, nothing loads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.browser import CHROMIUM, Page, open_page
from tests.fakes.fake_runs import NET, SHAPES, VSOCK, loaded, make_run, with_samples

from vringlab.analysis.frames import load_run
from vringlab.report.html import render, write_report

WIDTHS = (375, 800, 1400)

#: With these a missing browser is an error: otherwise a machine without one would pass.
_REQUIRED = os.environ.get("CI") or os.environ.get("VRINGLAB_LIVE") == "1"

pytestmark = pytest.mark.skipif(
    not Path(CHROMIUM).exists() and not _REQUIRED,
    reason=f"{CHROMIUM} is not installed (package chromium)",
)

# Every visible piece of text with its lines' places; pictures as one box each. Then: what reaches
# beyond the view, what an ancestor clips, what lies on something else.
_FAULTS = """
(() => {
  const width = document.documentElement.clientWidth, faults = [], boxes = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (!node.data.trim() || node.parentElement.closest('svg')) continue;
    // What a closed <details> holds has a place, but is not shown.
    if (!node.parentElement.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects())
      if (box.width > 0.5 && box.height > 0.5)
        boxes.push({box, node, text: node.data.trim().slice(0, 60)});
  }
  for (const picture of document.querySelectorAll('svg')) {
    const box = picture.getBoundingClientRect();
    if (box.width) boxes.push({box, node: picture, text: picture.getAttribute('aria-label')});
  }
  for (const {box, node, text} of boxes) {
    if (box.left < -0.5 || box.right > width + 0.5) faults.push(`beyond the view: ${text}`);
    for (let up = node.parentElement; up; up = up.parentElement) {
      const style = getComputedStyle(up);
      if (style.overflowX === 'visible' && style.overflowY === 'visible') continue;
      if (up === document.documentElement || up === document.body) continue;
      const edge = up.getBoundingClientRect();
      if (box.right > edge.right + 0.5 || box.bottom > edge.bottom + 0.5)
        faults.push(`clipped: ${text}`);
    }
  }
  boxes.sort((a, b) => a.box.top - b.box.top);
  for (let i = 0; i < boxes.length; i++)
    for (let j = i + 1; j < boxes.length && boxes[j].box.top < boxes[i].box.bottom; j++) {
      const a = boxes[i].box, b = boxes[j].box;
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (boxes[i].node !== boxes[j].node && across > 1 && down > 3)
        faults.push(`overlap: ${boxes[i].text} / ${boxes[j].text}`);
    }
  if (document.documentElement.scrollWidth > width)
    faults.push(`the page is ${document.documentElement.scrollWidth} wide in ${width}`);
  return {faults, texts: boxes.length};
})()
"""

_OPEN = "document.querySelectorAll('details').forEach(one => one.open = true)"

_PICTURES = """
[...document.querySelectorAll('figure')].map(figure =>
  [...figure.querySelectorAll('svg')].filter(svg => svg.getBoundingClientRect().width > 0)
    .map(svg => [svg.getAttribute('class'),
                 svg.getBoundingClientRect().width / svg.viewBox.baseVal.width]))
"""

# Contrast of text to its ground (WCAG 2.2, relative luminance and contrast ratio).
_CONTRAST = """
(() => {
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = element => {
    for (let up = element; up; up = up.parentElement) {
      const colour = parse(getComputedStyle(up).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.5) return colour;
    }
    return [255, 255, 255];
  };
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const found = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!own || element.closest('svg') || !element.getBoundingClientRect().width) continue;
    found.push([ratio(parse(getComputedStyle(element).color), ground(element)),
                element.textContent.trim().slice(0, 40)]);
  }
  for (const part of document.querySelectorAll('svg g')) {
    const fill = part.style.fill;
    if (!fill.startsWith('var(--ink)') || !part.getBoundingClientRect().width) continue;
    found.push([ratio(parse(getComputedStyle(part).fill), ground(part.closest('figure'))), 'svg']);
  }
  return found;
})()
"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with open_page() as opened:
        yield opened


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    found = {name: write_report(make_run(folder, name)) for name in (VSOCK, NET)}
    run = load_run(found[NET].parent)
    for shape in ("no samples", "all invalid", "wild", "some invalid"):
        path = folder / f"{shape}.html"
        path.write_text(render(with_samples(run, SHAPES[shape])))
        found[shape] = path
    return found


NAMES = (VSOCK, NET, "no samples", "all invalid", "wild", "some invalid")


def faults(page: Page) -> list[str]:
    found: dict[str, Any] = page.evaluate(_FAULTS)
    assert found["texts"] > 20
    return list(found["faults"])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_cut_and_nothing_overlaps(
    page: Page, reports: dict[str, Path], name: str, tmp_path: Path
) -> None:
    page.load(reports[name])
    for opened in (False, True):
        if opened:
            page.evaluate(_OPEN)
        for width in WIDTHS:
            page.show(width)
            assert faults(page) == [], (width, opened)
    for width in WIDTHS:
        page.show(width)
        shot = tmp_path / f"{width}.png"
        page.screenshot(shot)
        assert shot.stat().st_size > 10_000


def test_faults_would_be_seen(page: Page, reports: dict[str, Path]) -> None:
    page.load(reports[NET])
    page.show(375)
    page.evaluate(
        "document.querySelector('h1').insertAdjacentHTML('afterend', "
        '\'<p style="width:600px">much too wide for a telephone, and so beyond its view</p>'
        '<p style="margin-top:-2.5em">on top of it</p>'
        '<p style="height:8px;overflow:hidden">cut at the bottom</p>\')'
    )
    kinds = {fault.partition(":")[0] for fault in faults(page)}
    assert {"beyond the view", "overlap", "clipped"} <= kinds
    assert any("wide in 375" in fault for fault in faults(page))


@pytest.mark.parametrize("name", [VSOCK, NET])
def test_one_picture_of_each_figure_is_seen_and_can_be_read(
    page: Page, reports: dict[str, Path], name: str
) -> None:
    page.load(reports[name])
    for width, kind in ((375, "narrow"), (800, "wide"), (1400, "wide")):
        page.show(width)
        pictures = page.evaluate(_PICTURES)
        assert len(pictures) >= 4
        for seen in pictures:
            ((shown, scale),) = seen
            assert shown == kind
            # The smallest letters of a figure are 8.5 units high.
            assert 8.5 * scale >= 8.5


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_light_and_in_dark(
    page: Page, reports: dict[str, Path], dark: bool
) -> None:
    page.load(reports[NET])
    page.evaluate(_OPEN)
    page.show(1400, dark=dark)
    found = page.evaluate(_CONTRAST)
    assert any(text == "svg" for _, text in found)
    # 4.5 is what WCAG 2.2 asks of text of this size.
    assert [item for item in found if item[0] < 4.5] == []
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is not dark


def test_paper_is_white_and_has_the_wide_figures(page: Page, reports: dict[str, Path]) -> None:
    page.load(reports[NET])
    page.show(700, dark=True, media="print")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    assert {seen[0][0] for seen in page.evaluate(_PICTURES)} == {"wide"}
    page.show(1400)


def test_the_page_asks_for_nothing_but_itself(page: Page, reports: dict[str, Path]) -> None:
    for name in NAMES:
        page.requests.clear()
        page.load(reports[name])
        page.evaluate(_OPEN)
        assert page.requests == [reports[name].resolve().as_uri()]


def test_a_full_page_of_a_whole_profile(page: Page, tmp_path: Path) -> None:
    run = loaded(tmp_path, NET, whole=True)
    path = tmp_path / "whole.html"
    path.write_text(render(run))
    page.load(path)
    for width in WIDTHS:
        page.show(width)
        assert faults(page) == []
