"""The user's model.py, an ordinary Python file with plain functions (README, "What you write: model.py").

A ModelFile calls these functions, checks their results, and names the line where they fail. The model is changed so
that stages can compute it: no data parallelism, no sparse gradients, no caches.
"""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from pdtool.artifacts.artifact import OPERATOR_GRAPH, ModelRef
from pdtool.errors import FieldError, ModelError, StaleError, describe_error, suggestion
from pdtool.files import file_sha256
from pdtool.frontend.model_io import LEAVES, ModelInputs
from pdtool.frontend.model_rules import (
    DATA_FUNCTIONS,
    OWN_ARGUMENTS,
    Hints,
    TrainingOptions,
    optimizer_fault,
    schedule_fault,
    state_fault,
    takes_total,
)
from pdtool.frontend.random_numbers import seed_generators
from pdtool.frontend.user_code import (
    check_local,
    check_pairs,
    defaults_kept,
    definition_line,
    difference_of_samples,
    error_at,
    find_source,
    gives_samples_together,
    import_source,
    is_stream,
    missing_function,
    model_name,
    stacked,
)
from pdtool.units import counted

Setting = str | int | float | bool
NamedParameters = Iterable[tuple[str, nn.Parameter]]
_MAX_METRIC_NAME = 100
_NO_VALIDATION = "each epoch ends with a validation: return samples for it, such as some of the training set"
_FEWEST_SAMPLES = 3  # the model is traced with minibatches of two sizes, of which the smallest are 2 and 3
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFile:
    """A user's model file, imported.

    Attributes:
        ref: where it came from.
        path: its source file.
        module: the imported module.
    """

    ref: ModelRef
    path: Path
    module: ModuleType

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules at the top level of the file, such as a criterion, by name."""
        return {name: value for name, value in vars(self.module).items() if isinstance(value, nn.Module)}

    def has(self, function: str) -> bool:
        """Whether the file defines `function`."""
        return callable(vars(self.module).get(function))

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function of the file; raises ModelError, which lists the file's functions."""
        if not self.has(name):
            functions = (value for value in vars(self.module).values() if inspect.isfunction(value))
            defined = [f.__name__ for f in functions if f.__module__ == self.module.__name__]
            raise missing_function(self.path, name, defined)
        return getattr(self.module, name)  # type: ignore[no-any-return]

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a user's function; raises ModelError with the line where it fails."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            name = getattr(function, "__name__", type(function).__name__)  # nn.CrossEntropyLoss() has none
            texts = ", ".join(f"{k}={v[:40]!r}" for k, v in kwargs.items() if isinstance(v, str))  # lr='1/10' of --set
            raise self.error_at(error, f"{name}({texts})") from error

    def call_with_settings(self, name: str, *arguments: Any) -> Any:
        """Call a function of the file with its arguments, and with the settings that it has parameters for."""
        return self.call(self.function(name), *arguments, **self.settings_of(name))

    def call_once(self, name: str, /, *arguments: Any, **settings: Any) -> Any:
        """Call a function that is not called for each minibatch, and check that it leaves torch's defaults alone."""
        function = self.function(name)
        with defaults_kept(f"{definition_line(function, self.path)}{name}()"):
            return self.call(function, *arguments, **settings)

    def call_seeded(self, seed: int, name: str, /, *arguments: Any, **settings: Any) -> Any:
        """Do `call_once` with seeded generators: torch's (all devices), Python's and numpy's."""
        torch.manual_seed(seed)
        seed_generators(seed)
        return self.call_once(name, *arguments, **settings)

    def settings_of(self, name: str) -> dict[str, Setting]:
        """Return the settings that a function of OWN_ARGUMENTS takes; none if the file does not define it."""
        settings = self.ref.settings
        taken = self.parameters(name) if settings and self.has(name) else ()
        return {key: settings[key] for key in taken if key in settings}

    def parameters(self, name: str) -> tuple[str, ...]:
        """Return the names of a function's parameters that a setting may fill: all but those that pdtool passes."""
        passed = OWN_ARGUMENTS.get(name, ())  # to the function that builds the model: none
        try:
            parameters = list(inspect.signature(self.function(name)).parameters.values())[len(passed) :]
        except (TypeError, ValueError):  # of a function in C
            return ()
        if name == "scheduler" and takes_total(self.function(name)):
            parameters = parameters[1:]
        return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))

    def check_signatures(self) -> None:
        """Check that the functions of the file are functions, and accept pdtool's arguments; raises ModelError."""
        for name, arguments in OWN_ARGUMENTS.items():
            if (value := vars(self.module).get(name)) is None:
                continue
            call = f"{name}({', '.join(arguments)})"
            if not callable(value):
                what = f"{name} is a {type(value).__name__}, not a function, so it would be ignored"
                raise self.error(what, f"write `def {call}:` (docs/model-file.md), or rename it")
            try:
                signature = inspect.signature(value)
            except (TypeError, ValueError):  # of a function in C
                continue
            try:
                signature.bind_partial(*arguments)  # settings may give its other parameters
            except TypeError as error:
                what = f"{name}({', '.join(signature.parameters)}) cannot be called as {call}"
                raise self.error_in(name, what, f"write `def {call}:` (docs/model-file.md)") from error

    def error(self, what: str, remedy: str = "") -> ModelError:
        """Make an error whose text begins with the file's name."""
        return ModelError(f"{self.path.name}: {what}", remedy)

    def error_in(self, function: str, what: str, remedy: str = "") -> ModelError:
        """Make an error about a function's result; its text begins with the line that defines the function."""
        return ModelError(f"{definition_line(self.function(function), self.path)}{what}", remedy)

    def error_at(self, error: Exception, what: str) -> ModelError:
        """Make an error from the exception of `what`, a part of the user's code; its text begins with the line."""
        return error_at(self.path, error, what)

    # The functions that give data.

    def example_inputs(self, batch_size: int) -> ModelInputs:
        """Return the model's arguments for a minibatch: from `example_inputs`, or the first of the training set.

        Raises:
            ModelError: the user's function fails, or an input is neither a tensor nor a constant.
        """
        if self.has("example_inputs"):
            inputs = self.call_once("example_inputs", batch_size, **self.settings_of("example_inputs"))
        else:
            inputs = self.example_batch(batch_size)[0]
        return self.as_inputs(inputs)

    def as_inputs(self, inputs: Any) -> ModelInputs:
        """Return the inputs of a minibatch as the model's arguments; raises ModelError for anything else."""
        arguments = ModelInputs.of(inputs)
        leaves = arguments.leaves
        allowed = LEAVES if any(isinstance(value, Tensor) for _, value in leaves) else (Tensor,)
        for name, value in leaves:
            if not isinstance(value, allowed):
                remedy = "return a tensor, or a tuple or dict of tensors, from example_inputs and dataset"
                raise self.error(f"input {name} of a minibatch is {type(value).__name__}, not a tensor", remedy)
        return arguments

    def check_arguments(self, inputs: ModelInputs, expected: Sequence[str], where: str) -> None:
        """Check that a minibatch is passed to the model with the `expected` signature; raises ModelError."""
        if inputs.signature != tuple(expected):
            given, taken = (", ".join(names) or "tensors by position" for names in (inputs.signature, expected))
            what = f"{where} gives the model other arguments ({given}) than it was traced with ({taken})"
            raise self.error(what, "return the same from example_inputs and dataset. A dict is passed by name")

    def example_batch(self, batch_size: int, split: str = "train") -> tuple[Any, Any]:
        """Return (inputs, target): the first `batch_size` samples of a split, collated; of "valid" perhaps fewer."""
        data, name = (self.training_set() if split == "train" else self.dataset(split)), f"dataset({split!r})"
        if is_stream(data):
            samples = list(islice(self.stream(data, name), batch_size))
            count = len(samples)
        else:
            count = min(batch_size, self.samples(data, name) or 0)
            samples = self.read(data, range(count), name)
        if count < batch_size and split == "train":
            found = f"the training set has {counted(count, 'sample')}, fewer than"
            if count < _FEWEST_SAMPLES:
                remedy = f"return {_FEWEST_SAMPLES} or more from {name}"
                raise self.error(f"{found} the {_FEWEST_SAMPLES} that tracing needs", remedy)
            raise self.error(f"{found} one minibatch of {batch_size}", "profile with a smaller --batch-size")
        return self.collate(samples, range(count), name)

    @cached_property
    def _training_set(self) -> Dataset[Any]:
        return self.dataset("train")

    def training_set(self) -> Dataset[Any]:
        """Return the training set, which is made only once, because that may take long; a stream is made each time."""
        if is_stream(self._training_set):  # which may have been read to its end
            return self.dataset("train")
        seed_generators(0)  # reading draws the same random numbers each time
        return self._training_set

    def dataset(self, split: str) -> Dataset[Any]:
        """Return the samples (inputs, target) of `split`, which is "train" or "valid".

        Both are made from the same random numbers, whatever the seed of the run. So `random_split` in `dataset()`
        divides the samples in the same way each time, and the splits never overlap.
        """
        data = self.call_seeded(0, "dataset", split, **self.settings_of("dataset"))
        if not is_stream(data) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            what = f"dataset({split!r}) returned {type(data).__name__}, not a torch Dataset"
            remedy = "return one with __len__ and __getitem__, an IterableDataset, or a list of samples"
            raise self.error_in("dataset", what, _NO_VALIDATION if split == "valid" and data is None else remedy)
        if is_stream(data) and split == "train" and self.has("sampler"):
            what = (
                f"sampler() chooses samples by number, but the samples of a {type(data).__name__} (a stream) have none"
            )
            raise self.error_in("sampler", what, "leave it out, or return a dataset with __getitem__")
        if self.samples(data, f"dataset({split!r})") == 0:
            remedy = _NO_VALIDATION if split == "valid" else "return at least one minibatch of samples"
            raise self.error_in("dataset", f"dataset({split!r}) is empty", remedy)
        return data  # type: ignore[no-any-return]

    def samples(self, data: Any, name: str) -> int | None:
        """Return the length of a split of the dataset, which `name` names in an error.

        None for an IterableDataset without a length, or whose __len__ raises the usual error.
        """
        try:
            return len(data)
        except Exception as error:
            if is_stream(data) and isinstance(error, (TypeError, NotImplementedError)):
                return None
            raise self.error_at(error, f"the length of {name}") from error

    def sampler(self, data: Any, epoch: int) -> list[int]:
        """Return the numbers of an epoch's samples of the training set `data`, in order, from the user's function.

        Raises:
            ModelError: it fails, or returns something other than numbers.
        """
        returned = self.call_with_settings("sampler", data, epoch)
        try:
            return [operator.index(index) for index in returned]
        except TypeError as error:
            what = f"sampler() returned {returned!r:.80}, which is not a list of sample indices ({error})"
            raise self.error(what, "return a list of integers or a Sampler; a BatchSampler yields batches") from error

    def read(self, data: Any, indices: Sequence[int], name: str) -> Any:
        """Return some samples of a split of the dataset, which `name` names in an error; raises ModelError.

        They are a list, or the result of a dataset that gives all of them at once.
        """
        if not gives_samples_together(data):
            return [self._sample(data, index, name) for index in indices]
        try:
            return data.__getitems__([*indices])
        except Exception as error:
            raise self.error_at(error, f"{name}, samples {', '.join(map(str, indices))},") from error

    def _sample(self, data: Any, index: int, name: str) -> Any:
        try:
            return data[index]
        except Exception as error:
            raise self.error_at(error, f"{name}, sample {index},") from error

    def stream(self, data: Any, name: str) -> Iterator[Any]:
        """Iterate over a split that is an IterableDataset, which `name` names in an error; raises ModelError."""
        index = 0
        try:
            for sample in data:
                yield sample
                index += 1
        except Exception as error:
            raise self.error_at(error, f"{name}, sample {index},") from error

    def collate(self, samples: Any, indices: Sequence[int], name: str) -> tuple[Any, Any]:
        """Return (inputs, target) of some samples of a split of the dataset, by the user's `collate` or as torch does.

        Args:
            indices: the numbers of the samples, for errors.
            name: name of the split, for errors.

        Raises:
            ModelError: a sample does not match the others, or collate() returns no pair.
        """
        is_own = self.has("collate")
        if not is_own:
            check_pairs(self.path, samples, indices, name)
        try:
            minibatch = self.module.collate(samples, **self.settings_of("collate")) if is_own else stacked(samples)
        except Exception as error:
            if is_own:
                raise self.error_at(error, f"collate() of {counted(len(indices), 'sample')} of {name}") from error
            raise self.error_at(error, f"the samples of {name}, {difference_of_samples(indices, samples)}") from error
        if not isinstance(minibatch, (tuple, list)) or len(minibatch) != 2:
            raise self.error(f"collate() returned {type(minibatch).__name__}, not a pair (inputs, target)")
        return minibatch[0], minibatch[1]

    # The functions and constants that say how to train.

    @cached_property
    def training(self) -> TrainingOptions:
        """The constants of training, checked."""
        try:
            return TrainingOptions.of(vars(self.module))
        except FieldError as fault:
            raise self.error(f"{fault.field}: {fault}") from fault

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the user's loss: a tensor of one element, the mean over the minibatch."""
        value = self.call_with_settings("loss", output, target)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            remedy = "return one tensor of one element, the mean over the minibatch"
            raise self.error_in("loss", f"loss() returned {shape}, not a scalar tensor", remedy)
        if value.is_complex():
            raise self.error_in("loss", f"loss() returned {value.dtype}, not a real number; return its abs() or real")
        return value

    def optimizer(self, named_parameters: NamedParameters) -> Optimizer:
        """Make the user's optimizer over all parameters of the model, under their original names.

        Raises:
            ModelError: it cannot be used, or takes a parameter that is not the model's, which no stage would update.
        """
        named = list(named_parameters)
        known = {id(parameter) for _, parameter in named}
        returned = self.call_once("optimizer", named, **self.settings_of("optimizer"))
        if fault := optimizer_fault(returned):
            raise self.error_in("optimizer", f"optimizer() {fault}")
        for parameter in (p for group in returned.param_groups for p in group["params"]):
            if id(parameter) not in known:
                what = f"optimizer() takes a parameter of shape {list(parameter.shape)} that is not one of the model's"
                raise self.error_in("optimizer", what, "use only the parameters that it is called with")
        return returned  # type: ignore[no-any-return]

    def scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler | None:
        """Make the user's learning-rate schedule, for a whole run of `total_steps` if it asks; None without one."""
        if not self.has("scheduler"):
            return None
        total = [total_steps] if self.scheduler_takes_total else []
        scheduler = self.call_with_settings("scheduler", optimizer, *total)
        if fault := schedule_fault(scheduler):
            raise self.error_in("scheduler", f"scheduler() {fault}")
        return scheduler  # type: ignore[no-any-return]

    @property
    def scheduler_takes_total(self) -> bool:
        """Whether scheduler() asks for `total_steps`."""
        return self.has("scheduler") and takes_total(self.module.scheduler)

    def after_update(self, named_parameters: NamedParameters, update: int) -> None:
        """Call the user's function, if there is one, with parameters after their update number `update` (from 1)."""
        if self.has("after_update"):
            with torch.no_grad():
                self.call_with_settings("after_update", named_parameters, update)

    def metrics(self, output: Any, target: Any) -> dict[str, tuple[Any, float]]:
        """Return the user's metrics as {name: (sum, count)}; {} without any.

        A sum is a number. For `summarize_metrics` it may also be a CPU tensor of any shape.
        """
        if not self.has("metrics"):
            return {}
        returned = self.call_with_settings("metrics", output, target)
        as_sum = _tensor_or_number if self.has("summarize_metrics") else float

        def pair(value: Any) -> tuple[Any, float]:
            total, number = value
            return as_sum(total), float(number)

        remedy = (
            "return {name: (sum, count)} with sums of one element. For larger tensors, also write summarize_metrics()"
        )
        return self._by_name("metrics", returned, pair, remedy)

    def summarize_metrics(self, totals: Mapping[str, tuple[Any, float]]) -> dict[str, float]:
        """Return the figures of a validation: the means, or the results of the user's function for the totals.

        Metrics with a count of 0 have no mean and are left out.

        Args:
            totals: what `metrics` returned, {name: (sum, count)}, added up over all minibatches.
        """
        if not self.has("summarize_metrics"):
            return {name: total / count for name, (total, count) in totals.items() if count}
        returned = self.call_with_settings("summarize_metrics", dict(totals))
        return self._by_name("summarize_metrics", returned, float, "return {name: number}")

    def _by_name(self, function: str, returned: Any, read: Callable[[Any], Any], remedy: str) -> dict[str, Any]:
        """Return a function's value for each metric name, converted by `read`; raises ModelError."""
        try:
            values = {str(name): read(value) for name, value in returned.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise self.error_in(function, f"{function}() returned {returned!r:.200}", remedy) from error
        for name in values:
            if not 0 < len(name) <= _MAX_METRIC_NAME or not name.isprintable():
                short = repr(name if len(name) <= _MAX_METRIC_NAME else name[:_MAX_METRIC_NAME] + "…")
                remedy = f"use 1 to {_MAX_METRIC_NAME} printable characters"
                raise self.error(f"{function}() names {short}, which cannot be printed in a table", remedy)
            if name == "loss":
                raise self.error(f"{function}() names {name!r}, which is the validation loss", "rename it")
        return values

    # The model, and the file as a whole.

    @classmethod
    def load(cls, ref: ModelRef, *, trusted: bool = False, digests: Mapping[str, str] | None = None) -> ModelFile:
        """Import the file that an artifact or the user names.

        Args:
            ref: names the file, the function and its settings.
            trusted: the user named it on the command line. Of the files that an artifact names, only those under the
                current folder and pdtool's own zoo are imported.
            digests: the digests of the artifact that names the model. If it records no operator graph, the file must be
                unchanged, byte for byte. Otherwise compare the graph after tracing (graph_digest).

        Raises:
            UsageError: no such file or module.
            StaleError: the file changed since the artifact was made, which does not record the operator graph.
            ModelError: it cannot be imported, lacks the function, or a function does not accept pdtool's arguments.
        """
        path = find_source(ref.source)
        if not trusted:
            check_local(path)
        digests = digests or {}
        expected = digests.get(ref.source)
        if expected and OPERATOR_GRAPH not in digests and file_sha256(path) != expected:
            raise StaleError(ref.source, "has changed since it was profiled", "profile it again")
        file = cls(ref, path.absolute(), import_source(ref.source, path.absolute()))  # the module may change the folder
        _LOG.debug("imported %s", path)
        file.function(ref.function)
        file.check_signatures()
        _ = file.hints, file.training  # check now, not when they are first needed
        return file

    @property
    def name(self) -> str:
        """`vgg16` for `models/vgg16.py`, `vgg16-small` for its function `small`, whatever the settings."""
        return model_name(self.path, self.ref.function)

    @property
    def sha256(self) -> str:
        """Digest of the source file."""
        return file_sha256(self.path)

    def build(self, seed: int = 0) -> nn.Module:
        """Build the model in training mode, its random initial weights fixed by `seed`; raises ModelError.

        Torch, Python and numpy draw from `seed`, because all replicas must start with the same weights.
        """
        function = self.function(self.ref.function)
        if isinstance(function, nn.Module):
            what = f"{self.ref.function} is a module, not a function that builds one"
            raise self.error(what, f"write `def {self.ref.function}(): return ...`")
        try:
            inspect.signature(function).bind(**self.model_settings)
        except TypeError as error:
            names = list(inspect.signature(function).parameters)
            unknown = [name for name in self.model_settings if name not in names]
            near = "".join(suggestion(name, names) for name in unknown)
            what = f"{self.ref.function}() does not take these settings ({error})"
            add = f"; or give another function a parameter, as in optimizer(..., {unknown[0]}=...)" if unknown else ""
            raise self.error(what, f"{near} it takes: {', '.join(names) or 'none'}{add}".lstrip()) from error
        model = self.call_seeded(seed, self.ref.function, **self.model_settings)
        if not isinstance(model, nn.Module):
            what = f"{self.ref.function}() returned {type(model).__name__}, not a torch.nn.Module"
            raise self.error_in(self.ref.function, what)
        try:
            _ = [module.training for module in model.modules()]
        except AttributeError as error:
            what = f"{self.ref.function}() returned a model that cannot be used: {describe_error(error)}"
            raise self.error_in(self.ref.function, what, "call super().__init__() first in each __init__") from error
        model = unwrapped(model)
        if isinstance(model, torch.jit.ScriptModule):
            what = f"{self.ref.function}() returned a torch.jit.ScriptModule, which torch.export cannot trace"
            raise self.error_in(self.ref.function, what, "return the module itself; modules inside it may be scripted")
        keep_evaluation(model)
        self.call(model.train)
        make_gradients_dense(model)
        switch_off_caches(model)
        if fault := state_fault(model, self.call(model.state_dict)):
            raise self.error(f"state_dict() of the model {fault}")
        return model

    @property
    def model_settings(self) -> dict[str, Setting]:
        """The settings for building the model: those that it has parameters for, and those that no other function
        takes. A model with `**settings` gets all but those that a training function takes."""
        others = OWN_ARGUMENTS.keys() - DATA_FUNCTIONS.keys() if self._takes_any_setting else OWN_ARGUMENTS
        elsewhere = {key for name in others for key in self.settings_of(name)} - {*self.parameters(self.ref.function)}
        return {key: value for key, value in self.ref.settings.items() if key not in elsewhere}

    @property
    def setting_names(self) -> dict[str, tuple[str, ...]]:
        """The settings that each function of the file accepts; the function that builds the model comes first."""
        return {name: self.parameters(name) for name in (self.ref.function, *OWN_ARGUMENTS) if self.has(name)}

    def takes_setting(self, name: str) -> bool:
        """Whether a function of the file can be given a setting."""
        return self._takes_any_setting or any(name in names for names in self.setting_names.values())

    @property
    def _takes_any_setting(self) -> bool:
        parameters = inspect.signature(self.function(self.ref.function)).parameters.values()
        return any(p.kind is p.VAR_KEYWORD for p in parameters)

    @cached_property
    def hints(self) -> Hints:
        """`HINTS`, checked."""
        try:
            return Hints.of(getattr(self.module, "HINTS", {}))
        except FieldError as fault:
            raise self.error(f"{fault.field}: {fault}") from fault


def unwrapped(model: nn.Module) -> nn.Module:
    """Unwrap a model from torch.compile (`run` has --compile for that) and from data parallelism (plans replace it)."""
    while True:
        if type(model).__name__ == "OptimizedModule":  # of torch._dynamo, which takes a second to import
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        else:
            return model


def keep_evaluation(model: nn.Module) -> None:
    """Keep modules that model() put into evaluation mode in that mode, whatever mode the model is put into.

    A frozen batch norm or a teacher is such a module. An overridden train() decides for itself. If all of the model is
    in evaluation mode, as after `from_pretrained`, it is not meant, so ignore it.
    """
    for module in model.modules() if model.training else ():
        if not module.training:
            module.train = partial(_train_children, module)  # type: ignore[method-assign]


def make_gradients_dense(model: nn.Module) -> None:
    """Give embeddings dense gradients, because stages, replicas and messages support no sparse ones."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False


def switch_off_caches(model: nn.Module) -> None:
    """Switch off the key cache of a `transformers` model: it is for generation and would be among the outputs."""
    for module in model.modules() if hasattr(model, "config") else ():
        config: Any = getattr(module, "config", None)
        if getattr(config, "__dict__", {}).get("use_cache") is True:
            config.use_cache = False


def _train_children(module: nn.Module, mode: bool = True) -> nn.Module:
    for child in module.children():
        child.train(mode)
    return module


def _tensor_or_number(total: Any) -> Any:
    """Return a sum in the form in which it is added up and sent to other workers."""
    return total.detach().cpu() if isinstance(total, Tensor) else float(total)
