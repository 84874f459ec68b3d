"""What stands in names, metrics, labels and errors is shown, not executed: no markup, no escape sequence."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import samples

from pdtool.artifacts.plan import Certificate, Why
from pdtool.cli import terminal
from pdtool.errors import printable
from pdtool.files import quoted
from pdtool.reports.graph_drawing import dot
from pdtool.reports.picture import Picture

HOSTILE = "\x9b2J\x7f\u202e[/b][red]:warning: &#27; <b>"  # what a Label may hold
WORSE = f"\x1b[2J\r\x07{HOSTILE}"  # what a metric's name or an error may hold
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


def is_shown(text: str) -> bool:
    """Whether the hostile text stands there for people to read."""
    return not OBEYED.search(text) and "\\x9b2J\\x7f\\u202e[/b][red]:warning: &#27; <b>" in text


def test_control_characters_are_written_out():
    assert printable("a\x1b[2J\x9b\u202e\udcff\n\tb ä ✓") == "a\\x1b[2J\\x9b\\u202e\\udcff\n\tb ä ✓"


def hostile_profile():
    profile = samples.profile()
    nodes = tuple(node.model_copy(update={"op": HOSTILE}) for node in profile.nodes)
    device = profile.device.model_copy(update={"name": HOSTILE})
    return profile.model_copy(update={"nodes": nodes, "device": device})


ARTIFACTS = {
    "profile": hostile_profile(),
    "plan": samples.plan().model_copy(
        update={"why": Why(bottleneck=HOSTILE, certificate=Certificate(bound_s=1.0, proof=HOSTILE))}
    ),
    "report": samples.report().model_copy(update={"metrics": {WORSE: 0.5}, "plan": HOSTILE, "config": HOSTILE}),
    "cluster": samples.cluster().model_copy(
        update={"measured": samples.cluster().measured.model_copy(update={"torch": HOSTILE})}
    ),
}


@pytest.mark.parametrize("kind", ["profile", "plan", "report"])
def test_names_in_artifacts_are_shown(kind, folder):
    """`[/b]` was a traceback of rich.errors.MarkupError."""
    ARTIFACTS[kind].save("file")
    output = folder.pdtool("show", "file").output
    assert is_shown("".join(output.split("\n")).replace("  ", " ")), output


@pytest.mark.parametrize("kind", ARTIFACTS)
def test_nothing_in_an_artifact_is_obeyed(kind, folder):
    ARTIFACTS[kind].save("file")
    assert not OBEYED.search(folder.pdtool("show", "file").output)
    text = folder.pdtool("show", "file", "--json").output
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    assert type(ARTIFACTS[kind]).parse(text) == ARTIFACTS[kind]


def test_what_user_code_raises_is_shown(folder):
    folder.write("model.py", f"def model(): raise ValueError({WORSE!r})\n")
    result = folder.pdtool("profile", "model.py", code=1)
    assert is_shown(result.stderr)


@pytest.mark.parametrize(
    "arguments", [[f"--{WORSE}"], [WORSE], ["show", f"--{WORSE}"], ["schema", WORSE], ["show", WORSE]]
)
def test_what_click_says_of_arguments_is_shown(arguments, folder):
    result = folder.pdtool(*arguments, code=3 if arguments == ["show", WORSE] else 2)
    assert not OBEYED.search(result.output + result.stderr)
    assert "x1b[2J" in result.stderr


def test_progress_and_notes_are_shown(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with terminal.status(WORSE) as step:
        step(WORSE)
    with terminal.progress(WORSE) as on_progress:
        on_progress(1, 2)
    terminal.note(WORSE)
    terminal.show(WORSE)
    text = capsys.readouterr().err
    assert "[/b][red]" in text
    assert "\x9b2J" not in text
    assert "\x1b[2J" not in text


def test_drawings_are_no_syntax():
    profile = hostile_profile()
    text = dot(samples.plan(), profile)
    assert not OBEYED.search(text)
    assert "&amp;#27;" in text
    picture = Picture(100, WORSE + "\ufffe")
    picture.text(0, 10, WORSE + "\ufffe")
    picture.box(0, 0, 10, 10, "rail", tooltip=WORSE + "\ufffe")
    assert ElementTree.fromstring(picture.standalone()).tag.endswith("svg")


def test_only_the_terminal_module_prints():
    """So that nobody can forget to escape."""
    root = Path(terminal.__file__).parents[1]
    for path in root.rglob("*.py"):
        if "zoo" in path.parts or path == Path(terminal.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert name not in ("click.echo", "click.secho", "print", "rich.print", "Console"), path


def test_a_path_in_a_hint_is_no_option() -> None:
    assert [quoted(path) for path in ("runs/a", "-r", "a b")] == ["runs/a", "./-r", "'a b'"]
