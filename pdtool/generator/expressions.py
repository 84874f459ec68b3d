"""Write a value as readable Python: ATen operators, constants, parameters and trees of modules.

An operator becomes a torch function, a method, an arithmetic operator or indexing. `module_statements` writes the
statements that build a stage's modules under their original paths.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._sympy.printers import PythonPrinter

from pdtool.frontend.leaf_modules import constructor_arguments
from pdtool.frontend.operators import LAYOUT_ARGUMENTS, ByMode, Operator, Size, State, Value, is_default

_BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_BINARY |= {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
# A template applies if every argument that it does not name has its default value; `{sizes*}` spreads a list.
_TEMPLATES = {
    **{f"{op}.{kind}": f"{{self}} {sign} {{other}}" for op, sign in _BINARY.items() for kind in ("Tensor", "Scalar")},
    "rsub.Scalar": "{other} - {self}",
    "neg": "-{self}",
    "bitwise_not": "~{self}",
    "bitwise_and.Tensor": "{self} & {other}",
    "bitwise_or.Tensor": "{self} | {other}",
    "pow.Tensor_Scalar": "{self} ** {exponent}",
    "__and__.Tensor": "{self} & {other}",
    "__or__.Tensor": "{self} | {other}",
    "addmm": "torch.addmm({self}, {mat1}, {mat2})",
    "matmul": "{self} @ {other}",
    "bmm": "{self} @ {mat2}",
    "mm": "{self} @ {mat2}",
    "reshape": "{self}.reshape({shape*})",
    "permute": "{self}.permute({dims*})",
    "expand": "{self}.expand({size*})",
    "repeat": "{self}.repeat({repeats*})",
    "to.dtype": "{self}.to({dtype})",
    "to.dtype_layout": "{self}.to({dtype})",
    "_to_copy": "{self}.to({dtype})",
    "dropout": "F.dropout({input}, p={p}, training={train})",
    "softmax.int": "F.softmax({self}, dim={dim})",
    "log_softmax.int": "F.log_softmax({self}, dim={dim})",
    "relu": "F.relu({self})",
    "gelu": "F.gelu({self}, approximate={approximate})",
    "sigmoid": "torch.sigmoid({self})",
    "tanh": "torch.tanh({self})",
    "embedding": "F.embedding({indices}, {weight})",
    "layer_norm": "F.layer_norm({input}, {normalized_shape}, {weight}, {bias}, eps={eps})",
    "cat": "torch.cat({tensors}, dim={dim})",
    "select_scatter": "torch.select_scatter({self}, {src}, dim={dim}, index={index})",
    "split_with_sizes": "{self}.split({split_sizes}, dim={dim})",
    "stack": "torch.stack({tensors}, dim={dim})",
    "broadcast_tensors": "torch.broadcast_tensors({tensors*})",
    "block_diag": "torch.block_diag({tensors*})",
    "cartesian_prod": "torch.cartesian_prod({tensors*})",
    "tensordot": "torch.tensordot({self}, {other}, dims=({dims_self}, {dims_other}))",
    "adaptive_max_pool2d": "F.adaptive_max_pool2d({self}, {output_size}, return_indices=True)",
    "adaptive_max_pool3d": "F.adaptive_max_pool3d({self}, {output_size}, return_indices=True)",
    "einsum": "torch.einsum({equation}, {tensors*})",
    "cross_entropy_loss": "F.cross_entropy({self}, {target})",
    "batch_norm": "F.batch_norm({input}, {running_mean}, {running_var}, {weight}, {bias}, training={training}, "
    "momentum={momentum}, eps={eps})",
    "instance_norm": "F.instance_norm({input}, {running_mean}, {running_var}, {weight}, {bias}, "
    "use_input_stats={use_input_stats}, momentum={momentum}, eps={eps})",
    "uniform": "torch.empty_like({self}).uniform_({from}, {to})",
    "bernoulli.p": "torch.empty_like({self}).bernoulli_({p})",
    "normal_functional": "torch.empty_like({self}).normal_({mean}, {std})",
    "exponential": "torch.empty_like({self}).exponential_({lambd})",
    "log_normal": "torch.empty_like({self}).log_normal_({mean}, {std})",
    "cauchy": "torch.empty_like({self}).cauchy_({median}, {sigma})",
    "geometric": "torch.empty_like({self}).geometric_({p})",
    "random": "torch.empty_like({self}).random_()",
    "random.to": "torch.empty_like({self}).random_({to})",
}
# The operators behind F.interpolate, by number of dimensions; the group is its mode.
_INTERPOLATION = re.compile(r"_?upsample_(\w+)\dd")
# The Python functions of these names take different arguments, or do more than the operator.
_UNLIKE_PYTHON = {"stft", "istft", "max_unpool2d", "max_unpool3d", "fractional_max_pool2d", "fractional_max_pool3d"}
_NAMESPACES = ("linalg", "special", "fft")  # of torch, which has the operator linalg_norm as torch.linalg.norm
_REDUCTIONS = ("none", "mean", "sum")  # by the operator's number; the losses in torch.nn.functional take these names
_FIELD = re.compile(r"\{(\w+)(\*?)\}")
Write = Callable[[Any], str]
Tree = dict[str, Any]  # child -> the text of a leaf module's constructor call, or the Tree below a container


def expression(op: Operator, write: Write) -> str:
    """Return the Python expression for one ATen operator.

    Args:
        op: an operator that is not a leaf call.
        write: returns the text of one argument (a tensor's variable, a parameter, a number).
    """
    name, arguments, schema, overload = op.op, op.kwargs, op.target._schema, op.target._overloadname
    if name in _INDEXING:
        return _INDEXING[name](arguments, write)
    if overload == "vec" and (interpolation := _INTERPOLATION.fullmatch(name)):
        return _interpolation(arguments, interpolation[1].replace("_", "-"), write)
    changed = {a.name for a in schema.arguments if not is_default(arguments[a.name], a)} - LAYOUT_ARGUMENTS
    template = _TEMPLATES.get(name if overload == "default" else f"{name}.{overload}")
    if template and changed - {"device"} <= {field for field, _ in _FIELD.findall(template)}:
        return _FIELD.sub(
            lambda m: ", ".join(map(write, arguments[m[1]])) if m[2] else _operand(arguments[m[1]], write), template
        )
    function = _function(op)
    if function.startswith("F.") and "reduction" in changed:
        arguments = {**arguments, "reduction": _REDUCTIONS[arguments["reduction"]]}
    required, options = _call_arguments(schema, arguments, changed, write)
    is_method = schema.arguments[0].name == "self" and "out" not in arguments and hasattr(Tensor, name)
    if is_method and isinstance(arguments["self"], (Value, State)) and _has_python_form(op):
        if not callable(getattr(Tensor, name)):
            return f"{required[0]}.{name}"  # a property, such as x.mT
        return f"{required[0]}.{name}({', '.join(required[1:] + options)})"
    return f"{function}({', '.join(required + options)})"


def _has_python_form(op: Operator) -> bool:
    """Whether torch's function or method of the operator's name takes its arguments; they take no None in a list."""
    has_none = any(isinstance(value, list) and None in value for value in op.kwargs.values())
    is_cdist_with_mode = op.op == "cdist" and op.kwargs["compute_mode"] is not None  # a number there, a name in Python
    return op.op not in _UNLIKE_PYTHON and not has_none and not is_cdist_with_mode


def _function(op: Operator) -> str:
    """Return `torch.cat`, `F.pad` or `torch.linalg.norm`; if none exists the overload, `torch.ops.aten.sin.default`.

    A loss with the default `reduction` is that of F, because torch's function of the same name has another default.
    """
    if _has_python_form(op):
        modules = [(torch, "torch"), (functional, "F")]
        is_mean = any(a.name == "reduction" and is_default(op.kwargs[a.name], a) for a in op.target._schema.arguments)
        for module, prefix in modules[::-1] if is_mean else modules:
            if callable(getattr(module, op.op, None)):
                return f"{prefix}.{op.op}"
        namespace, _, name = op.op.partition("_")
        if namespace in _NAMESPACES and callable(getattr(getattr(torch, namespace), name, None)):
            return f"torch.{namespace}.{name}"
    return f"torch.ops.{op.target}"


def _call_arguments(
    schema: Any, arguments: dict[str, Any], changed: set[str], write: Write
) -> tuple[list[str], list[str]]:
    """Return the texts of the required arguments, by position, and of the changed options, by name."""
    required, options = [], []
    for a in schema.arguments:
        if a.name in LAYOUT_ARGUMENTS or (a.has_default_value() and a.name not in changed):
            continue
        text = write(arguments[a.name])
        if a.has_default_value() or a.kwarg_only:
            if arguments[a.name] is not None:
                options.append(f"{a.name}={text}")
        elif not options:
            required.append(text)
    return required, options


def _operand(value: Any, write: Write) -> str:
    text = write(value)
    return f"({text})" if isinstance(value, (Size, ByMode)) and " " in text else text


def _select(arguments: dict[str, Any], write: Write) -> str:
    return f"{write(arguments['self'])}[{_at(arguments['dim'], write(arguments['index']))}]"


def _slice(arguments: dict[str, Any], write: Write) -> str:
    start, end, step = arguments["start"], arguments["end"], arguments["step"]
    first = "" if start in (None, 0) else write(start)
    last = "" if end is None or (isinstance(end, int) and end >= 2**62) else write(end)
    stride = "" if step == 1 else f":{write(step)}"
    return f"{write(arguments['self'])}[{_at(arguments['dim'], f'{first}:{last}{stride}')}]"


def _at(dim: int, index: str) -> str:
    """Return `:, :, 3` for dimension 2, `..., 3, :` for dimension -2."""
    return ":, " * dim + index if dim >= 0 else "..., " + index + ", :" * (-dim - 1)


def _index(arguments: dict[str, Any], write: Write) -> str:
    indices = [":" if i is None else write(i) for i in arguments["indices"]]
    return f"{write(arguments['self'])}[{', '.join(indices)}]"


_INDEXING: dict[str, Callable[[dict[str, Any], Write], str]] = {"select": _select, "slice": _slice, "index": _index}


def _interpolation(arguments: dict[str, Any], mode: str, write: Write) -> str:
    size, factors = arguments["output_size"], arguments["scale_factors"]
    if factors is not None and len(set(factors)) == 1:
        factors = factors[0]
    options = [
        f"{name}={write(value)}" for name, value in (("size", size), ("scale_factor", factors)) if value is not None
    ]
    options += [f'mode="{mode}"', *(["align_corners=True"] if arguments.get("align_corners") else [])]
    return f"F.interpolate({write(arguments['input'])}, {', '.join(options)})"


def literal(value: Any) -> str:
    """Return the Python text of a constant argument."""
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, complex):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if isinstance(value, list):
        return sequence(value, literal)
    if isinstance(value, str):
        return '"' + repr(value)[1:-1].replace('"', '\\"') + '"'
    if isinstance(value, Tensor) and not value.dim():  # on a GPU, torch.tensor would make the host wait
        return f"torch.full((), {literal(value.item())}, dtype={value.dtype}, device=device)"
    if isinstance(value, Tensor):
        return f"torch.tensor({literal(value.tolist())}, dtype={value.dtype}, device=device)"
    if isinstance(value, Size):
        text = re.sub(r"\b(Max|Min)(?=\()", lambda name: name[0].lower(), str(value))
        if re.search(r"[A-Z]\w*\(", text):  # another function of sympy or torch, such as PythonMod
            text = PythonPrinter().doprint(value.expression)
        return re.sub(r"\s*(//|[*+])\s*", r" \1 ", text)
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    raise TypeError(f"no literal for {type(value).__name__}")


def sequence(values: Sequence[Any], write: Write) -> str:
    """Return the text of a list or a tuple; `write` returns that of each value."""
    inner = ", ".join(map(write, values))
    if isinstance(values, list):
        return f"[{inner}]"
    return f"({inner},)" if len(values) == 1 else f"({inner})"


def module_statements(calls: Mapping[str, str]) -> Iterator[str]:
    """Yield the statements of `__init__` that make modules, in ModuleDicts where the names allow it.

    Args:
        calls: path of a leaf module -> the text of its constructor call; path of a container -> "".
    """
    root: Tree = {}
    for path, call in calls.items():
        *parents, last = path.split(".")
        tree = root
        for name in parents:
            tree = tree.setdefault(name, {})
        tree[last] = call or tree.get(last, {})
    yield from _fill("", root)


def access(path: str) -> str:
    """Return the expression for `path`: `layer1.0.conv1` is `self.layer1["0"].conv1`."""
    text = "self"
    for index, name in enumerate(name for name in path.split(".") if name):
        if _is_attribute(name):
            text += f".{name}"
        else:
            text += f'["{name}"]' if index else f'.get_submodule("{name}")'
    return text


def access_state(name: str) -> str:
    """Return the expression of a parameter or buffer; one in a ParameterList is `getattr(self.scales, "0")`.

    `get_parameter` would refuse the tensors of a weight version, which replace parameters in a run.
    """
    path, _, attribute = name.rpartition(".")
    return access(name) if _is_attribute(attribute) else f'getattr({access(path)}, "{attribute}")'


def set_parameter(name: str, value: str) -> str:
    """Return the statement that makes a parameter."""
    path, _, attribute = name.rpartition(".")
    if _is_attribute(attribute):
        return f"{access(name)} = {value}"
    return f'{access(path)}.register_parameter("{attribute}", {value})'


def constructor_call(module: nn.Module) -> str:
    """Return the call that makes an equal leaf module: `nn.Linear(8, 16)`."""
    arguments = [
        _constructor_literal(value) if required else f"{name}={_constructor_literal(value)}"
        for name, value, required in constructor_arguments(module)
    ]
    return f"nn.{type(module).__name__}({', '.join(arguments)})"


def _constructor_literal(value: Any) -> str:
    return sequence(tuple(value), _constructor_literal) if isinstance(value, (tuple, list)) else literal(value)


def _is_attribute(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _fits_module_dict(tree: Tree) -> bool:
    """Whether a ModuleDict can hold these names: `keys`, for example, would hide one of its methods."""
    return not any(hasattr(nn.ModuleDict, name) for name in tree)


def _expression(child: str | Tree) -> Iterator[str]:
    """Yield the lines of a leaf's constructor call, or of a container with its children."""
    if isinstance(child, str):
        yield child
    elif not child:
        yield "nn.ModuleDict()"
    elif not _fits_module_dict(child):
        yield "nn.Module()"
    else:
        yield "nn.ModuleDict({"
        for name, grandchild in child.items():
            first, *rest = _expression(grandchild)
            lines = [f'"{name}": {first}', *rest]
            yield from (f"    {line}" for line in lines[:-1])
            yield f"    {lines[-1]},"
        yield "})"


def _fill(path: str, tree: Tree) -> Iterator[str]:
    """Yield the statements that add modules to the container at `path`, "" for the stage, and to those below it."""
    for name, child in tree.items():
        lines = list(_expression(child))
        if not path and _is_attribute(name):
            lines[0] = f"self.{name} = {lines[0]}"
            yield from lines
        elif not path or not _fits_module_dict(tree):
            lines[0] = f'{access(path)}.add_module("{name}", {lines[0]}'
            lines[-1] += ")"
            yield from lines
        if not isinstance(child, str):
            yield from _fill(f"{path}.{name}", child)
