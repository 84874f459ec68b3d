"""Commands lose nothing that they did not write: files of another sort, permissions, comments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdtool.api.training import new_folder
from pdtool.artifacts.run_dir import RunDir
from pdtool.errors import PdtoolError

EDITED = ("in_flight: 2", "in_flight: 1")


@pytest.mark.parametrize(
    "command",
    [
        ("show", "plans/model-2.yaml", "--graph", "-o", "{}"),
        ("simulate", "plans/model-2.yaml", "--trace", "{}"),
        ("simulate", "plans/model-2.yaml", "--svg", "{}"),
        ("simulate", "plans/model-2.yaml", "--sweep", "bandwidth=1..2Gbit/s", "--svg", "{}"),
    ],
)
@pytest.mark.parametrize("file", ["plans/model-2.yaml", "model.py", "profiles/model.json"])
def test_a_drawing_or_a_trace_overwrites_no_other_file(command, file, road):
    """Once: `show PLAN --graph -o PLAN` replaced the plan by its graph."""
    before = Path(file).read_bytes()
    stderr = road.pdtool(*(part.format(file) for part in command), code=2).stderr
    assert f"{file} is not a file of this kind and would be overwritten; name another file" in stderr
    assert Path(file).read_bytes() == before


def test_a_drawing_and_a_trace_replace_earlier_ones(road):
    for _ in range(2):
        road.pdtool("simulate", "plans/model-2.yaml", "--trace", "out.json", "--svg", "out.svg")
        road.pdtool("show", "plans/model-2.yaml", "--graph", "-o", "graph.svg")
        road.pdtool("show", "plans/model-2.yaml", "--graph", "-o", "graph.dot")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_file_that_is_replaced_keeps_its_permissions(mode, road):
    plan = edited(road)
    plan.chmod(mode)
    road.pdtool("check", str(plan), "--update")
    assert plan.stat().st_mode & 0o777 == mode


def edited(road, *changes: tuple[str, str]) -> Path:
    """The plan, edited by hand."""
    plan = Path("plans/model-2.yaml")
    text = plan.read_text(encoding="utf-8")
    for old, new in (EDITED, *changes):
        assert old in text
        text = text.replace(old, new, 1)
    plan.write_text(text, encoding="utf-8", newline="")
    return plan


@pytest.mark.parametrize(
    "change",
    [
        ("compute_s: [", "compute_s: [ # one\n    # two\n    "),
        ("transfer_s: [", "transfer_s: # one\n  # two\n  - 1.0 # three\n  # four\n  - 2.0 # five\n  # six\n# seven"),
        ("predicted:\n", "predicted: # one\n  # two\n"),
        ("  rivals:\n", "  rivals: # one\n  # two\n"),
        ("  certificate: {", "  certificate: # one\n    # two\n    {"),
        (", gap: ", ", # one\n    # two\n    gap: "),
        ("  bottleneck: stage 0", "  bottleneck: >-\n    stage 0 # no comment\n  # two\n# one"),
        ("  bottleneck_s: ", "  ? bottleneck_s # one\n  : # two\n   "),
        ("schedule: 1f1b", "schedule: 1f1b # one\n\n# two"),
    ],
)
def test_an_updated_plan_has_all_its_comments(change, road):
    """Comments inside of a list that is written again were lost."""
    bottleneck = re.search(r"  bottleneck: (.*)", Path("plans/model-2.yaml").read_text(encoding="utf-8"))[1]  # measured
    plan = edited(road, tuple(part.replace("stage 0", bottleneck) for part in change))
    text = re.sub(r"# seven.*", "# seven", plan.read_text(encoding="utf-8"))
    text = re.sub(r"# three compute.*", "# three", text)
    plan.write_text(text, encoding="utf-8")
    comments = set(re.findall(r"# (?:one|two|three|four|five|six|seven)\b", text))
    assert len(comments) >= 2
    road.pdtool("check", str(plan), "--update")
    updated = plan.read_text(encoding="utf-8")
    assert [comment for comment in comments if comment not in updated] == []
    assert "edited" not in road.pdtool("check", str(plan)).output


def test_an_updated_plan_in_one_line_has_its_comments(road):
    """What follows a comment within braces must not become a part of it."""
    plan = edited(road)
    text = plan.read_text(encoding="utf-8")
    begin, end = text.index("predicted:\n"), text.index("why:\n")
    entries = [line.strip() for line in text[begin:end].splitlines()[1:]]
    flow = ",\n  ".join(entry.replace(":", ": # of it\n   ", 1) for entry in entries)
    plan.write_text(f"{text[:begin]}predicted: {{{flow}}}\n{text[end:]}", encoding="utf-8")
    road.pdtool("check", str(plan), "--update")
    assert plan.read_text(encoding="utf-8").count("# of it") == len(entries)
    assert "edited" not in road.pdtool("check", str(plan)).output


def test_an_update_keeps_the_ends_of_lines(road):
    plan = edited(road)
    plan.write_bytes(plan.read_bytes().replace(b"\n", b"\r\n"))
    road.pdtool("check", str(plan), "--update")
    content = plan.read_bytes()
    assert content.count(b"\r\n") == content.count(b"\n") == content.count(b"\r")


def test_an_update_of_a_plan_with_a_byte_order_mark_can_be_read_again(road):
    """Once: `# edited by hand` was put before the mark, and the plan was none any more."""
    plan = edited(road)
    plan.write_bytes(b"\xef\xbb\xbf" + plan.read_bytes())
    road.pdtool("check", str(plan), "--update")
    assert "edited" not in road.pdtool("check", str(plan)).output


def test_comments_may_follow_the_end_of_a_plan(road):
    plan = edited(road)
    with plan.open("a", encoding="utf-8") as file:
        file.write("# mine\n\n  # ours")
    road.pdtool("check", str(plan), "--update")
    assert plan.read_text(encoding="utf-8").endswith("...\n# mine\n\n  # ours")


def test_an_edited_plan_for_which_nothing_fits_is_checked(road):
    plan = edited(road)
    text = re.sub(r"memory_bytes: \d+", "memory_bytes: 100", plan.read_text(encoding="utf-8"))
    plan.write_text(text, encoding="utf-8")
    result = road.pdtool("check", str(plan), code=3)
    assert "a worker that has 100 B" in result.stderr


def test_runs_that_start_at_the_same_moment_get_folders_of_their_own(folder):
    first = Path("runs/model-2")
    with new_folder(first) as own, new_folder(first) as other:
        assert (own, other) == (first, Path("runs/model-2.2"))
        (own / "metrics.jsonl").touch()
    assert own.is_dir()
    assert not other.exists()


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("nowhere")], ids=["file", "link"])
def test_a_run_says_why_it_cannot_make_its_folder(make, folder):
    make(Path("runs"))
    with new_folder(Path("runs/model-2")) as own:
        held = RunDir(own).held()
        with pytest.raises(PdtoolError, match="runs/model-2 cannot be written"):
            held.__enter__()
