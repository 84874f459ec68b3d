"""Law 6: load(dump(x)) == x for every artifact; every truncated or altered one is refused with exit code 3."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
import re
import stat
import time
import tracemalloc
from pathlib import Path

import pytest
import samples
import yaml
from graphs import chain, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtool import files
from pdtool.artifacts.artifact import Artifact
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.chrome_trace import TraceEvent, WorkerTrace, chrome_trace, read_trace
from pdtool.artifacts.cluster import ClusterFile, make_cluster
from pdtool.artifacts.plan import Certificate, MergedOperators, Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import Report
from pdtool.artifacts.text_formats import FormatError, has_comments, read_yaml, with_values
from pdtool.errors import (
    ArtifactError,
    PdtoolError,
    ScheduleError,
    StaleError,
    UsageError,
    describe_error,
    with_article,
)
from pdtool.files import write_atomically
from pdtool.schedule import SCHEDULES

each = pytest.mark.parametrize("artifact", samples.ALL, ids=lambda a: a.KIND)
SEALED = [a for a in samples.ALL if a.SEALED]


def altered(artifact, **changes):
    """The text of a stranger's artifact: right format and digest, other content."""
    content = json.loads(artifact.model_dump_json(exclude={"sha256"})) | changes
    return (
        samples.sealed(content)
        if artifact.KIND in ("profile", "report", "run", "emulation", "checkpoint")
        else yaml.safe_dump(json.loads(samples.sealed(content)) if artifact.SEALED else content, explicit_end=True)
    )


def node(index, **changes):
    """The nodes of the sample profile, one of them changed."""
    nodes = json.loads(samples.profile().model_dump_json())["nodes"]
    nodes[index] |= changes
    return nodes


def stages(index, **changes):
    """The stages of the sample plan, one of them changed."""
    content = json.loads(samples.plan().model_dump_json())["stages"]
    content[index] |= changes
    return content


# --- round trips ------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.one_of(samples.profiles(), samples.clusters(), samples.plans(), samples.bundles(), samples.reports()))
def test_what_is_dumped_loads_as_it_was(artifact):
    artifact.check()
    text = artifact.dump()
    again = type(artifact).parse(text)
    assert again == artifact
    assert again.dump() == text
    assert again.content_sha256 == artifact.content_sha256


@each
def test_files_keep_it_too(artifact, tmp_path):
    artifact.save(tmp_path / "deep" / "file")
    assert type(artifact).load(tmp_path / "deep" / "file") == artifact


@each
def test_one_changed_field_is_another_digest(artifact):
    assert artifact.model_copy(update={"digests": {"x": "0" * 64}}).content_sha256 != artifact.content_sha256


@each
def test_another_version_of_pdtool_makes_nothing_stale(artifact):
    assert artifact.model_copy(update={"tool_version": "9"}).content_sha256 == artifact.content_sha256


@each
def test_the_published_schema_accepts_what_is_written(artifact):
    schema = type(artifact).model_json_schema()
    content = artifact.dump()
    keys = set(json.loads(content) if content.startswith("{") else yaml.safe_load(content))
    assert keys <= set(schema["properties"])
    assert set(schema["required"]) <= keys
    assert not re.search(r'"(ge|le|gt|lt)":', json.dumps(schema)), "limits have the names of JSON Schema"


# --- damage -----------------------------------------------------------------------------------------------------------


@each
def test_every_truncation_is_refused(artifact):
    text = artifact.dump().rstrip()
    for end in {*range(0, len(text), 7), *range(len(text) - 40, len(text))}:
        with pytest.raises(ArtifactError) as caught:
            type(artifact).parse(text[:end], "file")
        assert caught.value.exit_code == 3
        assert str(caught.value).startswith("file")


@settings(max_examples=400)
@given(st.sampled_from(SEALED), st.data())
def test_an_altered_character_is_refused_or_means_the_same(artifact, data):
    text = artifact.dump()
    at = data.draw(st.integers(0, len(text) - 1))
    new = data.draw(st.one_of(st.characters(), st.sampled_from('0123456789",:{}[]- \n\\&*!#')))
    with contextlib.suppress(ArtifactError):
        assert type(artifact).parse(text[:at] + new + text[at + 1 :]) == artifact


@settings(max_examples=300)
@given(st.data())
def test_an_altered_plan_is_refused_or_known_as_edited(data):
    plan = samples.plan()
    text = plan.dump()
    at = data.draw(st.integers(0, len(text) - 1))
    new = data.draw(st.one_of(st.characters(), st.sampled_from('0123456789",:{}[]- \n\\&*!#')))
    try:
        found = Plan.parse(text[:at] + new + text[at + 1 :])
    except ArtifactError:
        pass
    else:
        executed = ("stages", "cluster", "schedule", "weights", "microbatches", "batch_size")
        assert found.edited or all(getattr(found, field) == getattr(plan, field) for field in executed)


@settings(max_examples=100)
@given(st.text(), st.sampled_from([Profile, ClusterFile, Plan, Bundle, Report]))
def test_any_text_is_an_artifact_or_an_artifact_error(text, kind):
    with pytest.raises(ArtifactError):
        kind.parse(text)


@each
def test_digits_changed_one_by_one_are_noticed(artifact):
    if not artifact.SEALED:
        pytest.skip("people edit plans and clusters")
    text = artifact.dump()
    for at in [i for i, c in enumerate(text) if c in "12345678"][::3]:
        with pytest.raises(ArtifactError):
            type(artifact).parse(text[:at] + str(int(text[at]) + 1) + text[at + 1 :])


@each
@pytest.mark.parametrize("found", ["pdtool/KIND/9", "pdtool/other/1", "", None, 7, ["x"]])
def test_unknown_formats_are_refused(artifact, found):
    found = found.replace("KIND", artifact.KIND) if isinstance(found, str) else found
    with pytest.raises(ArtifactError, match=r"this pdtool reads|no format field|is an other, not a") as caught:
        type(artifact).parse(altered(artifact, format=found))
    assert caught.value.exit_code == 3


class Renamed(Artifact):
    """A kind whose only field had another name in its first version."""

    KIND = "renamed"
    MAKER = "pdtool rename"
    VERSION = 2

    new: int

    @classmethod
    def upgraded(cls, content, version):
        return {"new": content.pop("old"), **content} if version == 1 else content


def test_a_file_of_an_older_version_is_upgraded_and_one_of_a_later_version_refused():
    first = {"format": "pdtool/renamed/1", "tool_version": "0.1.0", "digests": {}, "old": 7}
    read = Renamed.parse(samples.sealed(first))
    assert (read.format, read.new) == ("pdtool/renamed/2", 7)
    assert Renamed.parse(read.dump()) == read
    assert Renamed.model_json_schema()["properties"]["format"]["const"] == "pdtool/renamed/2"
    with pytest.raises(ArtifactError, match="was altered"):
        Renamed.parse(samples.sealed(first).replace('"old": 7', '"old": 8'))
    with pytest.raises(ArtifactError, match=r"has format 'pdtool/renamed/3', but this pdtool reads 'pdtool/renamed/2'"):
        Renamed.parse(samples.sealed(first | {"format": "pdtool/renamed/3"}))


def test_a_missing_file_says_what_writes_it(tmp_path):
    with pytest.raises(ArtifactError, match=r"gone\.json: cannot be read .*pdtool profile"):
        Profile.load(tmp_path / "gone.json")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtifactError, match="not UTF-8 text"):
        Profile.load(tmp_path / "file")


@each
def test_unknown_fields_are_refused(artifact):
    with pytest.raises(ArtifactError, match=r"hue: is not a field here; known are format, .*digests, "):
        type(artifact).parse(altered(artifact, hue="red"))


def test_a_misspelt_field_is_named():
    text = samples.plan().dump().replace("in_flight: 1", "inflight: 1")
    with pytest.raises(ArtifactError, match=r"stages\[1\]\.inflight: is not a field here; did you mean in_flight\?"):
        Plan.parse(text)
    with pytest.raises(ArtifactError, match=r"stages\[1\]\.in_flight: is missing$"):
        Plan.parse(text.replace("inflight: 1", "").replace("{,", "{"))
    with pytest.raises(ArtifactError, match=r"stages\[1\]\.recompute_: is not a field here; did you mean recompute\?"):
        Plan.parse(samples.plan().dump().replace("in_flight: 1", "in_flight: 1\n  recompute_: true"))
    with pytest.raises(
        ArtifactError, match=r"cluster\.levels\[0\]\.speed: is not a field here; known are size, bandwidth"
    ):
        Plan.parse(samples.plan().dump().replace("{size: ", "{speed: 1, size: "))


def test_a_node_that_is_named_twice_in_a_stage_is_refused():
    stage = samples.plan().stages[0]
    twice = stage.model_copy(update={"nodes": (*stage.nodes, stage.nodes[0])})
    plan = samples.plan().model_copy(update={"stages": (twice, *samples.plan().stages[1:])})
    with pytest.raises(ArtifactError, match=rf"stages\[0\]\.nodes: '{stage.nodes[0]}' appears twice; remove one"):
        Plan.parse(plan.dump())


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("plan.yaml", samples.plan().dump(), "is a plan, not a profile; name a profile, written by `pdtool profile`"),
        (
            "profile.json",
            samples.profile().dump(),
            "is a profile, not a plan; name a plan, written by `pdtool partition`",
        ),
        ("profile.json", samples.profile().dump()[:-9], "is a profile, not a plan; name a plan"),
        ("model.py", "import torch\n", "is a Python file, not a profile; name a profile"),
        ("emulation.json", samples.emulation().dump(), "is an emulation, not a plan; name a plan"),
        ("model.py", '"""Text."""\nx = 1\n', "is a Python file, not a plan; name a plan"),
        ("", "", "is a folder, not a plan; name a file written by `pdtool partition`"),
    ],
)
def test_a_file_of_another_kind_is_named_as_what_it_is(name, text, said, tmp_path):
    path = tmp_path / name
    if name:
        path.write_text(text)
    with pytest.raises(ArtifactError, match=said):
        (Profile if "not a profile" in said else Plan).load(path)


def test_the_plan_in_a_runs_folder_is_named(tmp_path):
    (tmp_path / "plan.yaml").write_text(samples.plan().dump())
    with pytest.raises(ArtifactError, match=rf"is a folder, not a plan; name {tmp_path}/plan.yaml"):
        Plan.load(tmp_path)


def test_many_keys_are_read_in_time_that_grows_with_their_number():
    """30,000 keys took 13.5 s: each was compared with all others."""
    metrics = "".join(f"  m{i}: 1.0\n" for i in range(10_000))
    began = time.process_time()
    with pytest.raises(ArtifactError, match="m9999' appears twice"):
        Plan.parse(f"format: pdtool/plan/1\nmetrics:\n{metrics}  m9999: 2.0\n...\n")
    assert time.process_time() - began < 10  # about 2 s, most of it PyYAML's


def test_repeated_keys_of_json_are_refused():
    text = samples.profile().dump().replace('"name": "net"', '"name": "net", "name": "other"')
    with pytest.raises(ArtifactError, match="key 'name' appears twice"):
        Profile.parse(text)


# --- numbers that nobody means, in files with the right digest --------------------------------------------------------


@pytest.mark.parametrize(
    ("artifact", "changes", "match"),
    [
        (samples.profile(), {"nodes": node(1, forward_s=1e308)}, r"nodes\[1\]\.forward_s: .*1000000000.*got 1e\+308"),
        (samples.profile(), {"nodes": node(1, forward_s=5e-324)}, r"nodes\[1\]\.forward_s: .*1e-30.*got 5e-324"),
        (samples.profile(), {"nodes": node(1, output_bytes=10**30)}, r"nodes\[1\]\.output_bytes: .*got 10{30}\)"),
        (samples.profile(), {"nodes": node(1, output_bytes=1e308)}, r"nodes\[1\]\.output_bytes"),
        (samples.profile(), {"nodes": node(1, output_bytes=10**400)}, r"output_bytes: 1000.* has 401 digits"),
        (samples.profile(), {"batch_size": 10**15}, r"batch_size: it must be 1000000000 or less \(got 10{15}\)"),
        (samples.profile(), {"pin": {"loss": -(10**15)}}, r"pin\.loss"),
        (samples.profile(), {"model": {"source": "m.py", "settings": {"a": 10**31}}}, r"model\.settings\.a: .*digits"),
        (samples.cluster(), {"levels": [{"size": 10**15, "bandwidth_bytes_per_s": 1.0}]}, r"levels\[0\]\.size"),
        (samples.cluster(), {"levels": [{"size": 2, "bandwidth_bytes_per_s": 1e308}]}, r"s: .*1e\+18"),
        (
            samples.cluster(),
            {"levels": [{"size": 2, "bandwidth_bytes_per_s": 5e-324}]},
            r"bandwidth_bytes_per_s: .*0\.001",
        ),
        (
            samples.cluster(),
            {"levels": [{"size": 1, "bandwidth_bytes_per_s": 1.0 + i} for i in range(11)]},
            "levels: .*at most 10",
        ),
        (
            samples.plan(),
            {"cluster": {"levels": [{"size": 10**6, "bandwidth_bytes_per_s": 1.0}]}},
            r"cluster\.levels: 1000000 workers are too many; the limit is 100000",
        ),
        (samples.bundle(), {"batch_size": 10**400}, "batch_size"),
        (samples.plan(), {"why": {"bottleneck": "", "certificate": {"bound_s": 5e-324}}}, r"bound_s: .*1e-100"),
        (samples.report(), {"epochs": -1}, "epochs"),
        (
            samples.report(),
            {"stages": 3 * samples.report().model_dump(mode="json")["stages"][:1]},
            "2 values, but there a",
        ),
        (samples.report(), {"minibatches": 10**20}, "minibatches"),
    ],
)
def test_numbers_that_nobody_means_are_refused(artifact, changes, match):
    with pytest.raises(ArtifactError, match=match) as caught:
        type(artifact).parse(altered(artifact, **changes))
    assert len(str(caught.value)) < 300


# --- a stranger's profile, with the right digest ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"nodes": node(1, forward_s=-1.0)}, r"nodes\[1\]\.forward_s"),
        ({"nodes": node(1, forward_s="1")}, r"nodes\[1\]\.forward_s"),
        ({"nodes": node(1, parameter_bytes=-1)}, r"nodes\[1\]\.parameter_bytes"),
        ({"nodes": node(1, inputs=["loss"])}, r"nodes\[1\]\.inputs: node 'a' takes 'loss', which comes after it"),
        ({"nodes": node(1, inputs=["a"])}, r"nodes\[1\]\.inputs: node 'a' takes 'a', which comes after it"),
        ({"nodes": node(1, saved_by="nowhere")}, r"nodes\[1\]\.saved_by: .nowhere. is not a later node"),
        ({"nodes": node(1, inputs=["nowhere"])}, r"nodes\[1\]\.inputs: .*which is not a node"),
        ({"nodes": node(2, name="a")}, r"nodes\[2\]\.name: 'a' appears twice"),
        ({"nodes": []}, "nodes: at least 1 is needed"),
        ({"together": [["a", "gone"]]}, r"together\[0\]: 'gone' is not a node"),
        ({"pin": {"gone": 0}}, "pin: 'gone' is not a node"),
        ({"shared": [{"name": "w", "bytes": 1, "nodes": ["gone"]}]}, r"shared\[0\]\.nodes: 'gone' is not a node"),
        ({"shared": [{"name": "w", "bytes": 999, "nodes": ["a"]}]}, r"shared\[0\]\.bytes: 999 in all exceed the param"),
        ({"batch_size": 0}, "batch_size"),
        ({"device": {"name": "cpu", "kind": "guessed"}}, r"device\.kind"),
    ],
)
def test_profiles_that_do_not_hold_together_are_refused(changes, match):
    with pytest.raises(ArtifactError, match=match) as caught:
        Profile.parse(altered(samples.profile(), **changes))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("NaN", "nan is not a finite number"),
        ("Infinity", "inf is not a finite number"),
        ("-Infinity", "-inf is not a finite number"),
        ("1e999", "inf is not a finite number"),
        ('"\\ud800"', "has a lone surrogate"),
        ("1" + "0" * 400, r"100000000000\.\.\. has 401 digits, more than 30"),
        ("[" * 40 + "]" * 40, "is nested more than 30 deep"),
    ],
)
def test_what_is_no_number_or_no_text_is_refused(value, match):
    text = samples.profile().dump().replace('"step_s": 0.01', f'"step_s": {value}')
    with pytest.raises(ArtifactError, match=rf"step_s\S*: .*{match}"):
        Profile.parse(text)


CODE = ["x; import os", "a.b\nimport os", "__import__('os')", 'a"""', "a b", "a b", "ä", "", "a..b", "x" * 501, "a\\"]


@pytest.mark.parametrize("name", CODE)
def test_node_names_that_hold_code_are_refused(name):
    with pytest.raises(ArtifactError, match=r"nodes\[1\]\.name"):
        Profile.parse(altered(samples.profile(), nodes=node(1, name=name)))


@pytest.mark.parametrize("name", [n for n in CODE if n])
def test_module_paths_that_hold_code_are_refused(name):
    with pytest.raises(ArtifactError, match=r"nodes\[1\]\.module"):
        Profile.parse(altered(samples.profile(), nodes=node(1, module=name)))


@pytest.mark.parametrize("name", ['"""; import os', "a\nb", "'", "\\", "../../etc/passwd", "\x9b2J", "a\u202eb"])
@pytest.mark.parametrize("artifact", [samples.profile(), samples.plan(), samples.bundle()], ids=lambda a: a.KIND)
def test_titles_that_could_end_a_string_or_leave_a_folder_are_refused(artifact, name):
    with pytest.raises(ArtifactError, match="name"):
        type(artifact).parse(altered(artifact, name=name))


@pytest.mark.parametrize("function", ["os.system", "a()", "1a", "", "a b"])
def test_a_model_function_that_is_no_name_is_refused(function):
    model = {"source": "model.py", "function": function, "settings": {}}
    with pytest.raises(ArtifactError, match=r"model\.function"):
        Profile.parse(altered(samples.profile(), model=model))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"file": "../stage_0.py"}, r"stages\[0\]\.file"),
        ({"file": "/etc/passwd"}, r"stages\[0\]\.file"),
        ({"class_name": "os.system"}, r"stages\[0\]\.class_name"),
        ({"inputs": ["y"]}, r"stages\[0\]: tensor 'y' is not described"),
    ],
)
def test_stages_of_a_bundle_stay_in_their_folder(change, match):
    content = json.loads(samples.bundle().model_dump_json())["stages"]
    content[0] |= change
    with pytest.raises(ArtifactError, match=match):
        Bundle.parse(altered(samples.bundle(), stages=content))


@pytest.mark.parametrize("consumers", [[0], [2], [-1]])
def test_tensors_of_a_bundle_only_go_to_later_stages(consumers):
    content = json.loads(samples.bundle().model_dump_json())["tensors"]
    content[1] |= {"consumers": consumers}
    with pytest.raises(ArtifactError, match="consumers"):
        Bundle.parse(altered(samples.bundle(), tensors=content))


def test_the_digest_of_the_operator_graph_stands_among_the_digests():
    assert samples.profile().graph_sha256 is None
    profile = samples.profile().with_graph("a" * 64)
    assert Profile.parse(profile.dump()).graph_sha256 == "a" * 64
    assert profile.digests == {**samples.profile().digests, "operator graph": "a" * 64}
    assert profile.with_graph(None) == profile
    assert profile.content_sha256 != samples.profile().content_sha256


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tied": [{"stages": [0, 1], "names": ["a"]}]}, r"tied\[0\]\.names: 1 names for 2 stages"),
        ({"tied": [{"stages": [0, 2], "names": ["a", "b"]}]}, r"tied\[0\]\.stages: \[0, 2\] of 2 stages"),
    ],
)
def test_ties_of_a_bundle_name_its_stages(changes, match):
    """Names that are too few were a traceback in `pdtool show`."""
    with pytest.raises(ArtifactError, match=match):
        Bundle.parse(altered(samples.bundle(), **changes))


def test_a_tensor_of_a_bundle_is_described_once():
    content = json.loads(samples.bundle().model_dump_json())["tensors"]
    with pytest.raises(ArtifactError, match=r"tensors\[2\]\.name: 'h' appears twice"):
        Bundle.parse(altered(samples.bundle(), tensors=[*content, {**content[1]}]))
    content[1] |= {"producer": 7, "consumers": []}
    with pytest.raises(ArtifactError, match=r"tensors\[1\]\.producer: there is no stage 7, only 2 stages"):
        Bundle.parse(altered(samples.bundle(), tensors=content))


def test_a_changed_or_missing_stage_file_is_stale(tmp_path):
    bundle = samples.bundle()
    with pytest.raises(StaleError, match=r"stage_0\.py: is missing"):
        bundle.check_files(tmp_path)
    (tmp_path / "stage_0.py").write_text("changed")
    with pytest.raises(StaleError, match=r"stage_0\.py: has changed since codegen wrote it"):
        bundle.check_files(tmp_path)


def test_sizes_follow_the_minibatch():
    assert samples.bundle().by_name["h"].sizes(5) == (11, 4)


# --- plans edited by hand ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"stages": stages(0, replicas=3)}, r"stages\[0\]\.workers: 3 replicas but 2 workers"),
        ({"copies": 2}, r"stages\[1\]\.replicas: 1 cannot be divided evenly into 2 copies"),
        ({"stages": stages(1, workers=[4])}, r"stages\[1\]\.workers: there is no worker 4; write 0 to 3"),
        ({"stages": stages(1, workers=[1])}, r"stages\[1\]\.workers: worker 1 is already used by stage 0"),
        ({"stages": stages(0, workers=[1, 1])}, r"worker 1 is already used by stage 0"),
        ({"stages": stages(0, workers=[-1, 1])}, r"stages\[0\]\.workers\[0\]"),
        ({"stages": stages(0, in_flight=0)}, r"stages\[0\]\.in_flight"),
        ({"stages": stages(0, in_flight=10**9)}, r"stages\[0\]\.in_flight"),
        ({"stages": stages(0, nodes=[])}, r"stages\[0\]\.nodes"),
        ({"stages": []}, "stages"),
        ({"schedule": "zigzag"}, "schedule"),
        ({"schedule": "gpipe"}, "weights: 'stash': schedule gpipe allows only flush"),
        ({"weights": "flush"}, "weights: 'flush': schedule 1f1b allows only stash or vertical-sync or none"),
        ({"weights": "2bw"}, "weights: '2bw': schedule 1f1b allows only stash"),
        ({"schedule": "gpipe", "weights": "flush", "update_every": 4}, "update_every: 4: a flushing schedule updates"),
        ({"update_every": 1}, "update_every: 1: it must be at least 2, one minibatch"),
        ({"chunks": 2}, "chunks: 2: interleaved and looped-bfs need 2 or more"),
        (
            {"schedule": "interleaved", "weights": "flush", "chunks": 3},
            "chunks: 2 stages cannot be divided evenly into 3",
        ),
        ({"schedule": "interleaved", "weights": "flush"}, "chunks: 1: interleaved and looped-bfs need 2 or more"),
        (
            {"schedule": "interleaved", "weights": "flush", "chunks": 2},
            r"stages\[1\]\.workers: must be those of stage 0, because each worker has 2 chunks",
        ),
        ({"schedule": "zb-h1", "weights": "flush"}, "schedule: zb-h1 needs the same number of replicas .* is 2-1"),
        ({"microbatches": 4}, "only flushing schedules have microbatches"),
        ({"cluster": {"levels": []}}, r"cluster\.levels"),
    ],
)
def test_plans_that_do_not_hold_together_are_refused(changes, match):
    with pytest.raises(ArtifactError, match=match):
        Plan.parse(altered(samples.plan(), **changes))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a: &x [1]\nb: *x\nformat: pdtool/plan/1\n...\n", r"an alias: .* \(line 2\)\); write it .*, or fix it"),
        ("format: pdtool/plan/1\nname: a\nname: b\n...\n", r"key 'name' appears twice \(lines 2 and 3\)"),
        ("format: pdtool/plan/1\nname: !!python/object/apply:os.system [ls]\n...\n", "is not valid YAML"),
        ("format: pdtool/plan/1\nname: 2020-01-01\n...\n", r"name: .*is neither text nor a number"),
        ("format: pdtool/plan/1\nbatch_size: .nan\n...\n", "batch_size: nan is not a finite number"),
        ("? [a]\n: b\n...\n", "is not valid YAML"),
        ("format: pdtool/plan/1\n<<: {name: a}\nname: b\n...\n", "artifacts cannot merge keys with `<<`"),
        ("#" * 5_000_001, "it has 5000001 characters, more than 5000000"),
        ("format: pdtool/plan/1\n1: b\n...\n", "1 is a key but not text"),
        ("format: pdtool/plan/1\nname: 2020-13-01\n...\n", "is not valid YAML"),
        (
            "format: pdtool/plan/1\nbatch_size: 0x" + "f" * 2000 + "\n...\n",
            r"a number is too long \(line 2\): 2002 characters",
        ),
        ("format: pdtool/plan/1\nname: [\n...\n", r"is not valid YAML \((?!.*<unicode string>)"),
        ("format: pdtool/plan/1\nname: \x1b\n...\n", r"is not valid YAML \((?!.*<unicode string>)"),
        ("[" * 3000, "is not valid YAML"),
        ("format: pdtool/plan/1\nname: net\n", "is cut off"),
        ("- 1\n- 2\n...\n", "no format field"),
    ],
)
def test_yaml_that_no_artifact_needs_is_refused(text, match):
    with pytest.raises(ArtifactError, match=match):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("replicas: 1", "replicas: 0", r"stages\[\d\]\.replicas: it must be 1 or more \(got 0\)"),
        ("[x, a]", "[x, 2]", r"stages\[\d\]\.nodes\[\d\]: a string is needed: write it in quotes, '2' \(got 2\)"),
        ("name: net-2x2", "name: ../net", r"name: it is empty, or contains a character that is not allowed"),
    ],
)
def test_a_value_that_cannot_be_is_told_in_the_words_of_a_plan(old, new, match):
    text = samples.plan().dump()
    assert old in text
    with pytest.raises(ArtifactError, match=match):
        Plan.parse(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"nodes": ["x"]}, "'a' is in no stage"),
        ({"nodes": ["x", "a", "loss"]}, "'loss' is in stage 0 and in stage 1"),
        ({"nodes": ["x", "a", "zzz"]}, "stage 0 names 'zzz', which the profile does not have"),
    ],
)
def test_edited_stages_are_checked_against_the_profile(change, match):
    plan = Plan.parse(altered(samples.plan(), stages=stages(0, **change)))
    assert plan.edited
    with pytest.raises(ArtifactError, match=match):
        plan.stage_nodes(samples.profile())


def test_edited_stages_keep_groups_and_pins():
    def moved(first, second):
        halves = zip(samples.plan().stages, (first, second), strict=True)
        return samples.plan().model_copy(
            update={"stages": tuple(stage.model_copy(update={"nodes": nodes}) for stage, nodes in halves)}
        )

    with pytest.raises(ArtifactError, match=r"block\.b, block\.relu@1 must be in the same stage"):
        moved(("x", "a", "block.b"), ("block.relu@1", "loss")).stage_nodes(samples.profile())
    with pytest.raises(ArtifactError, match=r"'block\.b' in stage 0 takes 'a' from the later stage 1"):
        moved(("x", "block"), ("a", "loss")).stage_nodes(samples.profile())
    pinned = samples.profile().model_copy(update={"pin": {"a": -1}})
    with pytest.raises(ArtifactError, match="a is pinned to stage 1, not 0"):
        samples.plan().stage_nodes(pinned)


def test_numbers_in_flight_that_deadlock_are_refused():
    fine = samples.plan()
    fine.check_schedule()
    thrice = tuple(
        stage.model_copy(update={"replicas": 1, "workers": (s,), "in_flight": 1 + s})
        for s, stage in enumerate(fine.stages)
    )
    with pytest.raises(
        ScheduleError, match=r"^deadlock: .*; set in_flight of the stages to [0-9, ]+, as 1f1b requires\n"
    ):
        fine.model_copy(update={"stages": thrice}).check_schedule()


def test_a_schedule_that_nobody_means_is_refused_unbuilt():
    """With vertical sync 97, 89 and 83 replicas update together after 716,539 minibatches."""
    replicas = (97, 89, 83)
    workers = [range(sum(replicas[:s]), sum(replicas[: s + 1])) for s in range(3)]
    plan = plan_of(
        chain([1.0] * 3), [["x", "a0"], ["a1"], ["a2"]], workers, make_cluster((269,), (1e9,)), in_flight=[2, 2, 2]
    ).model_copy(update={"weights": "vertical-sync"})
    with pytest.raises(
        ScheduleError, match=r"^3 stages need 1433079 minibatches .* at most 83333 can be checked; use fewer"
    ):
        plan.check_schedule()


@pytest.mark.parametrize(
    ("field", "figures"), [("compute_s", [1.0]), ("allreduce_s", []), ("memory_bytes", [1, 2, 3]), ("transfer_s", [])]
)
def test_predictions_are_as_many_as_the_stages(field, figures):
    """A plan with too few was a traceback in `pdtool show`; after an edit by hand they are of another plan."""
    predicted = json.loads(samples.plan().model_dump_json())["predicted"] | {field: figures}
    with pytest.raises(ArtifactError, match=rf"predicted\.{field}: has {len(figures)} value"):
        Plan.parse(altered(samples.plan(), predicted=predicted))
    assert Plan.parse(altered(samples.plan(), predicted=predicted, batch_size=16)).edited


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "1f1b-flush", "gpipe"])
def test_the_numbers_in_flight_that_a_schedule_wants_do_not_deadlock(schedule):
    """Whatever stood there before: what the error asks for is enough."""
    remedied = 0
    for seed in range(60):
        rng = random.Random(seed)
        sizes = [rng.randint(1, 3) for _ in range(3)]
        plan = plan_of(
            chain([1.0] * 3),
            [["x", "a0"], ["a1"], ["a2"]],
            [range(sum(sizes[:s]), sum(sizes[: s + 1])) for s in range(3)],
            make_cluster((9,), (1e9,)),
            in_flight=[rng.randint(1, 6) for _ in sizes],
        ).model_copy(
            update={
                "schedule": schedule,
                "weights": SCHEDULES[schedule].policy_names[0],
                "microbatches": rng.randint(1, 9) if SCHEDULES[schedule].flushes else 1,
            }
        )
        try:
            plan.check_schedule()
        except ScheduleError as error:
            wanted = map(int, re.findall(r"to ([0-9, ]+), as", str(error))[0].split(", "))
            stages = [s.model_copy(update={"in_flight": w}) for s, w in zip(plan.stages, wanted, strict=True)]
            plan.model_copy(update={"stages": tuple(stages)}).check_schedule()
            remedied += 1
    assert remedied


def test_an_edit_is_noticed_and_a_comment_is_not():
    text = samples.plan().dump()
    assert not Plan.parse("# mine\n" + text).edited
    assert Plan.parse(text.replace("in_flight: 2", "in_flight: 3")).edited


# --- clusters written by hand -----------------------------------------------------------------------------------------

BY_HAND = """\
format: pdtool/cluster/1
name: lab
levels:  # outermost first
- {size: 4, bandwidth_bytes_per_s: 1.25e+9, latency_s: 5.0e-5}
- size: 4
  bandwidth_bytes_per_s: 12000000000
...
"""


def test_a_cluster_written_by_hand_is_the_cluster_of_planning():
    cluster = ClusterFile.parse(BY_HAND).cluster()
    assert cluster.topology == "4x4"
    assert [level.bandwidth_bytes_per_s for level in cluster.levels] == [1.25e9, 1.2e10]
    assert [level.latency_s for level in cluster.levels] == [5e-5, 0.0]
    assert cluster.memory_bytes is None


def measured(**changes):
    """The measured part of the sample cluster, changed."""
    return json.loads(samples.cluster().model_dump_json())["measured"] | changes


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"levels": []}, "levels"),
        ({"levels": [{"size": 0, "bandwidth_bytes_per_s": 1.0}]}, r"levels\[0\]\.size"),
        ({"levels": [{"size": 2, "bandwidth_bytes_per_s": 0.0}]}, r"levels\[0\]\.bandwidth_bytes_per_s"),
        ({"levels": [{"size": 2, "bandwidth_bytes_per_s": 1.0, "latency_s": -1.0}]}, r"levels\[0\]\.latency_s"),
        (
            {"levels": [{"size": 10**6, "bandwidth_bytes_per_s": 1.0}]},
            "levels: 1000000 workers are too many; the limit is 100000",
        ),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"measured": measured(workers=3)}, r"measured\.workers: 3, but the levels have 4"),
        ({"measured": measured(levels=[])}, r"measured\.levels: 0, but the cluster has 2 levels"),
        ({"measured": measured(backend="pigeon")}, r"measured\.backend"),
    ],
)
def test_clusters_that_do_not_hold_together_are_refused(changes, match):
    with pytest.raises(ArtifactError, match=match):
        ClusterFile.parse(altered(samples.cluster(), **changes))


@pytest.mark.parametrize(("text", "number"), [("1e9", 1e9), ("2.5E8", 2.5e8), (".5e+9", 5e8), ("3.0e+9", 3e9)])
def test_numbers_are_read_as_people_write_them(text, number):
    """YAML 1.1 knows 3.0e+9 only; a text that looks like one stays a text."""
    written = samples.cluster().model_copy(update={"name": text}).dump()
    found = ClusterFile.parse(re.sub(r"(bandwidth_bytes_per_s): [0-9.e+]+", rf"\1: {text}", written))
    assert found.levels[0].bandwidth_bytes_per_s == number
    assert (found.name, ClusterFile.parse(found.dump())) == (text, found)


def test_bytes_may_be_written_with_an_exponent():
    content = samples.cluster().model_copy(update={"memory_bytes": 123}).dump()
    for text in ("16e9", "1.6e10", "1.6e+10"):
        assert ClusterFile.parse(content.replace("123", text)).memory_bytes == 16 * 10**9
    with pytest.raises(ArtifactError, match="memory_bytes: Input should be a valid integer"):
        ClusterFile.parse(content.replace("123", "15e-1"))
    with pytest.raises(ArtifactError, match="memory_bytes: inf is not a finite number"):
        ClusterFile.parse(content.replace("123", "1e999"))


# --- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EMFILE, "raise the limit on open files, .*ulimit"),
        (errno.EFBIG, "raise the limit on the size of files: `ulimit -f unlimited`"),
    ],
)
def test_a_full_disk_leaves_the_old_file_and_nothing_else(function, number, remedy, tmp_path, monkeypatch):
    path = tmp_path / "profile.json"
    samples.profile().save(path)
    before = path.read_bytes()

    def full(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, function, full)
    reason = rf"could not be written \({os.strerror(number)}\); {remedy}"
    with pytest.raises(PdtoolError, match=reason) as caught:
        samples.profile().model_copy(update={"name": "other"}).save(path)
    assert caught.value.exit_code == 1
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize("name", ["file/profile.json", "loop", "nul\0"])
def test_writing_where_nothing_can_be_is_an_error(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")  # which Python from 3.13 on resolves to itself
    with pytest.raises(PdtoolError, match="could not be written"):
        samples.profile().save(tmp_path / name)


def test_written_files_have_the_usual_permissions(tmp_path):
    samples.profile().save(tmp_path / "a")
    Path(tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_dash_is_the_standard_stream(capsys, monkeypatch):
    samples.profile().save("-")
    text = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert Profile.load("-") == samples.profile()


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    assert files.file_sha256(tmp_path / "f").startswith("ba7816bf")


def test_a_link_is_followed_and_a_pipe_is_written_to(tmp_path):
    """Neither is replaced by a file."""
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(tmp_path / "pipe", "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("artifact", samples.ALL, ids=lambda artifact: artifact.KIND)
def test_a_file_that_is_no_older_one_of_the_kind_is_not_overwritten(artifact, tmp_path):
    own = tmp_path / "artifact"
    own.touch()  # an empty one holds nothing
    artifact.save(own)
    artifact.save(own)
    others = [other for other in samples.ALL if other.KIND != artifact.KIND]
    kind = with_article(artifact.KIND)
    for text in ("import torch\n", others[0].dump()):
        path = tmp_path / "model.py"
        path.write_text(text)
        with pytest.raises(UsageError, match=f"is not {kind} and would be overwritten"):
            artifact.save(path)
        assert path.read_text() == text


def test_a_file_that_cannot_be_read_is_not_overwritten(tmp_path, monkeypatch):
    """The right to write its folder is enough to replace it."""
    path = tmp_path / "plan.yaml"
    path.write_text("somebody's own")

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(UsageError, match=r"plan.yaml cannot be read \(Permission denied\) and would be overwr"):
            samples.ALL[0].save(path)
    assert path.read_text() == "somebody's own"


# --- YAML that is changed in place ------------------------------------------------------------------------------------


@given(samples.plans(), samples.plans())
@settings(max_examples=60)
def test_changed_yaml_holds_the_new_values_and_all_else(old, new):
    content, other = (plan.model_dump(mode="json", exclude={"sha256"}) for plan in (old, new))
    values = {name: other[name] for name in ("predicted", "why", "stages", "schedule")}
    assert read_yaml(with_values(old.dump(), values)) == {**content, **values}


@pytest.mark.parametrize(
    ("text", "values", "changed"),
    [
        ("a: 1 # one\n# two\nb: 2\n...\n", {"a": 3}, "a: 3 # one\n# two\nb: 2\n...\n"),
        ("a: {b: 1, c: 2}  # x\n...\n", {"a": {"c": 5, "d": 1}}, "a: {c: 5, d: 1}  # x\n...\n"),
        ("a: {}\n...\n", {"a": {"b": 1}}, "a: {b: 1}\n...\n"),
        ("a: \xa0 # of a\n...\n", {"a": ""}, "a: '' # of a\n...\n"),
        ("a: # of a\n- 1 # of 1\n- 2\n# end\nb: 0\n...\n", {"a": [3]}, "a: [3]\n# of a\n# of 1\n# end\nb: 0\n...\n"),
        ("a:\n  # x\n  b: 1\n\n# y\n...\n", {"a": {"d": "é, #"}}, "a: {d: 'é, #'}\n# x\n\n# y\n...\n"),
        ("b: 2\n# end\n...\n", {"a": {"c": {"d": 1}}}, "b: 2\na:\n  c: {d: 1}\n# end\n...\n"),
        ("a: 1\n...\n", {"a": 1}, "a: 1\n...\n"),
    ],
)
def test_comments_order_and_blank_lines_stay(text, values, changed):
    assert with_values(text, values) == changed
    assert read_yaml(changed)


def test_only_a_mapping_has_values():
    with pytest.raises(FormatError, match="it is not a mapping"):
        with_values("- 1\n...\n", {"a": 1})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a: 'x # y'\nb: [1, 2]\n...\n", False),
        ("a: x#y\n...\n", False),
        ("a: 'x' # y\n...\n", True),
        ("# y\na: 1\n...\n", True),
        ("a: 1\n...\n# y\n", True),
        ("a:\n  - 1\n  # y\n  - 2\n...\n", True),
    ],
)
def test_what_is_quoted_is_no_comment(text, answer):
    assert has_comments(text) is answer


def test_a_certificate_without_cuts_says_nothing_of_them():
    assert Certificate(bound_s=1.0, workers=2, cuts=5).sentence()
    assert Certificate(bound_s=1.0, workers=2).sentence() == ""


def test_a_trace_is_read_with_entries_of_other_programs(tmp_path):
    events = [TraceEvent("compute", "1F0", "forward", 0.0, 0.5), TraceEvent("send", "for 2F0", "send", 0.25, 1.0)]
    trace = chrome_trace({"rank 0": events})
    counter = {"ph": "C", "name": "memory", "pid": 0, "ts": 0, "args": {"bytes": 7}}
    trace["traceEvents"] += [counter, {"ph": "i", "name": "mark", "pid": 0, "tid": 0, "ts": 0}]
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    assert read_trace(tmp_path / "trace.json") == [WorkerTrace(0, 1, events)]


def test_a_certificate_names_the_limits_of_its_search():
    merged = MergedOperators(groups=9, merged_into=3, max_cuts=4)
    certificate = Certificate(bound_s=1.0, workers=16, cuts=4, max_workers_per_copy=8, merged_operators=merged)
    assert certificate.sentence() == (
        "bound: the search covered pipelines of up to 8 workers, and copies of them. "
        "9 groups of operators were merged into 3 to search at "
        "most 4 cuts (--cuts), so a better plan may exist. The bound is the time of 16 workers without idle time"
    )


class UnreadableError(Exception):
    def __str__(self):
        raise KeyboardInterrupt


def test_an_error_without_readable_text_is_named():
    assert describe_error(UnreadableError()) == "UnreadableError: its text cannot be read"


def test_the_text_of_somebody_elses_error_is_cut():
    assert len(describe_error(ValueError("A" * 50_000))) < 3_000


def test_reading_a_small_file_takes_little_memory(tmp_path):
    """A buffer of 256 MB was made for each, more than a process with a limit may have."""
    (tmp_path / "small").write_text("text")
    tracemalloc.start()
    try:
        assert files.read_text(tmp_path / "small") == "text"
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_a_folder_that_cannot_be_written_is_named_before_the_work(tmp_path, monkeypatch):
    """The nearest that exists; a device needs no folder."""
    path = tmp_path / "profiles" / "net.json"
    files.check_folder_of(path)
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != tmp_path)
    with pytest.raises(PdtoolError, match=f"net.json could not be written: nothing can be written to {tmp_path}; "):
        files.check_folder_of(path)
    for other in (Path("-"), Path("/dev/null")):
        files.check_folder_of(other)
