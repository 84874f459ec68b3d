"""`pdtool import`: what PipeDream published comes in whole, or is refused with its line."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.errors import ArtifactError, UsageError
from pdtool.profiler.pipedream_import import read_pipedream_profile

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "pipedream"
published = pytest.mark.parametrize("name", ["vgg16", "alexnet", "resnet18", "resnet50", "gnmt8"])


def line(number, description, forward=1.0, backward=2.0, size="8.000", parameters=0.0):
    """A node's line."""
    return (
        f"node{number} -- {description} -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={size}, parameter_size={parameters}"
    )


#   node1 Input -- node2 Conv2d --,-- node10 LSTM ----- node11 Add
#                                  `-- node3 Dropout --'
NODES = [
    line(10, "LSTM(6, 5)", 4.0, 8.0, "[480.0; 60.0; 60.0]", 640.0),
    line(1, "Input", 500.0, 0.0, "1024.0"),
    line(11, "Add(inplace)", 0.25, 0.5),
    line(3, "Dropout(p=0.2)", 0.0, 0.0),
    line(2, "Conv2d(1, 2, kernel_size=(3, 3), bias=False)", 1.5, 3.0, "2048.000", 72.0),
]
EDGES = ["\tnode10 -- node11", "\tnode1 -- node2", "\tnode3 -- node11", "\tnode2 -- node10", "\tnode2 -- node3"]
TEXT = "\n".join(NODES + EDGES)


def read(text, **options):
    return read_pipedream_profile(text, "net.graph.txt", name="net", **options)[0]


def test_a_small_graph_comes_in_whole():
    profile = read(TEXT)
    assert [node.name for node in profile.nodes] == ["node1", "node2", "node3", "node10", "node11"]
    assert [node.op for node in profile.nodes] == ["input", "Conv2d", "Dropout", "LSTM", "Add"]
    loaded, conv, _, lstm, add = profile.nodes
    assert (loaded.forward_s, loaded.backward_s, loaded.gradient_bytes, loaded.output_bytes) == (0, 0, 0, 1024)
    assert (conv.forward_s, conv.backward_s, conv.parameter_bytes) == (1.5e-3, 3e-3, 72)
    assert lstm.output_bytes == lstm.gradient_bytes == lstm.stash_bytes == 600
    assert (add.output_bytes, add.stash_bytes) == (8, 0), "it writes into the memory of its input"
    assert add.inputs == ("node3", "node10")
    assert profile.model is None
    assert profile.device.kind == "measured"
    assert (profile.device.memory_bytes, profile.reserved_bytes) == (16 * 10**9, 2**30), "the paper's V100"
    assert Profile.parse(profile.dump()) == profile


def test_the_order_of_the_lines_changes_only_the_digest():
    lines = NODES + EDGES
    random.Random(0).shuffle(lines)
    shuffled = read("\r\n".join(lines) + "\n")
    assert shuffled.nodes == read(TEXT).nodes
    assert shuffled.digests != read(TEXT).digests


LINEAR = line(2, "Linear(in_features=4, out_features=5, bias=True)", size="140.0")
VIEW = line(3, "View(-1)", size="112.0")
JOIN = "\tnode1 -- node3\n\tnode3 -- node2"


@pytest.mark.parametrize(
    ("text", "batch", "why"),
    [
        (TEXT, 3, "the state of LSTM"),
        ("\n".join([line(1, "Input"), LINEAR, VIEW, JOIN]), 7, "the output of Linear"),
        ("\n".join([line(1, "Input"), LINEAR, VIEW.replace("View", "Add"), JOIN]), 128, "assumed"),  # or a sequence
        ("\n".join([line(1, "Input"), LINEAR.replace("140", "144"), VIEW, JOIN]), 128, "assumed"),
        (TEXT.replace("LSTM(6, 5)", "LSTM(6, 0)"), 128, "assumed"),
    ],
)
def test_the_minibatch_is_what_the_sizes_tell(text, batch, why):
    profile, batch_source = read_pipedream_profile(text, "f", name="net")
    assert profile.batch_size == batch
    assert why in batch_source
    assert read(text, batch_size=9).batch_size == 9


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "f: has no nodes"),
        ("hello", "f: line 1: is neither a node nor an edge: 'hello'"),
        (TEXT + "\n" + EDGES[0], r"f: line 11: the edge node10 -- node11 appears twice"),
        (TEXT + "\n" + NODES[1], r"f: line 11: node1 appears twice \(first in line 2\)"),
        (TEXT + "\n\tnode1 -- node9", "f: line 11: the edge node1 -- node9 names node9, which is not a node"),
        (TEXT + "\n\tnode9 -- node1", "f: line 11: .* names node9, which is not a node"),
        (TEXT + "\n\tnode11 -- node2", "line .: the edges make a cycle: .*node11 -- node2( --|$|;)"),
        (TEXT + "\n\tnode3 -- node3", "the edges make a cycle: node3 -- node3"),
        ("\n".join(NODES + EDGES[:2]), r"f: line 4: no edge leads from or to node3 \(is the file cut off\?\)"),
        (TEXT.replace("time=1.5", "time=-1.5"), "f: line 5: forward '-1.5' is not a finite number of 0 or more"),
        (TEXT.replace("time=8.0", "time=nan"), "f: line 1: backward 'nan' is not a finite number of 0 or more"),
        (TEXT.replace("time=8.0", "time=inf"), "f: line 1: backward 'inf'"),
        (TEXT.replace("time=8.0", "time=1e999"), "f: line 1: backward '1e999'"),
        (TEXT.replace("time=8.0", "time=[1.0; 2.0]"), r"f: line 1: backward '\[1.0; 2.0\]' is not one number"),
        (TEXT.replace("60.0; 60.0", "60.0; -1"), "f: line 1: activation_size '-1' is not a finite number"),
        (TEXT.replace("60.0; 60.0", "60.0; "), "f: line 1: activation_size '' is not a finite number"),
        (TEXT.replace("size=72.0", "size=1e40"), "f: line 5: parameter_size '1e40' is not plausible: 0, or from"),
        (TEXT.replace("size=72.0", "size=1e-40"), "f: line 5: parameter_size '1e-40' is not whole bytes|not plausible"),
        (TEXT.replace("size=72.0", "size=72.5"), "f: line 5: parameter_size '72.5' is not whole bytes"),
        (TEXT.replace("node1 --", "input1 --"), "is neither a node nor an edge"),
        (TEXT.replace("\tnode1 -- node2", "node1 -- node2"), "is neither a node nor an edge"),
        (TEXT.replace("backward_compute_time=8.0, ", ""), "f: line 1: is neither a node nor an edge"),
    ],
)
def test_what_does_not_hold_together_is_refused_with_its_line(text, match):
    with pytest.raises(ArtifactError, match=match) as caught:
        read_pipedream_profile(text, "f", name="net")
    assert caught.value.exit_code == 3


def test_any_truncated_line_is_refused():
    for end in range(1, len(TEXT)):
        whole = TEXT[end] == "\n" or TEXT[:end].endswith("\n")
        if not whole and not re.search(r"(size=|-- node)[0-9.]+$", TEXT[:end]):  # a shorter number is a number
            with pytest.raises(ArtifactError):
                read(TEXT[:end])


def test_a_name_that_could_leave_its_folder_is_refused():
    with pytest.raises(UsageError, match=r"name 'a/b' holds a quote, a slash.*--name"):
        read_pipedream_profile(TEXT, "f", name="a/b")


# --- the command ------------------------------------------------------------------------------------------------------


def test_import_partition_show_is_a_road(folder):
    folder.write("vgg16/graph.txt", TEXT)
    result = folder.pdtool("import", "vgg16/graph.txt")
    assert result.stdout == ""
    assert "minibatch of 3, from the state of LSTM(6, 5) in line 1; name another with --batch-size" in result.stderr
    assert "wrote profiles/vgg16.json" in result.stderr
    assert folder.pdtool("import", "-", "--name", "vgg16", "-o", "-", stdin=TEXT).stdout.startswith("{")
    folder.pdtool("partition", "--topology", "2", "--bandwidth", "1GB/s")
    assert "node1" in folder.pdtool("show", "profiles/vgg16.json").stdout
    assert Plan.load("plans/vgg16-2.yaml").model is None


@pytest.mark.parametrize(
    ("path", "name"), [("vgg16.graph.txt", "vgg16"), ("gnmt.txt", "gnmt"), ("resnet/graph.txt", "resnet")]
)
def test_the_profile_is_named_after_the_file_or_its_folder(folder, path, name):
    folder.write(path, TEXT)
    folder.pdtool("import", path)
    assert Profile.load(f"profiles/{name}.json").name == name


@pytest.mark.parametrize("command", ["codegen", "run"])
@pytest.mark.parametrize("model", [[], ["--model", "model.py"]])
def test_nothing_can_be_run_without_a_model_even_if_one_is_named(folder, command, model):
    """node2 of a published graph is no operator of any model that we could trace."""
    folder.write("graph.txt", TEXT)
    folder.write("model.py", "raise SystemExit('imported')")
    folder.pdtool("import", "graph.txt", "--name", "net")
    folder.pdtool("partition", "--topology", "2", "--bandwidth", "1GB/s")
    stderr = folder.pdtool(command, *model, code=3).stderr
    assert "model: profiles/net.json comes without a model; plan from a profile that `pdtool profile` wrot" in stderr


def test_a_file_that_is_not_there_or_no_text_exits_with_3(folder):
    assert "gone.txt: cannot be read" in folder.pdtool("import", "gone.txt", code=3).stderr
    (folder.path / "bytes.txt").write_bytes(b"\xff\xfe")
    assert "not UTF-8 text" in folder.pdtool("import", "bytes.txt", code=3).stderr


# --- the five published files -----------------------------------------------------------------------------------------


def text_of(name):
    path = DATA / f"{name}.graph.txt"
    if not path.is_file():
        pytest.skip(f"{path} is absent: PipeDream's profiles are not copied into the project")
    return path.read_text()


@published
def test_totals_and_counts_are_those_of_the_text(name):
    text = text_of(name)
    profile = read(text)
    rows = [row for row in text.splitlines() if row.startswith("node")]
    computing = [row for row in rows if " -- Input" not in row]

    def total(field, rows=computing):
        values = (re.search(rf"{field}=(\[.*?\]|[0-9.]+)", row)[1] for row in rows)
        return sum(float(v) for value in values for v in value.strip("[]").split(";"))

    assert len(profile.nodes) == len(rows)
    assert sum(len(node.inputs) for node in profile.nodes) == sum(row.startswith("\t") for row in text.splitlines())
    assert sum(n.forward_s for n in profile.nodes) == pytest.approx(total("forward_compute_time") / 1e3, rel=1e-12)
    assert sum(n.backward_s for n in profile.nodes) == pytest.approx(total("backward_compute_time") / 1e3, rel=1e-12)
    assert sum(n.parameter_bytes for n in profile.nodes) == total("parameter_size")
    assert sum(n.gradient_bytes for n in profile.nodes) == total("activation_size")
    assert sum(n.output_bytes for n in profile.nodes) == total("activation_size", rows)
    assert sum(node.op == "input" for node in profile.nodes) == len(rows) - len(computing)
    assert read(text).dump() == profile.dump() == Profile.parse(profile.dump()).dump()


@pytest.mark.parametrize(
    ("name", "batch", "parameters"),
    [
        ("vgg16", 128, 138_357_544),
        ("alexnet", 256, 61_100_840),
        ("resnet18", 256, 11_689_512),
        ("resnet50", 128, 25_557_032),
        ("gnmt8", 32, None),
    ],
)
def test_minibatches_and_parameters_are_those_of_the_models(name, batch, parameters):
    profile = read(text_of(name))
    assert profile.batch_size == batch
    if parameters:
        assert sum(node.parameter_bytes for node in profile.nodes) == 4 * parameters


@pytest.mark.rows_of_the_day(days=2)
@published
def test_the_published_profiles_can_be_planned_and_shown(folder, name):
    text_of(name)
    folder.pdtool("import", str(DATA / f"{name}.graph.txt"))
    folder.pdtool("partition", "--topology", "4", "--bandwidth", "10Gbit/s")
    plan = Plan.load(f"plans/{name}-4.yaml")
    assert sum(stage.replicas for stage in plan.stages) <= 4
    assert "measured for V100" in folder.pdtool("show", f"profiles/{name}.json").stdout
