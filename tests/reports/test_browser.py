"""The page of `pdtool report` in a real browser: no text lies over another, nothing is cut off or fetched.

Needs a Chromium and Playwright (`make browser-check` says how to get them); skipped where either is not there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import NET, Folder
from graphs import chain
from pictures import BROWSERS

from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.plan import PlanOptions
from pdtool.planner.choice.make_plan import make_plan

WIDTHS, SCHEMES = (400, 900, 1600), ("light", "dark")

# Each text that is seen, with the box of what is drawn of it; a tooltip's text is none.
TEXTS = """() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.textContent.trim() || parent.closest("title, style, script")) continue;
    if (!parent.checkVisibility({checkOpacity: true, checkVisibilityCSS: true})) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      if (box.width > 1 && box.height > 1) {
        let left = box.left, right = box.right;
        const inset = Math.min(3, box.height / 4);  // letters do not fill their line
        found.push([node.textContent.trim().slice(0, 60), left, box.top + inset, right, box.bottom - inset]);
      }
    }
  }
  return found;
}"""
# What is wider than the box that holds it, unless that box can be scrolled.
CUT_OFF = """() => [...document.querySelectorAll("*")]
  .filter(e => e.scrollWidth > e.clientWidth + 1 && ["hidden", "clip"].includes(getComputedStyle(e).overflowX))
  .map(e => e.tagName + " " + e.textContent.slice(0, 60))"""
SCROLLED = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    playwright = pytest.importorskip("playwright.sync_api")
    if path is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(request: pytest.FixtureRequest, folder: Folder) -> Path:
    """The page of a plan with so many stages, of VGG-16 on four servers, or of a run of three updates."""
    if request.param == "run":
        folder.write("model.py", NET)
        folder.pdtool("profile", "model.py", "--batch-size", "8")
        folder.pdtool("partition", "--topology", "2", "--straight", "--bandwidth", "1GB/s", "-o", "plans/net.yaml")
        folder.pdtool("run", "plans/net.yaml", "-o", "runs/net", "--steps", "3", "--device", "cpu")
        folder.pdtool("report", "runs/net")
        return Path("report.html").absolute()
    if request.param == "vgg16":  # whose gain over two rivals is 1 at two bandwidths
        folder.pdtool("profile", "pdtool.zoo.vgg16", "--device", "v100", "--batch-size", "64", "-o", "vgg16.json")
        folder.pdtool("partition", "vgg16.json", "--topology", "4", "--bandwidth", "2.5Gbit/s", "-o", "vgg16.yaml")
        folder.pdtool("report", "vgg16.yaml")
        return Path("report.html").absolute()
    stages = int(request.param)
    profile = chain([0.01] * max(stages, 8), parameters=10**6, crossing=10**5)
    profile.save("profiles/chain.json")
    plan = make_plan(profile, "profiles/chain.json", make_cluster((stages,), (1e8,)), PlanOptions(straight=True))
    plan.save("plans/chain.yaml")
    folder.pdtool("report", "plans/chain.yaml")
    return Path("report.html").absolute()


@pytest.mark.parametrize("page", ["1", "4", "64", "vgg16", "run"], indirect=True)
def test_the_page_is_tidy_in_a_browser(page: Path, browser: Any) -> None:
    for width in WIDTHS:
        for scheme in SCHEMES:
            assert faults(browser, page, width, scheme) == [], f"at {width} pixels, {scheme}"


def faults(browser: Any, page: Path, width: int, scheme: str) -> list[str]:
    """What is wrong with a page in a window of some width."""
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    found: list[str] = []
    tab.on("console", lambda message: found.append(f"console: {message.text}"))
    tab.on("pageerror", lambda error: found.append(f"error: {error}"))
    tab.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or found.append(f"fetches {asked.url}"))
    tab.goto(page.as_uri())
    found += [f"cut off: {text}" for text in tab.evaluate(CUT_OFF)]
    if tab.evaluate(SCROLLED) > 0:
        found.append("the page is wider than its window")
    texts = tab.evaluate(TEXTS)
    assert len(texts) > 20
    found += overlaps(texts)
    tab.close()
    return found


def overlaps(texts: list[tuple[str, float, float, float, float]]) -> list[str]:
    """Pairs of texts that lie over each other; those are compared that begin near each other."""
    texts = sorted(texts, key=lambda text: text[2])
    found = []
    for number, (text, left, top, right, bottom) in enumerate(texts):
        for other, its_left, its_top, its_right, its_bottom in texts[number + 1 :]:
            if its_top >= bottom:
                break
            if its_left < right - 1 and left < its_right - 1 and its_top < bottom and top < its_bottom:
                found.append(f"{text!r} lies over {other!r}")
    return found


def test_texts_over_each_other_are_found() -> None:
    texts = [("a", 0.0, 0.0, 10.0, 10.0), ("b", 12.0, 0.0, 20.0, 10.0), ("c", 8.0, 5.0, 14.0, 15.0)]
    assert overlaps(texts) == ["'a' lies over 'c'", "'b' lies over 'c'"]
