"""Load the user's model.py: an ordinary Python file with plain functions (README, "What you write: model.py")."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from pdtool.artifacts.artifact import OPERATOR_GRAPH, ModelRef
from pdtool.errors import FieldError, StaleError, suggestion
from pdtool.files import file_sha256
from pdtool.frontend.hints import Hints
from pdtool.frontend.model_source import check_local, find_source, import_source, model_name
from pdtool.frontend.user_functions.data_functions import DataFunctions
from pdtool.frontend.user_functions.prepare_model import (
    keep_evaluation,
    make_gradients_dense,
    seed_all_generators,
    switch_off_caches,
    unwrapped,
)
from pdtool.frontend.user_functions.training_functions import TrainingFunctions
from pdtool.frontend.user_functions.user_file import DATA_FUNCTIONS, OWN_ARGUMENTS, Setting

_LOG = logging.getLogger(__name__)


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
        if not trusted:
            check_local(path)
        digests = digests or {}
        expected = digests.get(ref.source)
        if expected and OPERATOR_GRAPH not in digests and file_sha256(path) != expected:
            raise StaleError(ref.source, "has changed since it was profiled", "profile it again")
        file = cls(ref, path.absolute(), import_source(ref.source, path.absolute()))  # the module may change the folder
        _LOG.debug("imported %s", path)
        file.function(ref.function)
        _ = file.hints, file.training  # checked now, not when they are first needed
        return file

    @property
    def name(self) -> str:
        """`vgg16` for `models/vgg16.py`, `vgg16-small` for its function `small`; settings make no difference."""
        return model_name(self.path, self.ref.function)

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
            inspect.signature(function).bind(**self.model_settings)
        except TypeError as error:
            names = list(inspect.signature(function).parameters)
            near = "".join(suggestion(name, names) for name in self.model_settings if name not in names)
            what = f"{self.ref.function}() does not take these settings ({error})"
            raise self.error(what, f"{near}it takes: {', '.join(names) or 'none'}") from error
        model = self.call(function, **self.model_settings)
        if not isinstance(model, nn.Module):
            what = f"{self.ref.function}() returned {type(model).__name__}, not a torch.nn.Module"
            raise self.error_in(self.ref.function, what)
        model = unwrapped(model)
        keep_evaluation(model)
        self.call(model.train)
        make_gradients_dense(model)
        switch_off_caches(model)
        return model

    @property
    def model_settings(self) -> dict[str, Setting]:
        """The settings that the model is built with: those that it has parameters for, and those that no other function
        takes. A model with `**settings` is given all but those that a function of training takes."""
        others = OWN_ARGUMENTS.keys() - DATA_FUNCTIONS.keys() if self._takes_any_setting else OWN_ARGUMENTS
        elsewhere = {key for name in others for key in self.settings_of(name)} - {*self._model_parameters}
        return {key: value for key, value in self.ref.settings.items() if key not in elsewhere}

    @property
    def setting_names(self) -> dict[str, tuple[str, ...]]:
        """The settings that each function of the file can be given; that which builds the model is the first."""
        others = {name: self.parameters(name) for name in OWN_ARGUMENTS if self.has(name)}
        return {self.ref.function: tuple(self._model_parameters), **others}

    def takes_setting(self, name: str) -> bool:
        """Whether a function of the file can be given a setting."""
        return self._takes_any_setting or any(name in names for names in self.setting_names.values())

    @property
    def _model_parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function(self.ref.function)).parameters

    @property
    def _takes_any_setting(self) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in self._model_parameters.values())

    @cached_property
    def hints(self) -> Hints:
        """`HINTS`, checked."""
        try:
            return Hints.of(getattr(self.module, "HINTS", {}))
        except FieldError as fault:
            raise self.error(f"{fault.field}: {fault}") from fault
