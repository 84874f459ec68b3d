"""Loading model.py and tracing it: what is found, and what is said when it cannot be."""

import gc
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import pdtool
from pdtool.artifacts.artifact import ModelRef
from pdtool.errors import ModelError, StaleError, TraceError, UsageError
from pdtool.frontend.graph_digest import check_profile
from pdtool.frontend.leaf_calls import LeafCall
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_rules import has_values_of
from pdtool.frontend.tracing import trace, trace_file
from pdtool.frontend.user_code import defaults_kept, find_source, parse_ref, parse_settings, undoing_user_changes
from pdtool.profiler.measure import measure

MODELS = Path(__file__).parents[1] / "models" / "small.py"


def load(function="sequential", **settings):
    return ModelFile.load(ModelRef(source=str(MODELS), function=function, settings=settings), trusted=True)


def write(tmp_path, text):
    path = tmp_path / "model.py"
    path.write_text(text)
    return ModelFile.load(ModelRef(source=str(path)), trusted=True)


@pytest.mark.parametrize(
    ("name", "result", "what"),
    [
        ("self", "x if len(x) > 2 else 2 * x", "the model works for some minibatch sizes only"),
        ("net", "x if len(x) > 2 else 2 * x", "the model works for some minibatch sizes only"),
        (
            "self",
            "x, torch.bincount(x.argmax(1))",
            "the size of a tensor depends on the values of another; .*of its own",
        ),
    ],
)
def test_a_branch_or_a_size_that_depends_on_the_samples_is_named_by_its_line(name, result, what, tmp_path):
    """Whatever forward calls its first argument."""
    text = (
        f"import torch\nclass Net(torch.nn.Linear):\n    def forward({name}, x):\n"
        f"        x = torch.nn.functional.linear(x, {name}.weight)\n\n        return {result}\n"
        "def model(): return Net(4, 4)\ndef example_inputs(n): return torch.randn(n, 4)\n"
    )
    with pytest.raises(TraceError, match=rf"^model.py:6: {what}"):
        trace_file(file := write(tmp_path, text), file.build(), 4)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("branch", "cannot trace this line.*data-dependent"),
        ("batch", "the model fails on inputs of shape .2, 8.: .* let forward take any number of samples"),
        ("attribute", "the model fails on inputs of shape.*no attribute 'missing'"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused(fault, what):
    model_file = load("broken", fault=fault)
    with pytest.raises(TraceError, match=f"(?s){what}"):
        trace(model_file.build(), model_file.example_inputs, 4, model_file.path)


@pytest.mark.parametrize(
    ("fault", "code"), [("branch", "return y if y.sum() > 0"), ("attribute", "self.missing(y)"), ("size", "len(y) > 3")]
)
def test_the_error_names_the_line_of_the_users_code(fault, code):
    line = next(i for i, text in enumerate(MODELS.read_text().splitlines(), 1) if code in text)
    model_file = load("broken", fault=fault)
    with pytest.raises(TraceError, match=rf"small.py:{line}: "):
        trace(model_file.build(), model_file.example_inputs, 4, model_file.path)


def test_a_module_without_shapes_yet_is_refused():
    model = torch.nn.Sequential(torch.nn.LazyLinear(8))
    with pytest.raises(TraceError, match="the parameters of 0, a LazyLinear, have no shape yet; pass the input"):
        trace(model, lambda n: (torch.randn(n, 8),), 4, MODELS)
    model(torch.randn(4, 8))
    assert [op.op for op in trace(model, lambda n: (torch.randn(n, 8),), 4, MODELS).operators] == ["input", "Linear"]


class OfPair(torch.nn.Module):
    def __init__(self, fails_inside):
        super().__init__()
        self.inner, self.fails_inside = torch.nn.Linear(8, 8), fails_inside

    def forward(self, pair):
        return self.inner(*pair) if self.fails_inside else self.inner(pair[0] + pair[1])


def test_a_tuple_that_was_meant_as_one_input_is_told_how_to_pass_it():
    pair = torch.randn(4, 8), torch.randn(4, 8)
    with pytest.raises(TraceError, match=r"takes 2 positional .* return it in another tuple, \(inputs,\)"):
        trace(OfPair(False), lambda n: tuple(each[:n] for each in pair), 4, MODELS)
    with pytest.raises(TraceError, match=r"takes 2 positional .*; fix the model or example_inputs"):
        trace(OfPair(True), lambda n: (tuple(each[:n] for each in pair),), 4, MODELS)


class Sparse(torch.nn.Module):
    def __init__(self, is_buffer):
        super().__init__()
        self.dense, self.is_buffer = torch.nn.Linear(8, 8), is_buffer
        self.register_buffer("graph", torch.eye(8).to_sparse() if is_buffer else torch.eye(8))

    def forward(self, x):
        return torch.sparse.mm(self.graph if self.is_buffer else self.graph.to_sparse(), self.dense(x).T).T


@pytest.mark.parametrize(
    ("is_buffer", "what"),
    [(True, "graph is a sparse tensor"), (False, "test_frontend.py:[0-9]+: forward uses a sparse")],
)
def test_a_sparse_tensor_is_refused_by_name_or_line(is_buffer, what):
    with pytest.raises(TraceError, match=f"{what}.*use a dense one, or its indices and values"):
        trace(Sparse(is_buffer), lambda n: (torch.randn(n, 8),), 4, Path(__file__))


def test_a_state_that_no_checkpoint_can_hold_is_refused(tmp_path):
    text = "from torch import nn\nclass Net(nn.Linear):\n    def get_extra_state(self): return {state}\n"
    for state, what in (
        ("{'calls': 3}", "has _extra_state, a dict and not a tensor"),
        ("1 / 0", r"state_dict\(\) raised ZeroDivision"),
    ):
        model_file = write(tmp_path, text.format(state=state) + "def model(): return Net(2, 2)\n")
        with pytest.raises(ModelError, match=what):
            model_file.build()


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (
            "for n in ('weight',): state['own.' + n] = state.pop(n)",
            "has own.weight, but no parameter or buffer has this name",
        ),
        ("state['merged'] = module.weight + 1", "has merged, but no parameter or buffer has this name"),
        ("state['weight'] = module.weight.detach().T", "has other values for weight than the model's tensor"),
        ("state['weight'] = nn.Parameter(module.weight * 2)", "has other values for weight than the model's tensor"),
        ("state['weight'] = module.weight.detach().half()", None),
        ("module.bias.data[0] = float('nan'); state['bias'] = module.bias.detach().clone()", None),
        ("del state['weight']", "lacks weight, a trained parameter"),
        ("del state['bias']", None),
    ],
)
def test_a_state_dict_that_would_not_follow_the_training_is_refused(body, what, tmp_path):
    """Checkpoints and exports had the first values of renamed and computed entries, without a word."""
    model_file = write(
        tmp_path,
        f"from torch import nn\ndef change(module, state, prefix, metadata):\n    {body}\n"
        "def model():\n    net = nn.Linear(2, 2)\n    net.bias.requires_grad_(False)\n"
        "    net.register_state_dict_post_hook(change)\n    return net\n",
    )
    with pytest.raises(ModelError, match=what) if what else nullcontext():
        model_file.build()


def test_tensors_without_values_to_compare_count_as_the_same():
    dense = torch.ones(2)
    for other in (dense.to("meta"), dense.to_sparse()):
        assert has_values_of(dense, other)
        assert has_values_of(other, dense)
    assert not has_values_of(dense, torch.ones(3))


def test_a_name_that_no_file_can_hold_is_refused():
    model = torch.nn.Sequential()
    model.add_module("a b", torch.nn.Linear(8, 8))
    with pytest.raises(TraceError, match="a part named 'a b'"):
        trace(model, lambda n: (torch.randn(n, 8),), 4, MODELS)


def test_inputs_that_ignore_the_batch_size_are_refused():
    with pytest.raises(TraceError, match="whatever the batch size; make their first dimension the batch size"):
        trace(load().build(), lambda n: (torch.randn(4, 8),), 4, MODELS)


def test_leaf_modules_stand_whole_under_their_own_names():
    model_file = load("branchy")
    traced = trace(model_file.build(), lambda n: (torch.randn(n, 3, 8, 8),), 4, MODELS)
    operators = traced.by_name
    assert operators["lstm"].op == "LSTM"
    assert operators["attention"].op == "MultiheadAttention"
    assert {"relu@0", "relu@1"} <= set(operators), "a module called twice is two operators"
    assert operators["triu"].constant
    assert not operators["cat"].constant
    assert [str(d) for d in operators["conv"].outputs[0].shape] == ["batch", "8", "8", "8"]
    line = re.search(r"small.py:(\d+)", operators["cat"].location)
    assert "torch.cat" in MODELS.read_text().splitlines()[int(line[1]) - 1]


def test_operators_that_share_a_changing_buffer_stand_together():
    model_file = load("no_grad")
    assert trace(model_file.build(), model_file.example_inputs, 4, MODELS).together == (("norm@0", "norm@1"),)


class Views(torch.nn.Linear):
    """A layer, and tensors over the memory of its weight."""

    def __init__(self, how):
        super().__init__(8, 8)
        self.second, row = torch.nn.Linear(8, 8), self.weight.detach()[1]
        if how == "pieces":  # of one storage, that do not overlap
            pieces = torch.randn(2, 8, 8)
            self.weight, self.second.weight = map(torch.nn.Parameter, pieces)
        elif how == "columns":
            columns = torch.randn(8, 16).chunk(2, 1)
            self.weight, self.second.weight = map(torch.nn.Parameter, columns)
        elif how == "unused":
            self.register_buffer("row", row)
        self.rows = [row if how == "in a list" else row.clone()]
        self.row_of_other = row if how == "attribute" else row.clone()

    def forward(self, x):
        return self.second(super().forward(x)) + self.rows[0] + self.row_of_other


def test_operators_over_the_memory_of_one_parameter_stand_together():
    def together(how):
        return trace(Views(how), lambda n: (torch.randn(n, 8),), 4, MODELS).together

    assert together("pieces") == together("copies") == ()
    assert together("attribute") == (("linear", "add_1"),)
    assert together("columns") == (("linear", "second"),)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("unused", "row shares memory with weight. forward uses only the latter.*clone"),
        ("in a list", r"test_frontend.py:\d+: .* the memory of parameter weight.*register_buf"),
    ],
)
def test_what_no_stage_could_keep_over_the_memory_of_a_parameter_is_refused(how, what):
    with pytest.raises(TraceError, match=f"(?s){what}"):
        trace(Views(how), lambda n: (torch.randn(n, 8),), 4, MODELS)


class OwnGenerator(torch.nn.Linear):
    """A layer with noise from a generator of its own."""

    def forward(self, x):
        return super().forward(x + torch.randn(x.shape, generator=self.generator))


def test_a_generator_of_a_models_own_is_told_from_what_cannot_be_traced():
    """The advice was a module of its own, which is refused as well."""
    model = OwnGenerator(8, 8)
    model.generator = torch.Generator()
    with pytest.raises(
        TraceError, match=r"(?s)cannot trace this line.*; if it draws from a generator of its own, draw f"
    ):
        trace(model, lambda n: (torch.randn(n, 8),), 4, MODELS)


def test_tracing_leaves_the_model_usable():
    model_file = load("branchy")
    model = model_file.build()
    trace(model, lambda n: (torch.randn(n, 3, 8, 8),), 4, MODELS)
    assert model.training
    assert "forward" not in vars(model.conv)
    model(torch.randn(2, 3, 8, 8))["logits"].sum().backward()


def test_nothing_of_a_traced_model_is_kept():
    """A worker that checks its stage files would hold the graph of the whole model for as long as it trains."""

    def kept():
        gc.collect()
        return sum(type(o) in (torch.fx.Node, LeafCall) for o in gc.get_objects())

    before = kept()  # other tests of this process may have compiled models
    assert trace(load("branchy").build(), lambda n: (torch.randn(n, 3, 8, 8),), 4, MODELS).operators
    assert kept() <= before


def test_references_and_settings_are_read():
    assert parse_ref("model.py") == ModelRef(source="model.py")
    ref = parse_ref("pkg.mod:vgg", ["layers=12", "rate=0.5", "tied=true", "size=small"])
    assert ref == ModelRef(
        source="pkg.mod", function="vgg", settings={"layers": 12, "rate": 0.5, "tied": True, "size": "small"}
    )


@pytest.mark.parametrize("text", ["model.py:", "model.py:a b", "model.py:f()"])
def test_bad_reference_is_refused(text):
    with pytest.raises(UsageError, match="not the name of a function"):
        parse_ref(text)


def test_bad_setting_is_refused():
    with pytest.raises(UsageError, match="not NAME=VALUE"):
        parse_ref("model.py", ["layers"])


@pytest.mark.parametrize("value", ["None", "[1, 2]", "{'a': 1}", "(1,)"])
def test_a_setting_that_no_file_can_hold_is_refused_and_the_hint_passes_it_as_a_text(value):
    with pytest.raises(UsageError, match="is not a text, a number, true or false") as refused:
        parse_settings([f"x={value}"])
    (hint,) = shlex.split(refused.value.remedy.partition("--set ")[2])
    assert parse_settings([hint, "ids=1,2"]) == {"x": value, "ids": "1,2"}


SIZED = """
import torch
def model(width=8): return torch.nn.Linear(width, 1)
def example_inputs(batch_size, width=8): return torch.randn(batch_size, width)
def dataset(split, width=8): return [(split, width)]
"""


def test_settings_go_to_the_functions_that_have_parameters_for_them(tmp_path):
    file = write(tmp_path, SIZED)
    narrow = replace(file, ref=file.ref.model_copy(update={"settings": {"width": 3}}))
    for sized, width in ((file, 8), (narrow, 3)):
        assert sized.build().in_features == width
        assert sized.example_inputs(2).tensors[0].shape == (2, width)
        assert sized.dataset("valid") == [("valid", width)]


def test_missing_file_is_named():
    with pytest.raises(UsageError, match=r"there is no file nowhere.py"):
        ModelFile.load(ModelRef(source="nowhere.py"), trusted=True)


def test_a_module_of_a_package_that_is_not_on_the_path_is_found(tmp_path, monkeypatch):
    """`pip install -e` gives Python a finder of its own instead of a folder on sys.path."""
    monkeypatch.chdir(tmp_path)
    root = Path(pdtool.__file__).parent.parent
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry).resolve() != root])
    assert find_source("pdtool.zoo.llm") == root / "pdtool" / "zoo" / "llm.py"


def test_numpys_float64_is_named_as_the_cause(tmp_path):
    path = tmp_path / "doubles.py"
    path.write_text(
        "import torch\ndef model():\n    return torch.nn.Linear(4, 2)\n"
        "def example_inputs(n):\n    return torch.zeros(n, 4, dtype=torch.float64)\n"
    )
    with pytest.raises(ModelError, match="Double and Float; numpy's numbers are float64: cast them"):
        measure(ModelFile.load(ModelRef(source=str(path)), trusted=True), batch_size=4)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("model = nn.Linear(2, 2)", "model is a module, not a function that builds one; write `def model"),
        ("def model():\n    return torch.jit.script(nn.Linear(2, 2))", "returned a torch.jit.ScriptModule"),
    ],
)
def test_what_is_no_function_that_builds_a_module_is_refused(tmp_path, model, message):
    path = tmp_path / "built.py"
    path.write_text(f"import torch\nfrom torch import nn\n{model}\n")
    with pytest.raises(ModelError, match=re.escape(message)):
        ModelFile.load(ModelRef(source=str(path)), trusted=True).build()


def test_missing_function_lists_what_there_is(tmp_path):
    with pytest.raises(ModelError, match=r"model.py has no function model\(\); it defines: net, loss"):
        write(tmp_path, "def net(): pass\ndef loss(o, t): pass\n")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def model():\n    return 3\n", r"model.py:1: model\(\) returned int, not a torch.nn.Module"),
        ("def model():\n    x = 1\n    raise ValueError('no')\n", r"model.py:3: model\(\) raised ValueError: no"),
        ("def model(layers):\n    pass\n", r"does not take these settings .*it takes: layers"),
    ],
)
def test_faulty_model_function_is_explained(text, what, tmp_path):
    with pytest.raises(ModelError, match=what):
        write(tmp_path, text).build()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def model(:\n", r"model.py:1: "),
        ("import os\n1 / 0\n", r"model.py:2: importing it raised ZeroDivisionError"),
        (
            "from . import nets\n",
            r"model.py:1: .*relative import.*; name the file as a module of its package, such as \w+\.model",
        ),
    ],
)
def test_file_that_cannot_be_imported_is_explained(text, what, tmp_path):
    with pytest.raises(ModelError, match=what):
        write(tmp_path, text)


STREAM = "class Stream(IterableDataset):\n    def __len__(self): return 8\n    def __iter__(self): yield 1, 2\n"
DATA = (
    f"from torch.utils.data import IterableDataset\n{STREAM}def model(): pass\ndef dataset(split):\n    return {{}}\n"
)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ("[]", "dataset\\('train'\\) is empty"),
        ("3", "returned int, not a torch Dataset; return one with __len__ and __getitem__"),
        ("[1, 2, 3, 4]", "not a pair"),
        ("[(1, 2)]", r"1 sample, fewer than the 3 that tracing needs"),
    ],
)
def test_faulty_dataset_is_explained(data, what, tmp_path):
    with pytest.raises(ModelError, match=what):
        write(tmp_path, DATA.format(data)).example_batch(4)


@pytest.mark.parametrize("size", [3, 4])
def test_a_minibatch_may_be_the_whole_training_set(size, tmp_path):
    """And yet the model is traced for any number of samples."""
    data = "[(torch.ones(2), 0)] * " + str(max(size, 4))
    model = "import torch\ndef model(): return torch.nn.Linear(2, 2)\n"
    file = write(tmp_path, f"{model}def dataset(split): return {data}\n")
    traced = trace_file(file, file.build(), size)
    assert traced.output.meta(7).shape == (7, 2)


def test_inputs_must_be_tensors(tmp_path):
    with pytest.raises(ModelError, match="input 0 of a minibatch is int"):
        write(tmp_path, "def model(): pass\ndef example_inputs(n): return 3\n").example_inputs(4)


def test_optimizer_and_loss_are_checked(tmp_path):
    text = "def model(): pass\ndef optimizer(p): return 1\ndef loss(o, t): return o\n"
    with pytest.raises(ModelError, match="returned int, not an Optimizer"):
        write(tmp_path, text).optimizer([])
    with pytest.raises(ModelError, match=r"returned \(2,\), not a scalar"):
        write(tmp_path, text).loss(torch.zeros(2), None)


@pytest.mark.parametrize(
    ("hints", "match"),
    [
        ("{'nosplit': []}", r"HINTS: has unknown keys \['nosplit'\]; use no_split, pin and opaque"),
        ("{1: 2, 'a': 3}", r"HINTS: has unknown keys \[1, 'a'\]"),
        ("5", r"HINTS: 5 is not a dict; write \{"),
        ("['no_split']", "is not a dict"),
        ("{'no_split': 'block'}", r'\["no_split"\]: .block. is not a list of module paths; write'),
        ("{'no_split': [1]}", r"\[1\] is not a list of module paths"),
        ("{'pin': ['head']}", r'HINTS\["pin"\]: \[.head.\] is not a dict of module paths and stages'),
        ("{'pin': {0: 'head'}}", "0 is not a module path"),
        (
            "{'pin': {'head': '0'}}",
            r'\["pin"\]\[.head.\]: .0. is not a stage; write 0 for the first or -1 for the last',
        ),
        ("{'pin': {'head': True}}", "True is not a stage"),
        ("{'pin': {'head': 1.5}}", r"1\.5 is not a stage"),
        ("{'pin': {'head': -10**15}}", "-1000000000000000 is not a stage"),
    ],
)
def test_hints_of_the_wrong_kind_are_refused(hints, match, tmp_path):
    with pytest.raises(ModelError, match=match) as caught:
        write(tmp_path, f"def model(): pass\nHINTS = {hints}\n")
    assert "HINTS" in str(caught.value)


def test_constants_of_training_are_checked_when_the_file_is_loaded(tmp_path):
    with pytest.raises(ModelError, match=r"MAX_GRAD_NORM: -1\.0 is not a positive finite number"):
        write(tmp_path, "def model(): pass\nMAX_GRAD_NORM = -1.0\n")


def test_hints_are_read(tmp_path):
    hints = write(tmp_path, "def model(): pass\nHINTS = {'no_split': ['a'], 'pin': {'b': -1}}\n").hints
    assert (hints.no_split, hints.pin) == (("a",), {"b": -1})


@pytest.mark.parametrize("value", ["1e999", "-1e999", "1" * 400])
def test_settings_that_are_no_usable_number_are_refused(value):
    with pytest.raises(UsageError, match=r"--set width: .*(not a finite number|has 400 digits, more than 30)"):
        parse_ref("model.py", [f"width={value}"])


@pytest.mark.parametrize("value", ["(" * 5000, "1" * 5000, "[" * 500])
def test_settings_that_python_cannot_read_are_texts(value):
    assert parse_ref("model.py", [f"width={value}"]).settings == {"width": value}


@pytest.mark.parametrize("text", ["x" * 501, "a\x1bb.py", "model.py:modèle"])
def test_models_that_no_artifact_can_name_are_refused(text):
    """They were tracebacks of pydantic."""
    with pytest.raises(UsageError, match=r"model '|is not the name of a function"):
        parse_ref(text)


def test_a_file_whose_name_no_profile_can_have(tmp_path):
    path = tmp_path / "my'model.py"
    path.write_text(
        "import torch\ndef model(): return torch.nn.Linear(2, 2)\ndef example_inputs(n): return torch.ones(n, 2)\n"
    )
    with pytest.raises(ModelError, match=r"its profile cannot be written: name: "):
        measure(ModelFile.load(parse_ref(str(path)), trusted=True), batch_size=2)


def test_a_model_named_by_an_artifact_must_lie_here(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("raise SystemExit('imported')\n")
    with pytest.raises(UsageError, match=r"outside the current folder.*--model"):
        ModelFile.load(ModelRef(source=str(path)))


def test_a_model_behind_a_symlink_sees_the_places_that_python_gives_it(tmp_path, monkeypatch):
    """`__file__` is the link, beside which its data may lie; its modules are beside the file itself."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    for name in ("real", "links"):
        (tmp_path / name).mkdir()
    target, link = tmp_path / "real/network.py", tmp_path / "links/model.py"
    target.write_text("import sys\nPLACES = f'{__file__} {sys.path[0]}'\nprint(PLACES)\ndef model(): 1 // 0\n")
    link.symlink_to("../real/network.py")
    (tmp_path / "folder").symlink_to("links")
    for path in (link, tmp_path / "folder/model.py"):
        python = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
        file = ModelFile.load(ModelRef(source=str(path)), trusted=True)
        assert f"{file.module.PLACES}\n" == python.stdout == f"{path} {tmp_path.resolve()}/real\n"
        with pytest.raises(ModelError, match=r"^model.py:4: model\(\) raised ZeroDivisionError"):
            file.build()


def test_a_changed_model_is_stale_and_not_imported(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("raise SystemExit('imported')\n")
    with pytest.raises(StaleError, match="has changed since it was profiled"):
        ModelFile.load(ModelRef(source=str(path)), trusted=True, digests={str(path): "0" * 64})


def test_the_zoo_is_trusted_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ModelFile.load(ModelRef(source="pdtool.zoo.digits")).name == "digits"


@pytest.mark.parametrize("name", ["loss", "target"])
def test_a_part_of_the_model_may_be_named_like_a_node_of_pdtools_own(name, tmp_path):
    text = "import torch\nfrom torch import nn\ndef model():\n    model = nn.Sequential(nn.Linear(4, 4))\n"
    text += f"    model.add_module({name!r}, nn.Linear(4, 2))\n    return model\n"
    text += "def dataset(split): return torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 2))\n"
    text += "def loss(output, target): return (output - target).square().mean()\n"
    text += "def optimizer(named): return torch.optim.SGD([p for _, p in named], lr=0.1)\n"
    model_file = write(tmp_path, text)
    profile = measure(model_file, batch_size=4)
    assert {"loss", "target", f"{name}_1"} < set(profile.by_name)
    check_profile(trace_file(model_file, model_file.build(), 4), profile, model_file.ref.source)


def test_a_model_that_is_one_leaf_is_traced():
    traced = trace(torch.nn.Linear(8, 3), lambda n: (torch.randn(n, 8),), 4, MODELS)
    assert [op.op for op in traced.operators] == ["input", "linear"]


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        ("3", r"model.py:2: metrics\(\) returned 3"),
        ("{'a': 1}", r"return \{name: \(sum, count\)\}"),
        ("{'loss': (1, 1)}", "names 'loss'"),
    ],
)
def test_faulty_metrics_are_explained(returned, what, tmp_path):
    text = f"def model(): pass\ndef metrics(o, t): return {returned}\n"
    with pytest.raises(ModelError, match=what):
        write(tmp_path, text).metrics(None, None)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def loss(o, t): return None\n", r"model.py:2: loss\(\) returned NoneType, not a scalar tensor"),
        (
            "import torch\ndef loss(o, t): return torch.tensor(1j)\n",
            r"returned torch.complex64, not a real number; return",
        ),
        ("def optimizer(named): return 3\n", r"model.py:2: optimizer\(\) returned int, not an Optimizer"),
        ("def dataset(split): return []\n", r"model.py:2: dataset\('train'\) is empty"),
        (
            "from operator import attrgetter\ndataset = attrgetter('x')\n",
            r"^model.py: attrgetter\(\) raised .*has no attribute 'x'",
        ),
        ("from builtins import id as dataset\n", r"^model.py: dataset\('train'\) returned int, not a torch Dataset"),
    ],
)
def test_what_a_function_wrongly_returns_is_told_with_its_line(text, what, tmp_path):
    file = write(tmp_path, "def model(): pass\n" + text)
    with pytest.raises(ModelError, match=what):
        file.loss(None, None) if "loss" in text else file.optimizer([]) if "named" in text else file.dataset("train")


def test_replicas_begin_alike_however_the_weights_are_drawn(tmp_path):
    """Each worker builds the model for itself."""
    text = """
import random
import numpy
import torch
from torch import nn

def model():
    net = nn.Linear(3, 1)
    net.bias.data.fill_(random.random())
    net.register_buffer("k", torch.from_numpy(numpy.random.rand(3)))
    return net
"""
    file = write(tmp_path, text)
    first, second, other = file.build(7), file.build(7), file.build(8)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])
        assert not torch.equal(tensor, other.state_dict()[name])


BATCHED = """
import torch
from torch.utils.data import Dataset, Subset
class Data(Dataset):
    def __len__(self): return 12
    def __getitem__(self, i): return torch.tensor(float(i)), i
class Batched(Data):
    def __getitems__(self, indices): return [(torch.tensor(100.0 + len(indices)), i) for i in indices]
class Whole(Data):
    def __getitems__(self, indices): return torch.arange(len(indices)) + 0.0, torch.tensor(indices)
DATA = {"plain": Data(), "batched": Batched()}
DATA |= {"subset": Subset(Batched(), range(2, 12)), "of plain": Subset(Data(), [3, 2, 1])}
def model(): pass
def dataset(split): return DATA[split]
"""


@pytest.mark.parametrize("split", ["plain", "batched", "subset", "of plain"])
def test_samples_are_read_as_a_dataloader_reads_them(tmp_path, split):
    file = write(tmp_path, BATCHED)
    data = file.dataset(split)
    inputs, target = next(iter(DataLoader(data, batch_size=3)))
    own = file.collate(file.read(data, range(3), split), range(3), split)
    assert torch.equal(own[0], inputs)
    assert torch.equal(own[1], target)


def test_a_dataset_may_give_a_minibatch_as_a_whole_to_collate_only(tmp_path):
    text = BATCHED.replace("DATA[split]", "Whole()")
    file = write(tmp_path, text)
    with pytest.raises(ModelError, match=r"__getitems__ of dataset.'train'. does not return a list of the 4 samples"):
        file.example_batch(4)
    assert torch.equal(write(tmp_path, text + "collate = tuple").example_batch(4)[1], torch.arange(4))


def test_an_error_of_getitems_names_its_line_and_samples(tmp_path):
    file = write(tmp_path, BATCHED.replace("return [(torch.tensor(100.0", "1 / 0; return [(torch.tensor(100.0"))
    with pytest.raises(ModelError, match=r"model.py:8: batched, samples 0, 1, raised ZeroDivisionError"):
        file.read(file.dataset("batched"), range(2), "batched")


@pytest.mark.parametrize(
    ("missing", "what"),
    [
        ("None", "returned NoneType, not a torch Dataset"),
        ("[]", "is empty"),
        ("torch.utils.data.Subset([1], [])", "is empty"),
    ],
)
def test_a_model_without_a_validation_set_is_told_what_to_do(tmp_path, missing, what):
    file = write(tmp_path, f"import torch\ndef model(): pass\ndef dataset(split): return {missing}\n")
    remedy = "each epoch ends with a validation: return samples for it, such as some of the training set"
    with pytest.raises(ModelError, match=rf"model.py:3: dataset\('valid'\) {what}; {remedy}"):
        file.dataset("valid")


DEFAULTS = """
import torch
from torch import nn
{import_}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
    {decorator}
    def forward(self, x):
        {forward}
        return self.last(self.first(x))
def model():
    {model}
    return Net()
def dataset(split):
    {dataset}
    return [(torch.randn(8), i % 2) for i in range(8)]
def optimizer(named):
    {optimizer}
    return torch.optim.SGD([p for _, p in named], lr=0.1)
def loss(output, target):
    {loss}
    return nn.functional.cross_entropy(output, target)
"""
SETTERS = {
    "torch.set_grad_enabled(False)": "switches gradients off|none of the model's outputs has a gradient",
    "torch.set_default_dtype(torch.float64)": r"sets the default dtype to torch.float64 .*at the top of the file",
    "torch.set_default_device('meta')": "sets the default device to meta .*device of --device",
}


@pytest.mark.parametrize("statement", SETTERS)
@pytest.mark.parametrize("place", ["import_", "forward", "model", "dataset", "optimizer", "loss"])
def test_torchs_defaults_are_changed_at_the_top_of_the_file_or_nowhere(statement, place, tmp_path, monkeypatch):
    """A plain loop would go on with them, and what comes after which call depends on the plan."""
    monkeypatch.setattr("pdtool.profiler.measure._BUDGET_S", 0.0)
    empty = dict.fromkeys(["forward", "model", "dataset", "optimizer", "loss"], "pass")
    text = DEFAULTS.format(**{"import_": "", "decorator": "", **empty, place: statement})
    defaults = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()
    with undoing_user_changes():
        if place == "import_" and "dtype" in statement:
            assert measure(write(tmp_path, text), batch_size=4).by_name["first"].parameter_bytes == 8 * 72
        else:
            with pytest.raises(ModelError, match=SETTERS[statement]):
                measure(write(tmp_path, text), batch_size=4)
    assert (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()) == defaults


@pytest.mark.parametrize("statement", SETTERS)
def test_torchs_defaults_are_restored_after_an_error_too(statement):
    defaults = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()
    with pytest.raises(ZeroDivisionError), defaults_kept("forward"):
        exec(f"{statement}; 1 / 0")
    assert (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()) == defaults


def test_the_error_of_a_librarys_model_names_the_librarys_line(tmp_path, monkeypatch):
    library = tmp_path / "site-packages"
    library.mkdir()
    text = "import torch\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n        return x if x.sum() else -x\n"
    (library / "library_of_nets.py").write_text(text)
    monkeypatch.syspath_prepend(library)
    text = "from library_of_nets import Net\ndef model(): return Net(4, 4)\n"
    file = write(tmp_path, f"import torch\n{text}def example_inputs(n): return torch.randn(n, 4)\n")
    with pytest.raises(TraceError, match=r"^library_of_nets.py:4: torch.export cannot trace this line"):
        trace_file(file, file.build(), 4)


@pytest.mark.parametrize("kept", ["self.mask = torch.ones(3)", "self.register_buffer('mask', torch.ones(3), False)"])
def test_a_tensor_like_one_that_checkpoints_leave_out_can_be_made(kept, tmp_path):
    """Once, it was refused with `KeyError: 'mask'`."""
    file = write(
        tmp_path,
        f"import torch\nclass Net(torch.nn.Linear):\n    def __init__(self): super().__init__(4, 4); {kept}\n"
        "    def forward(self, x): return super().forward(x) + self.mask.new_zeros(4)\n"
        "def model(): return Net()\ndef example_inputs(n): return torch.randn(n, 4)\n",
    )
    assert trace_file(file, file.build(), 4).operators[2].op in ("zeros", "new_zeros")


@pytest.mark.parametrize("decorator", ["@torch.no_grad()", "@torch.inference_mode()"])
def test_a_forward_without_gradients_is_refused(decorator, tmp_path, monkeypatch):
    monkeypatch.setattr("pdtool.profiler.measure._BUDGET_S", 0.0)
    empty = dict.fromkeys(["import_", "forward", "model", "dataset", "optimizer", "loss"], "")
    with pytest.raises(ModelError, match=r"none of the model's outputs has a gradient.*remove torch.no_grad\(\)"):
        measure(write(tmp_path, DEFAULTS.format(decorator=decorator, **empty)), batch_size=4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_caller_without_gradients_makes_no_difference(mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pdtool.profiler.measure._BUDGET_S", 0.0)
    empty = dict.fromkeys(["import_", "decorator", "forward", "model", "dataset", "optimizer", "loss"], "")
    write(tmp_path, DEFAULTS.format(**empty))
    with mode():
        assert pdtool.profile("model.py", batch_size=4).by_name["first"].backward_s > 0
        assert not torch.is_grad_enabled()


def test_a_model_without_its_own_init_is_refused(tmp_path):
    text = "from torch import nn\nclass Net(nn.Module):\n    def __init__(self): pass\ndef model(): return Net()\n"
    with pytest.raises(ModelError, match=r"model.py:4: model\(\) returned a model that cannot be used.*super\(\)"):
        write(tmp_path, text).build()


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("dataset()", "dataset(split)"),
        ("loss(output)", "loss(output, target)"),
        ("optimizer(*, lr)", "optimizer(named_parameters)"),
    ],
)
def test_a_function_that_cannot_take_what_it_is_given_is_refused_when_the_file_is_loaded(function, call, tmp_path):
    """Once, dataset() ended in `takes 0 positional arguments but 1 was given`, and loss() after much profiling."""
    text = f"def model(): pass\n\ndef {function}: pass\n"
    shown, call = re.escape(function.replace("*, ", "")), re.escape(call)
    with pytest.raises(ModelError, match=rf"model.py:3: {shown} cannot be called as {call}; write `def {call}:`"):
        write(tmp_path, text)


@pytest.mark.parametrize(("name", "value"), [("sampler", "torch.utils.data.SequentialSampler([0])"), ("metrics", "{}")])
def test_an_object_with_the_name_of_a_function_is_refused_because_it_would_be_ignored(name, value, tmp_path):
    with pytest.raises(
        ModelError, match=rf"{name} is a \w+, not a function, so it would be ignored; write `def {name}\("
    ):
        write(tmp_path, f"import torch\ndef model(): pass\nscheduler = None\n{name} = {value}\n")


@pytest.mark.parametrize(("second", "takes"), [("total_updates=9", True), ("total", True), ("gamma=0.9", False)])
def test_a_schedule_gets_the_total_by_its_name_or_because_it_has_no_default(second, takes, tmp_path):
    file = write(tmp_path, f"def model(): pass\ndef scheduler(optimizer, {second}): pass\n")
    assert file.scheduler_takes_total is takes


def test_what_a_function_takes_besides_may_come_from_settings_and_from_anywhere(tmp_path):
    text = "import torch\nfrom functools import partial\nloss, metrics = torch.nn.MSELoss(), partial(max, key=id)\n"
    text += "def model(): pass\ndef dataset(split, root): pass\ndef collate(*all): pass\ndef scheduler(o, n): pass\n"
    assert write(tmp_path, text).has("dataset")
