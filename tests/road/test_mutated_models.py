"""No model.py ends in a traceback: models of the collection, changed at random, are trained or refused in a line.

The seed is the day's, or PDTOOL_SEED; an assertion names it, the model, and what was changed.
"""

from __future__ import annotations

import ast
import os
import random
import re
import signal
import time
import traceback
from collections.abc import Iterator
from datetime import date

import pytest
import torch
from click.testing import CliRunner
from collection import FAMILIES, tasks, write_model

from pdtool.cli.commands.app import main

SEED = int(os.environ.get("PDTOOL_SEED", date.today().toordinal()))
BUDGET_S = float(os.environ.get("PDTOOL_MUTATIONS_S", "10"))  # of the processor
MAX_S, RUNS = 30, 2  # for one model; and how many go through `run`, too
STATEMENTS = """
self.kept = x
self.kept = x.detach().sum()
self.names = [*getattr(self, "names", []), 1]
self.register_buffer("table", torch.arange(4.0))
self.register_buffer("table", x)
self.extra = nn.Parameter(torch.ones(3))
self.extra = nn.Linear(2, 2)
self.zero_grad()
self.eval()
self.train(not self.training)
self.forward = None
self._buffers = None
self.to(torch.float64)
self.to("meta")
del self.training
raise KeyError("x")
raise StopIteration
import sys; sys.exit(3)
return None
return 1.0
return "text"
return {1: 2}
return [[], ()]
return (x for x in range(3))
x.add_(1)
x.data.zero_()
x.requires_grad_(True)
x.grad.zero_()
x.numpy()
x.tolist()
x = x.detach()
x = x.double()
x = x.to("meta")
x = x.to_sparse()
x = x[0]
x = x.sum()
x = x[:, None]
x = x.expand(2, *x.shape)
x = x + float("inf")
x = x * complex(0, 1)
x = torch.cat([x, x])
x = x[torch.randperm(len(x))]
x = x[x > 0]
x = torch.empty(0)
x = torch.tensor(3.0)
x = torch.tensor([float("nan")] * 100)[3] * x
torch.set_grad_enabled(False)
torch.set_default_dtype(torch.float64)
torch.autograd.backward(x.sum())
for p in self.parameters(): p.data.mul_(0.9)
for p in self.parameters(): p.requires_grad_(False)
for p in self.parameters(): p.grad = torch.ones_like(p)
if x.sum() > 0: x = -x
if x.shape[0] > 3: x = x * 2
global kept; kept = x
""".strip().splitlines()
DEFINITIONS = """
HINTS = 3
HINTS = {"opaque": ["0"], "pin": {"0": 5}}
MAX_GRAD_NORM = "x"
def dataset(split): return None
def dataset(split): return [None] * 50
def dataset(split): return [("a", "b")] * 50
def dataset(split): return [(torch.randn(i + 1), 0) for i in range(50)]
def dataset(split): return [(torch.empty(0), torch.empty(0))] * 50
def dataset(split): return [({}, 0)] * 50
def dataset(split): return [({1: torch.ones(2)}, 0)] * 50
def dataset(): return []
def example_inputs(n): return None
def example_inputs(n): return {}
def example_inputs(n): return [torch.randn(n, 2), None, "x"]
def loss(output, target): return None
def loss(output, target): return torch.ones(3, requires_grad=True)
def loss(output, target): return torch.ones((), requires_grad=True) * 1j
def loss(output, target): return output
def loss(output): return output
loss = 3
def optimizer(named): return torch.optim.SGD([], lr=1)
def optimizer(named): return torch.optim.SGD([torch.ones(3)], lr=1)
def optimizer(named): return torch.optim.SGD([p for _, p in named][:1], lr=float("nan"))
optimizer = torch.optim.SGD
def model(): return nn.Sequential()
def model(): return lambda x: x
def model(): return nn.ModuleList([nn.Linear(2, 2)])
def model(): return nn.Module()
def model(): return TASK.build().to("meta")
def model(): return TASK.build().half()
def model(): return TASK.build().requires_grad_(False)
def model(): return torch.jit.script(TASK.build())
model = nn.Linear(2, 2)
def metrics(output, target): return {1: (1, 1)}
def collate(samples): return 1, 2
def scheduler(optimizer, total): return 1
def sampler(dataset, epoch): return [-1, "x"]
def after_update(named, step): raise ValueError("x")
raise SystemExit(2)
1 / 0
""".strip().splitlines()
CONSTANTS = (0, 1, -1, 2, 3, 0.5, float("inf"), float("nan"), None, "x", True)
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.MatMult, ast.FloorDiv, ast.Mod, ast.Pow)
TASKS = tasks(*FAMILIES, "refused")
pytestmark = pytest.mark.filterwarnings("ignore")


class TookTooLong(BaseException):
    """Raised in code that a mutation keeps from ending."""


@pytest.fixture(autouse=True)
def one_process_with_an_alarm() -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise TookTooLong

    before, threads = signal.signal(signal.SIGALRM, ring), torch.get_num_threads()
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    torch.set_num_threads(threads)


@pytest.mark.rows_of_the_day(days=2)
def test_no_mutation_of_a_model_ends_in_a_traceback(folder):
    began, number, runs = time.process_time(), 0, 0
    while time.process_time() - began < BUDGET_S:
        draw = random.Random(SEED * 1000 + number)
        number += 1
        name = draw.choice(sorted(TASKS))
        file = write_model(folder.path, name)
        used = {type(module).__name__ for module in TASKS[name].build().modules()}
        text, change = mutated(file.path.read_text(), used, draw)
        file.path.write_text(text)
        signal.alarm(MAX_S)
        went_through = walk(f"PDTOOL_SEED={SEED}, model {number}: {name} with {change}", runs=runs < RUNS)
        signal.alarm(0)
        runs += went_through
    assert number > 5


def walk(what: str, *, runs: bool) -> bool:
    """Take the model.py of this folder through the commands, until one refuses it; return whether none does."""
    commands = [
        ("profile", "model.py", "--batch-size", "4", "--threads", "1"),
        ("partition", "profiles/model.json", "--topology", "2", "--straight", "--simplest", "0%", "-o", "plan.yaml"),
        ("codegen", "plan.yaml", "-o", "bundle"),
        *([("run", "plan.yaml", "--epochs", "1", "--steps", "2", "-o", "runs/m")] if runs else []),
    ]
    for command in commands:
        result = CliRunner().invoke(main, command, prog_name="pdtool")
        if result.exception and not isinstance(result.exception, SystemExit):
            pytest.fail(f"{what}: {command[0]}\n{''.join(traceback.format_exception(result.exception))}")
        assert "Traceback" not in result.output, f"{what}: {command[0]}\n{result.output}"
        assert "start it again" not in result.output, f"{what}: {command[0]}\n{result.output}"
        if result.exit_code:
            last = result.output.strip().splitlines()
            assert any(line.startswith("error: ") for line in last), f"{what}: {command[0]}\n{result.output}"
            return False
    return True


def mutated(text: str, used: set[str], draw: random.Random) -> tuple[str, str]:
    """Return a model.py with one change in the classes that are used, or of its functions; and what was changed."""
    tree = ast.parse(text)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in used]
    methods = [method for kind in classes for method in kind.body if isinstance(method, ast.FunctionDef)]
    nodes = [node for method in methods for node in ast.walk(method)]
    if draw.random() < 0.25 or not methods:
        definition = draw.choice(DEFINITIONS)
        return f"{text}\n{definition}\n", definition
    change = draw.choice([_insert, _insert, _delete, _constant, _operator, _argument])(methods, nodes, draw)
    return ast.unparse(ast.fix_missing_locations(tree)), change


def _insert(methods: list[ast.FunctionDef], nodes: list[ast.AST], draw: random.Random) -> str:
    method = draw.choice([method for method in methods if method.name == "forward"] or methods)
    argument = method.args.args[-1].arg
    statement = re.sub(r"\bx\b", argument, draw.choice(STATEMENTS))
    body = ast.parse(f"def f():\n    {statement}").body[0]
    assert isinstance(body, ast.FunctionDef)
    at = draw.randrange(len(method.body))
    method.body[at:at] = body.body
    return f"{statement!r} as statement {at} of {method.name}"


def _delete(methods: list[ast.FunctionDef], nodes: list[ast.AST], draw: random.Random) -> str:
    method = draw.choice(methods)
    at = draw.randrange(len(method.body))
    text, method.body[at] = ast.unparse(method.body[at]), ast.Pass()
    return f"{text!r} left out"


def _constant(methods: list[ast.FunctionDef], nodes: list[ast.AST], draw: random.Random) -> str:
    constant = draw.choice([node for node in nodes if isinstance(node, ast.Constant)] or [ast.Constant(0)])
    before, constant.value = constant.value, draw.choice(CONSTANTS)
    return f"{before!r} in line {getattr(constant, 'lineno', 0)} as {constant.value!r}"


def _operator(methods: list[ast.FunctionDef], nodes: list[ast.AST], draw: random.Random) -> str:
    operations = [node for node in nodes if isinstance(node, ast.BinOp)]
    if not operations:
        return _insert(methods, nodes, draw)
    operation = draw.choice(operations)
    before, operation.op = ast.unparse(operation), draw.choice(OPERATORS)()
    return f"{before!r} as {ast.unparse(operation)!r}"


def _argument(methods: list[ast.FunctionDef], nodes: list[ast.AST], draw: random.Random) -> str:
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.args]
    if not calls:
        return _delete(methods, nodes, draw)
    call = draw.choice(calls)
    before = ast.unparse(call)
    call.args.pop(draw.randrange(len(call.args)))
    return f"{before!r} as {ast.unparse(call)!r}"
