"""The conventions of the commands: what goes where, exit codes, what is taken when nothing is named."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from dataclasses import replace

import click
import pytest
import samples
from pydantic import TypeAdapter

from pdtool.api.inputs import file_name
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.cli.commands.app import main
from pdtool.errors import (
    ArtifactError,
    ModelError,
    NoPlanError,
    PdtoolError,
    ScheduleError,
    StaleError,
    TargetMissedError,
    TraceError,
    UsageError,
    WorkerDiedError,
)
from pdtool.options.target import Target
from pdtool.units import format_bytes, format_seconds

COMMANDS = (
    *("profile", "partition", "codegen", "run", "train"),
    *("simulate", "emulate", "check", "diff", "show", "report", "export"),
    *("probe", "devices", "import"),
    *("init", "makefile", "schema", "completion", "help"),
)


@pytest.fixture
def planned(folder):
    """profiles/net.json and plans/net-2x2.yaml of samples."""
    samples.profile().save("profiles/net.json")
    plan = samples.plan()
    plan.save("plans/net-2x2.yaml")
    return folder


# --- help -------------------------------------------------------------------------------------------------------------


def test_the_four_steps_and_train_lead_the_commands(folder):
    assert tuple(main.commands) == COMMANDS
    text = folder.pdtool("--help").output
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  ") and line.split()[0] in COMMANDS] == [
        *COMMANDS
    ]
    assert "..." not in text.split("Commands: the four steps")[1].split("Exit codes")[0], (
        "a sentence is too long to be listed whole"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_an_imperative_sentence_with_two_examples(folder, name):
    command = main.commands[name]
    sentence = command.help.split("\n\n")[0]
    assert sentence.endswith(".")
    verbs = "Compare Compute Convert Draw Find Measure Print Run Simulate Start Train Write"
    assert sentence.split()[0] in verbs.split()
    text = folder.pdtool(name, "--help").output
    assert len(re.findall(rf"^ +pdtool {name}\b", text, re.MULTILINE)) == 2
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, f"{name} {option.opts}"
            assert option.help[0].isupper()
            assert option.help.endswith((".", "]"))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_are_accepted(name):
    lines = [line.split() for line in main.commands[name].epilog.splitlines() if line.startswith("  pdtool ")]
    assert lines
    for words in lines:
        arguments = words[2 : next((i for i, w in enumerate(words) if w.startswith(">")), len(words))]
        main.commands[name].make_context(name, arguments, resilient_parsing=False)


def test_version(folder):
    from pdtool import __version__

    assert folder.pdtool("--version").output == f"pdtool {__version__}\n"


# --- exit codes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PdtoolError("x", "y"), 1),
        (ModelError("x", "y"), 1),
        (TraceError("x", "y", location="model.py:3"), 1),
        (UsageError("x", "y"), 2),
        (ArtifactError("x", "", "y"), 3),
        (StaleError("x", "", "y"), 3),
        (ScheduleError("x", "y"), 3),
        (NoPlanError("x", "y"), 4),
        (WorkerDiedError("x", "y"), 5),
        (TargetMissedError("x", "y"), 6),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_error_has_its_exit_code_and_one_line(planned, monkeypatch, error, code):
    def fail(path, **options):
        raise error

    monkeypatch.setattr(Profile, "load", fail)
    result = planned.pdtool("partition", "--topology", "2", "--bandwidth", "1GB/s", code=code)
    assert result.stdout == ""
    assert result.stderr == ("interrupted\n" if code == 130 else f"error: {error}\n")
    assert code == 130 or result.stderr.rstrip().endswith("; y")


def test_a_cluster_file_is_the_same_as_its_figures(planned):
    samples.cluster().save("cluster.yaml")
    levels = samples.cluster().levels
    figures = [
        "--topology",
        "x".join(str(v.size) for v in levels),
        "--bandwidth",
        ",".join(f"{v.bandwidth_bytes_per_s}B/s" for v in levels),
        "--latency",
        ",".join(f"{v.latency_s}s" for v in levels),
    ]
    memory = ["--memory", "16GB", "--json", "-o", "out.yaml"]
    by_file = planned.pdtool("partition", "--cluster", "cluster.yaml", *memory).stdout
    assert by_file == planned.pdtool("partition", *figures, *memory).stdout


def test_an_unexpected_error_keeps_its_traceback(planned, monkeypatch):
    monkeypatch.setattr(Profile, "load", lambda path, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        planned.pdtool("partition", "--topology", "2")


def test_a_closed_pipe_is_no_noise(planned, monkeypatch):
    def closed(*args, **kwargs):
        raise OSError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(click, "echo", closed)
    assert planned.pdtool("schema", "plan", code=1).output == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["profile"],
        ["partition", "--topology"],
        ["schema", "nothing"],
        ["run", "--epochs", "0"],
        ["run", "--schedule", "zigzag"],
        ["profile", "m.py", "--batch-size", "x"],
        ["completion", "dos"],
    ],
)
def test_usage_errors_exit_with_2(folder, arguments):
    [line] = folder.pdtool(*arguments, code=2).stderr.splitlines()
    assert line.startswith("error: ")
    assert "`pdtool" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--config", "a.toml"], "; it goes before the command, as in `pdtool --config FILE run`"),
        (["run", "--epoch", "3"], "error: no such option '--epoch'; did you mean --epochs? See `pdtool run --help`"),
        (["run", "--batch-size", "9"], "no such option '--batch-size': the minibatch size is that of the profile, so"),
        (["runn"], "error: no such command 'runn'; did you mean run? See `pdtool --help`"),
        (["run", "--schedule", "1f1b-flsh"], "'zb-h1'; did you mean 1f1b-flush? See `pdtool run --help`"),
        (["partition", "--strategy", "piplines", "--topology", "2"], "; did you mean pipeline? See `pdtool partition"),
        (["simulate", "x.yaml", "--sweep", "bandwith=1..2Gbit/s"], "did you mean bandwidth? write bandwidth=0.1..25G"),
        (["simulate", "x.yaml", "--against", "gpip"], "did you mean gpipe? choose from pipeline, "),
        (["profile", "model.py", "--device", "v10"], "did you mean v100? measure on cpu or cuda"),
        (["profile", "model.py", "--set", "widht=3"], "did you mean width? it takes: width"),
    ],
)
def test_a_misspelt_name_gets_a_suggestion_in_one_form_of_error(folder, arguments, said):
    folder.write("model.py", "import torch\ndef model(width=8): return torch.nn.Linear(width, 2)\n")
    samples.plan().save("x.yaml")
    samples.profile().save(samples.plan().profile)
    [line] = [line for line in folder.pdtool(*arguments, code=None).stderr.splitlines() if line.startswith("error")]
    assert said in line


def test_a_misspelt_metric_gets_a_suggestion():
    with pytest.raises(UsageError, match=r"no metric 'acuracy'; did you mean accuracy\? it reports: loss, accuracy"):
        Target.parse("acuracy=0.5").is_reached({"loss": 0.1, "accuracy": 0.6})


@pytest.mark.parametrize(
    ("arguments", "limits"),
    [
        (["partition", "--topology", "2", "--workers", f"{10**400}"], "1<=x<=1000000000"),
        (["partition", "--topology", "2", "--cuts", f"{10**15}"], "100<=x<=100000"),
        (["partition", "--topology", "2", "--microbatches", f"{10**15}"], "1<=x<=10000"),
        (["probe", "--topology", "2", "--nnodes", f"{10**15}"], "1<=x<=1000000000"),
        (["probe", "--topology", "2", "--node-rank", f"{10**20}"], "0<=x<=1000000000"),
        (["profile", "model.py", "--batch-size", f"{10**15}"], "1<=x<=1000000000"),
        (["run", "--epochs", f"{10**15}"], "1<=x<=1000000000"),
        (["simulate", "--minibatches", f"{10**15}"], "1<=x<=1000000000"),
    ],
)
def test_numbers_that_nobody_means_are_refused_with_their_limits(folder, arguments, limits):
    stderr = folder.pdtool(*arguments, code=2).stderr
    assert f"{arguments[-1]} is not in the range {limits}" in stderr


def test_a_profile_whose_path_no_plan_can_hold_is_refused(planned):
    """It was a traceback of pydantic."""
    path = "/".join(["d" * 200] * 3) + "/net.json"
    samples.profile().save(path)
    stderr = planned.pdtool("partition", path, "--topology", "2", code=2).stderr
    assert "the plan cannot be written: profile: String should have at most 500 characters" in stderr


@pytest.mark.parametrize("timeout", ["0s", "1e-324s", "1e18s", "1e400s"])
@pytest.mark.parametrize("command", [["run"], ["probe", "--topology", "2"]])
def test_timeouts_have_limits(folder, command, timeout):
    assert timeout in folder.pdtool(*command, "--timeout", timeout, code=2).stderr


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ([], "no cluster is given; pass --topology 4x4, or --cluster cluster.yaml"),
        (
            ["--cluster", "c.yaml", "--topology", "2"],
            "--cluster c.yaml cannot be combined with --topology 2; pass the file or the figures",
        ),
        (["--topology", "4y4"], "topology '4y4' is not sizes joined by x"),
        (["--topology", "0"], "topology '0' has 0 workers"),
        (["--topology", "2x2", "--bandwidth", "10Gbit/s"], "--bandwidth has 1 value, but topology 2x2 has 2 levels"),
        (["--topology", "2", "--bandwidth", "10G"], "bandwidth '10G' is not a positive rate"),
        (["--topology", "2", "--memory", "16"], "size '16' is not a positive number with a unit"),
        (["--topology", "2", "--latency", "5"], "time '5' is not a number with a unit"),
        (["--topology", "2x2", "--latency", "5us"], "--latency has 1 value, but topology 2x2 has 2 levels"),
        (["--topology", f"{10**15}"], "has 1000000000000000 workers; pass between 1 and 100000"),
        (["--topology", "9" * 500], "is not sizes joined by x"),
        (
            ["--topology", "2", "--bandwidth", "1e308B/s"],
            "bandwidth '1e308B/s' is too large; pass a value from 0.001B/s to 1000PB/s",
        ),
        (["--topology", "2", "--latency", "1e18s"], "time '1e18s' is too large; pass a value from 0.001ns to 30 days"),
        (["--topology", "2", "--memory", "1e308GB"], "size '1e308GB' is too large; pass a value from 1B to 1000PB"),
        (["--topology", "2", "--simplest", "nan%"], "--simplest 'nan%' is not a percentage"),
        (["--topology", "2", "--simplest", "many"], "--simplest 'many' is not a percentage"),
        (["--topology", "2", "--simplest", "200%"], "--simplest '200%' is not a percentage"),
        (["--topology", "2", "--workers", "3"], "--workers is 3, but the cluster has 2 workers"),
        (["--topology", "2", "--microbatches", "3"], "schedule 1f1b cannot be combined with --microbatches 3"),
    ],
)
def test_impossible_options_of_partition_exit_with_2_and_say_what_to_write(planned, options, match):
    stderr = planned.pdtool("partition", *options, code=2).stderr
    assert match in stderr
    assert ";" in stderr, "no remedy"


def test_no_feasible_plan_exits_with_4(planned):
    stderr = planned.pdtool("partition", "--topology", "2", "--memory", "1B", code=4).stderr
    assert "give each worker at least" in stderr


def test_more_stages_than_operators_exit_with_4(planned):
    stderr = planned.pdtool("partition", "--topology", "50", "--straight", code=4).stderr
    assert "needs 50 stages, but the model can be cut into" in stderr


# --- what is taken, where it goes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "kind", "place"),
    [
        (("partition", "--topology", "2"), "profile", "profiles/"),
        (("codegen",), "plan", "plans/"),
        (("run",), "plan", "plans/"),
    ],
)
def test_without_a_path_the_only_candidate_is_taken_or_all_are_listed(folder, command, kind, place):
    assert f"no {kind} is named and {place} contains none" in folder.pdtool(*command, code=2).stderr
    assert "an argument is empty; name a file or folder" in folder.pdtool(*command, "", code=2).stderr
    names = [f"{place}{name}.{'json' if kind == 'profile' else 'yaml'}" for name in ("a", "b")]
    folder.write(names[0], "damaged")
    assert f"error: {names[0]}: is not" in folder.pdtool(*command, code=3).stderr
    folder.write(names[1], "damaged")
    stderr = folder.pdtool(*command, code=2).stderr
    assert f"contains 2 {kind}s; name one of {names[0]}, {names[1]}" in stderr


def test_partition_writes_the_conventional_file_and_prints_nothing_on_stdout(planned):
    result = planned.pdtool("partition", "--topology", "2x2")
    assert result.stdout == ""
    assert "no --bandwidth given: assuming 10Gbit/s,12GB/s" in result.stderr
    assert "wrote plans/net-2x2.yaml" in result.stderr
    assert "this is data parallelism" in result.stderr
    assert "times as fast as data parallelism" not in result.stderr
    plan = Plan.load("plans/net-2x2.yaml")
    assert [level.bandwidth_bytes_per_s for level in plan.cluster.levels] == [1.25e9, 1.2e10]
    assert not plan.edited


def test_the_same_inputs_give_the_same_bytes(planned):
    first = planned.pdtool("partition", "--topology", "2", "-o", "-").stdout
    assert planned.pdtool("partition", "--topology", "2", "-o", "-").stdout == first
    assert Plan.parse(first).name == "net-2"


def test_dashes_are_the_standard_streams(planned):
    text = samples.profile().dump()
    result = planned.pdtool("partition", "-", "--topology", "2", "-o", "-", stdin=text)
    assert Plan.parse(result.stdout).batch_size == 8
    assert "net-2" in planned.pdtool("show", "-", stdin=result.stdout).stdout


def test_a_profile_that_came_through_a_pipe_is_kept_where_the_plan_finds_it(folder):
    """So that `profile -o - | partition - -o - | simulate -` goes on to its end, and codegen after it."""
    text = samples.profile().dump()
    first = folder.pdtool("partition", "-", "--topology", "2", "-o", "-", stdin=text)
    assert "wrote profiles/net.json, where the plan finds its profile" in first.stderr
    assert (folder.path / "profiles/net.json").read_text() == text
    assert "this plan" in folder.pdtool("simulate", "-", stdin=first.stdout).stdout
    again = folder.pdtool("partition", "-", "--topology", "2", "-o", "-", stdin=text)
    assert again.stdout == first.stdout
    assert "wrote" not in again.stderr, "it is there"
    other = samples.profile().model_copy(update={"batch_size": 9}).dump()
    plan = Plan.parse(folder.pdtool("partition", "-", "--topology", "2", "-o", "-", stdin=other).stdout)
    assert plan.profile.startswith("profiles/net-")
    assert Profile.load(plan.profile).batch_size == 9
    assert (folder.path / "profiles/net.json").read_text() == text, "another profile of that name stays"


def test_a_plan_that_does_not_say_where_its_profile_is_is_told_what_to_write(planned):
    """Its path is nowhere in the plan, as earlier versions wrote it; once it is there, the digest still guards it."""
    text = samples.profile().dump()
    planned.pdtool("partition", "-", "--topology", "2", "-o", "plans/piped.yaml", stdin=text)
    plan = (planned.path / "plans/piped.yaml").read_text().replace("profiles/net.json", "'-'")
    planned.write("plans/piped.yaml", plan)
    for command in ("simulate", "check", "codegen"):
        error = planned.pdtool(command, "plans/piped.yaml", code=3, stdin=text).stderr
        assert "piped.yaml: profile: the profile was read from stdin, so the plan does not name its file" in error
        assert "put its path there, such as `profile: profiles/net.json`" in error
    assert "put its path there" in planned.pdtool("show", "--graph", "plans/piped.yaml", code=3).stderr
    planned.write("plans/piped.yaml", plan.replace("profile: '-'", "profile: here.json"))
    planned.write("here.json", text)
    planned.pdtool("simulate", "plans/piped.yaml")
    planned.write("here.json", samples.profile().model_copy(update={"batch_size": 9}).dump())
    assert "here.json has changed since" in planned.pdtool("simulate", "plans/piped.yaml", code=3).stderr


def test_json_prints_the_artifact_itself(planned):
    result = planned.pdtool("partition", "--topology", "2", "--json")
    content = json.loads(result.stdout)
    assert content["stages"][0]["replicas"] >= 1
    assert {"bottleneck_s", "gain_over_data_parallel", "memory_bytes"} <= set(content["predicted"])
    assert json.loads(planned.pdtool("show", "plans/net-2.yaml", "--json").stdout) == content
    planned.write("plan.json", result.stdout)
    assert Plan.load("plan.json") == Plan.load("plans/net-2.yaml")
    only_stdout = planned.pdtool("partition", "--topology", "2", "--json", "-o", "-")
    assert only_stdout.stdout == result.stdout
    profile = planned.pdtool("show", "profiles/net.json", "--json").stdout
    assert profile == samples.profile().dump()


def test_names_of_files_stay_in_their_folder():
    assert file_name("../../a b") == "_.._a_b"
    assert file_name("...") == "unnamed"
    assert file_name("é模型") == "é模型"  # other names for other models
    assert file_name("vgg16-4x4") == "vgg16-4x4"


# --- show and schema --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("artifact", "words"),
    [
        (samples.profile(), ["block.relu@1", "total", "coverage 0.99", "minibatch of 8"]),
        (samples.cluster(), ["lab: 4 workers of 16 GB, measured over gloo", "1.25 GB/s", "50 µs", "80%"]),
        (
            samples.plan(),
            [
                "2-1 on 2 at 1.25 GB/s, 2 at 12 GB/s",
                "compute of stage 1",
                "1.3 times as fast as data parallelism",
                "F0",
                "stage 1 worker 2 |",
                "rejected: 4",
            ],
        ),
        (samples.bundle(), ["stage_0.py", "2*batch+1×4", "tied: a.weight (stage 0), block.b.weight (stage 1)"]),
        (samples.report(), ["2-1", "predicted 3 ms, measured 4 ms", "accuracy 0.5", "accuracy=0.98: not reached"]),
    ],
    ids=lambda x: getattr(x, "KIND", None),
)
def test_show_prints_any_artifact(folder, artifact, words):
    artifact.save("file")
    result = folder.pdtool("show", "file")
    for word in words:
        assert word in result.stdout
    assert result.stderr == ""
    assert json.loads(folder.pdtool("show", "file", "--json").stdout)["format"] == artifact.format


def test_show_finds_what_a_folder_holds(folder):
    samples.report().save("runs/a/report.json")
    samples.bundle().save("plans/a/bundle.yaml")
    assert "measured" in folder.pdtool("show", "runs/a").stdout
    assert "stage_0.py" in folder.pdtool("show", "plans/a").stdout
    samples.emulation().save("runs/b/emulation.json")
    assert re.search(
        r"data-parallel 3-1|data-parallel 4 .*2.25 ×", " ".join(folder.pdtool("show", "runs/b").stdout.split())
    )
    none_of = "contains none of report.json, run.json, emulation.json, bundle.yaml, checkpoint.json; name a file"
    assert f"{none_of}, or the folder of a run" in folder.pdtool("show", ".", code=3).stderr
    samples.plan().save("plans/a.yaml")
    samples.plan().save("plans/b.yaml")
    assert f"plans: {none_of} in it: a.yaml, b.yaml" in folder.pdtool("show", "plans", code=3).stderr
    folder.write("runs/a/trace.json", "[]")
    assert "open it in https://ui.perfetto.dev" in folder.pdtool("show", "runs/a/trace.json", code=3).stderr


def test_a_run_is_shown_with_where_its_time_went_and_predicted_beside_measured(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # for all columns
    report = samples.report()
    report.save("runs/a/report.json")
    text = folder.pdtool("show", "runs/a").stdout
    # 3 ms of 5 computing, 1 ms for messages, 0.7 ms for gradients
    assert (
        len(re.findall(r"^[01] +[12] +60% +20% +14% +0% +6% +1 ms +1.5 ms +500 µs +200 µs$", text, re.MULTILINE)) == 2
    )
    compute, memory = format_seconds(report.predicted.compute_s[1]), format_bytes(report.predicted.memory_bytes[1])
    assert re.search(rf"^1 +{compute} +3 ms +{memory} +12 MB +2 +2 +100 B$", text, re.MULTILINE)
    on_gpu = [stage.model_copy(update={"peak_reserved_bytes": 13_000_000}) for stage in report.stages]
    report.model_copy(update={"stages": tuple(on_gpu)}).save("runs/a/report.json")
    assert "12 MB (13 MB reserved)" in folder.pdtool("show", "runs/a").stdout
    unknown = [stage.model_copy(update={"peak_memory_bytes": None}) for stage in report.stages]
    report.model_copy(update={"predicted": None, "stages": tuple(unknown)}).save("runs/a/report.json")
    text = folder.pdtool("show", "runs/a").stdout
    assert re.search(r"^1 +\? +3 ms +\? +\? +2 +2 +100 B$", text, re.MULTILINE)
    assert "per minibatch: measured 4 ms" in text


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("hello", "is not an artifact of pdtool"),
        ("format: pdtool/pizza/1\n", "has the unknown kind 'pizza'; it must be one of"),
        ("format: pdtool/plan/9\n...\n", "has format 'pdtool/plan/9'"),
        ('{"format": "pdtool/report/1"', "not valid JSON"),
    ],
)
def test_show_refuses_what_is_no_artifact(folder, text, match):
    folder.write("file", text)
    assert match in folder.pdtool("show", "file", code=3).stderr
    assert "cannot be read" in folder.pdtool("show", "gone", code=3).stderr


def test_an_edited_plan_without_its_profile_shows_no_figures_and_is_no_success(folder):
    folder.write("plan.yaml", samples.plan().dump().replace("in_flight: 2", "in_flight: 3"))
    result = folder.pdtool("show", "plan.yaml", code=3)
    assert "?: the plan was edited, and the figures in its file" in result.stdout
    assert "times as fast as data parallelism" not in result.stdout
    assert "its profile profiles/net.json is not there" in result.stderr


@pytest.mark.parametrize("columns", ["80", "60"])
def test_a_timeline_ends_where_the_terminal_does(folder, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    samples.plan().save("plan.yaml")
    lines = [
        line for line in folder.pdtool("show", "plan.yaml").output.splitlines() if line.startswith("stage 0 worker")
    ]
    assert lines
    assert {len(line) for line in lines} <= {int(columns), int(columns) - 1}


def test_a_timeline_of_many_workers_is_left_out(folder):
    plan = samples.plan()
    level = replace(plan.cluster.levels[0], size=40)
    stage = plan.stages[0].model_copy(update={"replicas": 40, "workers": tuple(range(40))})
    cluster = replace(plan.cluster, levels=(level,))
    plan.model_copy(update={"cluster": cluster, "stages": (stage,), "predicted": None}).save("plan.yaml")
    text = folder.pdtool("show", "plan.yaml", code=3).stdout
    assert "0-39" in text
    assert "not drawn" in text


@pytest.mark.parametrize("artifact", samples.ALL, ids=lambda a: a.KIND)
def test_the_schema_is_that_of_the_class(folder, artifact):
    schema = json.loads(folder.pdtool("schema", artifact.KIND).stdout)
    assert schema["properties"]["format"]["const"] == artifact.format
    assert schema["properties"] == TypeAdapter(type(artifact)).json_schema()["properties"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(folder, shell):
    assert "_PDTOOL_COMPLETE" in folder.pdtool("completion", shell).stdout


def test_a_thread_of_the_users_module_does_not_keep_the_command_from_its_end():
    code = (
        "import threading, time\nfrom pdtool.cli.commands.app import main\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\nmain(['show', 'nowhere.yaml'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "nowhere.yaml" in done.stderr


def test_one_worker_is_not_several(planned):
    result = planned.pdtool("partition", "--topology", "1", "--bandwidth", "1GB/s", "-o", "one.yaml")
    assert "the search covered every plan on 1 worker" in result.stderr
    planned.pdtool("check", "one.yaml")


@pytest.mark.parametrize("command", [["import", "graph.txt"], ["partition", "profiles/net.json", "--topology", "2"]])
def test_a_reader_that_stops_reading_costs_no_file(planned, monkeypatch, command):
    """As in `pdtool profile model.py 2>&1 | head -1`: what is printed on stderr is for people."""

    def closed(*parts, **options):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    operator = "forward_compute_time=1.0, backward_compute_time=1.0, activation_size=4.0, parameter_size=0.000"
    planned.write("graph.txt", f"node1 -- Add -- {operator}\n")
    monkeypatch.setattr("pdtool.cli.terminal.click.echo", closed)
    planned.pdtool(*command, "-o", "written")
    assert (planned.path / "written").stat().st_size > 100
    planned.pdtool("show", "written", code=1)


def test_the_file_is_there_before_it_is_shown(planned, monkeypatch):
    def interrupted(*parts, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("pdtool.cli.terminal.show", interrupted)
    planned.pdtool("partition", "profiles/net.json", "--topology", "2", "-o", "written", code=130)
    assert (planned.path / "written").stat().st_size > 100


def test_ctrl_c_while_the_command_is_imported_leaves_no_traceback():
    """It falls into the import where that asks for the module, as a finder here does."""
    interrupted = """
import sys
from dataclasses import replace

class Finder:
    @staticmethod
    def find_spec(name, *rest):
        if name == "pdtool.cli.commands.app":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder)
from pdtool.__main__ import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")
