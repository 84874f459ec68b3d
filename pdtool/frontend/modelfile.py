"""Load the user's model.py: an ordinary Python file with plain functions (README, "What you write: model.py")."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from pdtool.artifacts.envelope import OPERATOR_GRAPH, ModelRef, file_sha256
from pdtool.errors import FieldError, StaleError, UsageError, suggestion
from pdtool.frontend.hints import Hints
from pdtool.frontend.model_source import find_source, import_source, is_local
from pdtool.frontend.user_functions.data_functions import DataFunctions
from pdtool.frontend.user_functions.prepare_model import (
    keep_evaluation,
    make_gradients_dense,
    seed_all_generators,
    switch_off_caches,
    unwrapped,
)
from pdtool.frontend.user_functions.training_functions import TrainingFunctions


@dataclass(frozen=True)
class ModelFile(DataFunctions, TrainingFunctions):
    """A user's model file, imported."""

    @classmethod
    def load(cls, ref: ModelRef, *, trusted: bool = False, digests: Mapping[str, str] | None = None) -> ModelFile:
        """Import the file that an artifact or the user names.

        Args:
            ref: names the file, the function and its settings.
            trusted: the user named it on the command line. Of the files that an artifact names, only those under the
                current folder and pdtool's own zoo are imported.
            digests: those of the artifact that names the model. Where the operator graph is not among them, the file
                must have the bytes that it had; where it is, compare the graph after tracing (graph_check.py).

        Raises:
            UsageError: no such file or module.
            StaleError: the file changed since the artifact was made, which does not record the operator graph.
            ModelError: it cannot be imported, or lacks the function.
        """
        path = find_source(ref.source)
        if not trusted and not is_local(path):
            raise UsageError(
                f"the artifact names the model {ref.source!r}, outside the current folder",
                "check that file, then name it yourself with --model",
            )
        digests = digests or {}
        expected = digests.get(ref.source)
        if expected and OPERATOR_GRAPH not in digests and file_sha256(path) != expected:
            raise StaleError(ref.source, "has changed since it was profiled", "profile it again")
        file = cls(ref, path.absolute(), import_source(ref.source, path.absolute()))  # the module may change the folder
        file.function(ref.function)
        _ = file.hints, file.training  # checked now, not when they are first needed
        return file

    @property
    def name(self) -> str:
        """`vgg16` for `models/vgg16.py`, `vgg16-small` for its function `small`; settings make no difference."""
        return self.path.stem if self.ref.function == "model" else f"{self.path.stem}-{self.ref.function}"

    @property
    def sha256(self) -> str:
        """Digest of the source file."""
        return file_sha256(self.path)

    def build(self, seed: int = 0) -> nn.Module:
        """Build the model in training mode, its random initial weights fixed by `seed`; raises ModelError.

        Torch, Python and numpy (where something has loaded it) draw from `seed`: all replicas must begin alike.
        """
        seed_all_generators(seed)
        function = self.function(self.ref.function)
        try:
            inspect.signature(function).bind(**self.ref.settings)
        except TypeError as error:
            names = list(inspect.signature(function).parameters)
            near = "".join(suggestion(name, names) for name in self.ref.settings if name not in names)
            what = f"{self.ref.function}() does not take these settings ({error})"
            raise self.error(what, f"{near}it takes: {', '.join(names) or 'none'}") from error
        model = self.call(function, **self.ref.settings)
        if not isinstance(model, nn.Module):
            what = f"{self.ref.function}() returned {type(model).__name__}, not a torch.nn.Module"
            raise self.error_in(self.ref.function, what)
        model = unwrapped(model)
        keep_evaluation(model)
        self.call(model.train)
        make_gradients_dense(model)
        switch_off_caches(model)
        return model

    @cached_property
    def hints(self) -> Hints:
        """`HINTS`, checked."""
        try:
            return Hints.of(getattr(self.module, "HINTS", {}))
        except FieldError as fault:
            raise self.error(f"{fault.field}: {fault}") from fault
