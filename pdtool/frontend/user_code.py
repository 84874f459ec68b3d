"""The user's code: its file, its import, its samples, and the line that caused an error.

Importing a file executes it, so an artifact may only name files under the current folder and in pdtool's zoo.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, suppress
from functools import partial
from pathlib import Path
from symtable import symtable
from traceback import extract_tb, walk_tb
from types import FrameType, ModuleType
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset, Subset, default_collate

from pdtool.artifacts.artifact import ModelRef, fields_checked
from pdtool.artifacts.text_formats import check_plain
from pdtool.errors import FieldError, ModelError, UsageError, describe_error, refused_exit
from pdtool.frontend.user_modules import begin_import, import_file, module_name, undoing_imports

_ZOO = Path(__file__).parent.parent / "zoo"
# Code that defines names invisibly to a reader of the file.
_BINDS_UNSEEN = re.compile(r"import\s*\*|\b(global|globals|exec|eval|setattr|vars|__dict__)\b")
_USES_CLOSURE = re.compile(r"\bclosure\(\)|assert closure")
NO_CLOSURE = "a pipeline computes it once per update; use an optimizer without a closure, such as AdamW"  # it: the loss
_TRAINED_WITH = ("dataset", "loss", "optimizer")
_OF_NO_MODEL = {"torch", "pdtool"}  # libraries whose lines say nothing about the model
_importing: set[Path] = set()  # model files
# torch's settings: how to get and how to set each, and its value as torch starts.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any], Any], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
    (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "high" if os.environ.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") == "1" else "highest",
    ),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False),
    *(
        (partial(getattr, backend, name), partial(setattr, backend, name), first)
        for backend, name, first in (
            (torch.backends.mkldnn, "enabled", True),
            (torch.backends.cudnn, "enabled", True),
            (torch.backends.cudnn, "benchmark", False),
            (torch.backends.cudnn, "deterministic", False),
        )
    ),
)


def parse_ref(text: str, settings: Iterable[str] = ()) -> ModelRef:
    """Read `model.py`, `model.py:vgg16` or `package.module:vgg16` and settings `layers=12`; raises UsageError."""
    source, _, function = text.rpartition(":") if ":" in text else (text, "", "model")
    if not function.isidentifier() or not function.isascii():
        raise UsageError(f"{function!r} in {text!r} is not the name of a function", "write model.py:function")
    with fields_checked(lambda fault: UsageError(f"model {text!r:.80}: {fault}", "give it another path or name")):
        source = str(Path(source)) if "/" in source else source  # ./model.py is model.py
        return ModelRef(source=source, function=function, settings=parse_settings(settings))


def parse_settings(settings: Iterable[str]) -> dict[str, str | int | float | bool]:
    """Read settings such as `layers=12`, as numbers where possible; raises UsageError.

    `ids=1,2` is a text, but [1,2] and None are refused, because whoever writes them means no text.
    """
    values: dict[str, str | int | float | bool] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"setting {setting!r} is not NAME=VALUE", "write --set layers=12")
        found = _literal(value)
        if not isinstance(found, (int, float, str)):
            what = f"setting {setting} is not a text, a number, true or false"
            raise UsageError(what, f"for a text, write --set {shlex.quote(f'{key}={value!r}')}")
        values[key] = found
        try:
            check_plain(values[key])
        except FieldError as fault:
            raise UsageError(f"--set {key}: {fault}", "pass a number in the range of a float, or a string") from None
    return values


def _literal(text: str) -> object:
    """The value that Python reads in `text`; without quotes or brackets around it, it may be a text."""
    try:
        value = ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
    return value if isinstance(value, (int, float, str)) or value is None or text[0] in "([{" else text


def find_source(source: str) -> Path:
    """Find the file of `model.py` or `package.module`, without importing it; raises UsageError."""
    if os.path.isfile(source) and not source.endswith(".py"):
        remedy = "name the Python file with model(); a profile is for `pdtool partition`, a plan for codegen and run"
        raise UsageError(f"model {source!r} is not a Python file", remedy)
    names = source.split(".")
    if source.endswith(".py") or "/" in source or not all(name.isidentifier() for name in names):
        path = Path(source)
    else:
        roots = [Path.cwd(), *(Path(entry) for entry in sys.path if entry)]
        candidates = [root.joinpath(*names).with_suffix(".py") for root in roots]
        candidates += [folder.joinpath(*names[1:]).with_suffix(".py") for folder in _package_folders(names[0])]
        path = next((file for file in candidates if os.path.isfile(file)), Path(*names).with_suffix(".py"))
    if not os.path.isfile(path):  # unlike Path.is_file(), it takes any text
        remedy = "name a Python file, or a module such as package.module"
        raise UsageError(f"model {source!r}: there is no file {path}", remedy)
    return path


def _package_folders(name: str) -> list[Path]:
    """The folders of a package that Python finds otherwise than by sys.path, such as one of `pip install -e`."""
    try:
        spec = importlib.util.find_spec(name)  # imports nothing, as the name has no dot
    except (ImportError, ValueError):  # a broken finder, or a module that was not imported from a file
        spec = None
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


def import_source(source: str, path: Path) -> ModuleType:
    """Import the file that `find_source` found; raises ModelError.

    As with `python model.py`, its folder stays first on sys.path, so later imports find it. Python's rule for symlinks
    holds too: `__file__` is the link, and the folder is that of the link's target. sys.argv is that of
    `python model.py`, however this process was started.

    Args:
        path: absolute, because the file may change the current folder.
    """
    if path in _importing:
        what = f"{path.name} calls pdtool when it is imported, and pdtool imports it to find its functions"
        raise ModelError(what, 'put these calls under `if __name__ == "__main__":`')
    _importing.add(path)
    is_module = not source.endswith(".py") and "/" not in source
    sys.path.insert(0, str(Path.cwd() if is_module else path.resolve().parent))
    sys.argv = [str(path)]
    name = "" if is_module else module_name(path)
    multiprocessing.set_start_method(None, force=True)  # a file may set it, but only where nobody has
    begin_import(path, path.resolve().parents[source.count(".") if is_module else 0], name)
    with defaults_kept(f"{path.name}: importing it", may_set_dtype=True):
        try:
            if is_module:
                return importlib.import_module(source)
            return import_file(name, path)
        except SyntaxError as error:
            file = Path(error.filename or source)  # the model's own, or one that it imports
            name = source if file.resolve() == path.resolve() else file.name
            line = f":{error.lineno}" if error.lineno else ""
            raise ModelError(f"{name}{line}: {error.msg}") from error
        except ModelError:  # of such a call
            raise
        except Exception as error:
            raise error_at(path, error, "importing it") from error
        finally:
            _importing.discard(path)
            with suppress(ValueError):  # in another thread
                if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # Python could not wait for child processes
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextmanager
def undoing_user_changes() -> Iterator[None]:
    """Undo at the end what the user's code and its import changed in this process: the current folder, signal handlers,
    filters of warnings, torch's settings, hooks of all optimizers, and imports (see undoing_imports). It begins with
    torch's own settings, as a worker does.

    Raises:
        ModelError: the user's code calls sys.exit().
    """
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with chdir("."), undoing_imports(), catch_warnings(), _torch_as_it_starts():
        try:
            yield
        except SystemExit as end:
            raise refused_exit(end) from end
        finally:
            for number, handler in handlers.items():
                if handler is not None and signal.getsignal(number) is not handler:  # None: not set from Python
                    signal.signal(number, handler)


@contextmanager
def _torch_as_it_starts() -> Iterator[None]:
    """Give torch the settings and modes that it starts with, in this context; but keep its number of threads, and the
    hooks of all optimizers."""
    threads, device = torch.get_num_threads(), torch.get_default_device()
    with ExitStack() as undo:
        undo.callback(torch.set_num_threads, threads)
        for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
            undo.enter_context(patch.dict(hooks))
        for get, change, first in _SETTINGS:
            with suppress(RuntimeError):  # TF32 is set in a way that these functions cannot tell, or flags are frozen
                before = get()
                change(first)
                undo.callback(_changed_if_possible, change, before)
        if device.type != "cpu":
            torch.set_default_device(None)
            if torch.get_default_device() == device:  # the caller is in `with torch.device("cuda")`
                undo.enter_context(torch.device("cpu"))
            else:
                undo.callback(torch.set_default_device, device)
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            undo.enter_context(torch.autocast(kind, enabled=False))
        undo.enter_context(torch.inference_mode(False))
        undo.enter_context(torch.enable_grad())
        yield


def _changed_if_possible(change: Callable[[Any], Any], value: Any) -> None:
    with suppress(RuntimeError):  # user code has frozen the flags
        change(value)


@contextmanager
def defaults_kept(where: str, *, may_set_dtype: bool = False) -> Iterator[None]:
    """Check that user code leaves torch's process-wide defaults alone; restore them in any case.

    In a plain loop, changed defaults would hold for all later code. In a run, the plan decides which code is later.

    Args:
        where: the user code, as `model.py:12: model()`.
        may_set_dtype: whether it may change the default dtype.

    Raises:
        ModelError: it has changed one of them.
    """
    gradients, dtype, device = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()
    try:
        yield
    finally:
        gradients_after, dtype_after = torch.is_grad_enabled(), torch.get_default_dtype()
        device_after = torch.get_default_device()
        torch.set_grad_enabled(gradients)
        if device_after != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        if not may_set_dtype:
            torch.set_default_dtype(dtype)
    if gradients_after != gradients:
        what = f"{where} switches gradients {'off' if gradients else 'on'} for all later code"
        raise ModelError(what, "use `with torch.no_grad():` around the code that needs no gradients")
    if device_after != device:
        what = f"{where} sets the default device to {device_after} for all later code"
        raise ModelError(what, "leave it out: pdtool moves model and data to the device of --device")
    if dtype_after != dtype and not may_set_dtype:
        what = f"{where} sets the default dtype to {dtype_after} for all later code"
        raise ModelError(what, "set it at the top of the file")


def model_name(path: Path, function: str) -> str:
    """Name a model by its file, and by its function unless that is `model`."""
    return path.stem if function == "model" else f"{path.stem}-{function}"


def in_zoo(path: Path) -> bool:
    """Whether a file is one of pdtool's own examples, which need the extra `zoo`."""
    return path.resolve().is_relative_to(_ZOO)


def is_local(path: Path, folder: Path | None = None) -> bool:
    """Whether a file is under a folder (by default the current one) or in pdtool's own zoo."""
    return in_zoo(path) or path.resolve().is_relative_to((folder or Path.cwd()).resolve())


def check_local(path: Path) -> None:
    """Check a model file that an artifact names, not the user; raises UsageError if it is not local."""
    if not is_local(path):
        what = f"the artifact names the model {str(path)!r}, outside the current folder"
        raise UsageError(what, "check that file, then name it yourself with --model")


def is_stream(data: object) -> bool:
    """Whether a dataset is a stream: its samples have no numbers, even if it has a length."""
    return isinstance(data, IterableDataset)


def gives_samples_together(data: Any) -> bool:
    """Whether a DataLoader asks a dataset for all samples of a minibatch at once; a Subset passes that on."""
    if isinstance(data, Subset) and type(data).__getitems__ is Subset.__getitems__:
        return gives_samples_together(data.dataset)
    return callable(getattr(data, "__getitems__", None))


def stacked(samples: Sequence[Any]) -> Any:
    """Stack samples as torch does; in a DataLoader's worker torch cannot stack tensors that require a gradient."""
    with torch.no_grad():
        return default_collate(list(samples))


def check_pairs(path: Path, samples: Any, indices: Sequence[int], name: str) -> None:
    """Check that there are as many samples as indices, each a pair (inputs, target); raises ModelError."""
    if not isinstance(samples, (list, tuple)) or len(samples) != len(indices):
        what = f"{path.name}: __getitems__ of {name} does not return a list of the {len(indices)} samples asked for"
        raise ModelError(what, "return such a list, or define collate(samples), which takes what it returns")
    for index, sample in zip(indices, samples, strict=True):
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            what = f"{path.name}: {name}, sample {index}, is not a pair (inputs, target)"
            raise ModelError(what, "return one, or define collate(samples), which returns the pair of a minibatch")


def difference_of_samples(indices: Sequence[int], samples: Sequence[Any]) -> str:
    """Return `which must be alike (sample 7: float32[3], int; sample 2: float32[4], int),`."""
    described = [description(sample) for sample in samples]
    other = next((k for k, each in enumerate(described) if each != described[0]), None)
    if other is None:
        return f"each {described[0]},"
    return f"which must be alike (sample {indices[0]}: {described[0]}; sample {indices[other]}: {described[other]}),"


def description(sample: Any) -> str:
    """Return the arrays and other values of a sample: `float32[3, 6], int`."""
    return ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__
        for leaf in tree_leaves(sample)
    )


def check_trainable(path: Path, model: str) -> None:
    """Check that a file has the functions that training needs, by reading it without importing it; raises ModelError.

    Args:
        model: name of the function that builds the model.
    """
    try:
        text = path.read_text()
        bound = {symbol.get_name() for symbol in symtable(text, str(path), "exec").get_symbols()}
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # importing it will say more
        return
    if _BINDS_UNSEEN.search(text):
        return
    for name in (model, *_TRAINED_WITH):
        if name not in bound:
            defined = [each.name for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)]
            raise missing_function(path, name, defined)


def missing_function(path: Path, name: str, defined: Sequence[str]) -> ModelError:
    """Return the error of a file that lacks a function.

    Args:
        defined: names of the functions that it has.
    """
    remedy = f"it defines: {', '.join(defined) or 'no functions'}"
    if not {"model", *_TRAINED_WITH} & {*defined}:  # a script
        remedy += (
            "; pdtool imports this file and calls its functions. It does not run it as a script. `pdtool init example` "
            "writes example/model.py, which shows these functions (docs/model-file.md)"
        )
    return ModelError(f"{path.name} has no function {name}()", remedy)


def error_at(path: Path, error: BaseException, what: str) -> ModelError:
    """Make an error from the exception of `what`, a part of the user's code; its text begins with the line."""
    remedy, text = "", describe_error(error)
    if isinstance(error, ModuleNotFoundError) and in_zoo(path):
        remedy = "run pip install '.[zoo]' in your clone of pdtool"
    elif isinstance(error, RuntimeError) and "Double" in text and "Float" in text:
        remedy = "numpy's numbers are float64: cast them to float32 in dataset()"
    elif isinstance(error, RuntimeError) and "differentiated Tensor" in text and what == "loss()":  # a gradient penalty
        remedy = (
            "pdtool gives loss() the model's output without its graph back to the inputs: compute this gradient in the "
            'forward of a module that HINTS["opaque"] names, and return it with the output (docs/model-file.md)'
        )
    elif "step " in what and _seems_to_need_closure(error):
        remedy = f"a step gets no closure that computes the loss again, because {NO_CLOSURE}"
    elif "index out of range in self" in text:  # of torch.embedding and index_select
        remedy = "let dataset() return indices that exist: from 0 to an embedding's num_embeddings - 1"
    elif isinstance(error, ImportError) and "relative import" in text:
        remedy = f"name the file as a module of its package, such as {path.parent.name}.{path.stem}"
    return ModelError(f"{user_line(error, path)}{what} raised {text}", remedy)


def _seems_to_need_closure(error: BaseException) -> bool:
    """Whether an optimizer's step(closure=None) seems to have failed because it got no closure."""
    lines = [frame.line or "" for frame in extract_tb(error.__traceback__)]
    return "closure" in describe_error(error) or any(map(_USES_CLOSURE.search, lines))


def user_line(error: BaseException, path: Path) -> str:
    """Return `model.py:12: `, the deepest line of the user's own code in the error's traceback, for a message; without
    one, that of a library other than torch."""
    line, name, folder, of_library = 0, path.name, path.resolve().parent, f"{path.name}: "
    for frame, number in walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename.replace("\0", ""))
        if file.name.startswith("<"):  # code that some library has generated
            continue
        if file.resolve() == path.resolve() or (
            file.resolve().is_relative_to(folder) and "site-packages" not in str(file)
        ):
            line, name = number, file.name
        elif "site-packages" in file.parts and not _OF_NO_MODEL.intersection(file.parts):
            of_library = f"{file.name}:{number}: "
    return f"{name}:{line}: " if line else of_library


def line_of(frame: FrameType) -> str:
    """Return `file.py:12`, the line that a frame is at."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def definition_line(function: Callable[..., Any], path: Path) -> str:
    """Return `model.py:12: `, where a function of the user's is defined, for a message; `path` is the user's file."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or Path(code.co_filename).resolve() != path.resolve():
        return f"{path.name}: "
    return f"{path.name}:{code.co_firstlineno}: "
