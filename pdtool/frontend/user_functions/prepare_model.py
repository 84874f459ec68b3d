"""What the user's model is changed in before it is used, and the generators of random numbers that it is built with."""

from __future__ import annotations

import random
import sys
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def seed_all_generators(seed: int) -> None:
    """Seed torch, Python and, where something has loaded it, numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of torch.compile, for which `run` has --compile, or of data parallelism, which plans
    replace."""
    while True:
        if type(model).__name__ == "OptimizedModule":  # of torch._dynamo, which takes a second to import
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        else:
            return model


def keep_evaluation(model: nn.Module) -> None:
    """Let the modules that model() put into evaluation mode stay in it, whatever mode the model is put into.

    Such are a frozen batch norm, or a teacher; an overridden train() decides for itself. Where all of the model is in
    evaluation mode, as what `from_pretrained` returns, nothing is meant by it.
    """
    for module in model.modules() if model.training else ():
        if not module.training:
            module.train = partial(_train_children, module)  # type: ignore[method-assign]


def _train_children(module: nn.Module, mode: bool = True) -> nn.Module:
    for child in module.children():
        child.train(mode)
    return module


def make_gradients_dense(model: nn.Module) -> None:
    """Let embeddings have the same gradients as dense tensors: stages, replicas and messages have no sparse ones."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False


def switch_off_caches(model: nn.Module) -> None:
    """Let a model of `transformers` make no cache of keys, which is for generation and would be among its outputs."""
    for module in model.modules() if hasattr(model, "config") else ():
        config: Any = getattr(module, "config", None)
        if getattr(config, "__dict__", {}).get("use_cache") is True:
            config.use_cache = False
