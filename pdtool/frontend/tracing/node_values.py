"""What the nodes of an exported graph stand for, as far as it was read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from pdtool.errors import TraceError
from pdtool.frontend.operators import BATCH, Size, Value

_TORCH = str(Path(torch.__file__).parent)


class NodeValues:
    """What each node stands for: a Value, a State, a constant, a size, or a list of these."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self._values: dict[fx.Node, Any] = {}
        self._batch = _batch_symbol(program)
        self._order = {node: i for i, node in enumerate(program.graph.nodes)}

    def __setitem__(self, node: fx.Node, value: Any) -> None:
        self._values[node] = value

    def argument(self, argument: Any) -> Any:
        """Return an argument of a node, nested in containers, with what nodes and sizes stand for."""
        return pytree.tree_map(lambda a: self._values[a] if isinstance(a, fx.Node) else self.size(a), argument)

    def size(self, value: Any, node: fx.Node | None = None) -> Any:
        """Return a symbolic integer as a Size, or as a number; anything else as it is.

        Raises:
            TraceError: it follows from something else than the number of samples; `node` tells the line.
        """
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr.subs(self._batch, BATCH) if self._batch is not None else value.node.expr
        if expression.is_number:
            return int(expression)
        if expression.free_symbols != {BATCH}:
            what = f"the size {value} depends on the values of a tensor"
            remedy = "give every tensor a shape that follows from the minibatch size alone"
            raise TraceError(what, remedy, location=location(node) if node else "")
        return Size(sympy.sympify(expression))

    def source(self, value: Any) -> fx.Node | None:
        """The latest node that stands for `value`."""
        return next((n for n in reversed(self._values) if self._values[n] is value), None)

    def is_shared_view(self, node: fx.Node, writer: fx.Node) -> bool:
        """Whether `node` is a view of a tensor that is still used after `writer`."""
        while isinstance(node.target, torch._ops.OpOverload) and node.args and isinstance(node.args[0], fx.Node):
            alias = node.target._schema.returns[0].alias_info
            if alias is None or alias.is_write:
                return False
            node = node.args[0]
            if any(self._order[user] > self._order[writer] for user in node.users):
                return True
        return False

    def replace(self, old: Value, new: Value) -> None:
        """Let later users of `old`, which was written in place, take `new`."""
        for node, value in self._values.items():
            if value is old:
                self._values[node] = new
            elif isinstance(value, list):
                self._values[node] = [new if v is old else v for v in value]


def _batch_symbol(program: torch.export.ExportedProgram) -> Any:
    """The symbol of the minibatch's size in the shapes of the inputs; None where there is none."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor):
            for dim in value.shape:
                if isinstance(dim, torch.SymInt):
                    return next(iter(dim.node.expr.free_symbols))
    return None


def location(node: fx.Node) -> str:
    """Return `file.py:12`: the innermost line outside torch that made this node."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    outside = [
        (file, number) for file, number in lines if not file.startswith(_TORCH) and "/pdtool/frontend/" not in file
    ]
    return f"{Path(outside[-1][0]).name}:{outside[-1][1]}" if outside else ""
