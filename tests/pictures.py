"""Draw the pictures of README and docs again: `make pictures` writes docs/images/.

The screenshots of the report page need Playwright and a Chromium (`pip install playwright`, `apt install chromium`);
without these they are left as they are.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.planner.choice.without_formulas import reschedule
from pdtool.planner.placement import Placement
from pdtool.planner.simulator.engine import simulate
from pdtool.planner.simulator.job import SimulationJob
from pdtool.reports.figures import simulated_group
from pdtool.reports.timeline_drawing import TimelineGroup, timeline_drawing
from pdtool.schedule import SCHEDULES
from pdtool.units import format_seconds

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
WIDTHS, SCHEMES = (1280, 390), ("light", "dark")
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


def main() -> None:
    """Plan VGG-16 and GNMT-8 for V100, and draw stages, schedules and a page."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        pdtool(
            "profile", str(ROOT / "pdtool/zoo/vgg16.py"), "--device", "v100", "--batch-size", "64", "-o", "vgg16.json"
        )
        pdtool("partition", "vgg16.json", "--topology", "4x4", "--bandwidth", "5Gbit/s,12GB/s", "-o", "vgg16-4x4.yaml")
        pdtool("show", "vgg16-4x4.yaml", "--graph", "-o", str(IMAGES / "vgg16-stages.svg"))
        pdtool("profile", str(ROOT / "pdtool/zoo/gnmt.py"), "--device", "v100", "--batch-size", "32", "-o", "gnmt.json")
        straight = ["--topology", "4", "--straight", "--bandwidth", "12GB/s", "-o", "gnmt-4.yaml"]
        pdtool("partition", "gnmt.json", *straight)
        plan, profile = Plan.load("gnmt-4.yaml"), Profile.load("gnmt.json")
        flushing = {"schedule": "gpipe", "weights": "flush", "microbatches": 4, "update_every": None}
        draw_schedules([plan, reschedule(plan, profile, flushing)], profile)
        pdtool("report", "vgg16-4x4.yaml", "-o", "plan.html")
        digits = [str(ROOT / "pdtool/zoo/digits.py"), "--topology", "2", "--straight", "--epochs", "8", "-o", "run"]
        pdtool("train", *digits)
        pdtool("report", "run", "-o", "run.html")
        take_screenshots(["plan", "run"])


def pdtool(*arguments: str) -> None:
    """Run a command; its tables are not shown."""
    subprocess.run([sys.executable, "-m", "pdtool", *arguments], check=True, stdout=subprocess.DEVNULL)


def draw_schedules(plans: Sequence[Plan], profile: Profile) -> None:
    """Draw the same stages under several schedules, on one time axis."""
    groups = []
    for plan in plans:
        name, job = plan.schedule, SimulationJob.of(Placement.of(plan, profile), profile, plan.cluster)
        result = simulate(job)
        what = f"updates after {job.shape.update_every[0]} minibatches" if SCHEDULES[name].flushes else "never stops"
        title = f"{name}, {what}: {format_seconds(result.time_per_minibatch_s)} per minibatch"
        groups.append(simulated_group(result, job.shape, name, title))
    length_s = max(group.end_s for group in groups)
    shown = [TimelineGroup(g.title, g.rows, g.start_s, length_s, g.steady_s) for g in groups]
    picture = timeline_drawing(shown, 1120, "GNMT-8 in four stages, a V100 each")
    (IMAGES / "1f1b-gpipe.svg").write_text(picture.standalone(), encoding="utf-8")


def take_screenshots(names: Sequence[str]) -> None:
    """Write the pages NAME.html as report-NAME-WIDTH-SCHEME.png, where there is a browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        browser = None
    if browser is None:
        sys.stderr.write("no Playwright or no Chromium: the screenshots are left as they are\n")
        return
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser)
        for name, width, scheme in itertools.product(names, WIDTHS, SCHEMES):
            tab = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            tab.goto(Path(f"{name}.html").resolve().as_uri())
            tab.screenshot(path=IMAGES / f"report-{name}-{width}-{scheme}.png", full_page=True)
            tab.close()
        chromium.close()


if __name__ == "__main__":
    main()
