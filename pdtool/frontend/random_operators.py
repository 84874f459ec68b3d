"""Say which modules and which ATen operators draw random numbers, and like which tensors."""

from __future__ import annotations

import torch
from torch import nn

from pdtool.frontend.operators import Operator, Value

_PROBABILITIES = ("p", "dropout", "dropout_p")  # arguments of ATen operators that draw nothing where one of them is 0
_MODES = ("train", "training")  # and where one of these is False

# What draws by sample and channel, or for a tensor of its own, instead of like an input.
_DRAWING_BY_INDEX = {"feature_dropout", "feature_alpha_dropout", "scaled_dot_product_attention"}
_DRAWING_BY_INDEX |= {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_MODULES_DRAWING_BY_INDEX = (
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.FeatureAlphaDropout,
    nn.MultiheadAttention,
    nn.RNNBase,
)


def module_draws(module: nn.Module) -> bool:
    """Whether a call of `module` may draw random numbers; those that are not torch's own may."""
    return any(is_user_module(m) or _drops(m) or isinstance(m, nn.RReLU) for m in module.modules())


def is_user_module(module: nn.Module) -> bool:
    """Whether the type of a module is defined outside torch.nn."""
    return not type(module).__module__.startswith("torch.nn.")


def operator_draws(op: Operator, model: nn.Module) -> bool:
    """Whether an operator of `model` may draw random numbers, in training or in evaluation mode."""
    if op.target is None:
        return op.is_module and module_draws(model.get_submodule(op.module))
    if torch.Tag.nondeterministic_seeded not in op.target.tags:
        return False
    is_off = any(op.kwargs.get(name) is False for name in _MODES)
    return not is_off and all(op.kwargs.get(name, 1) != 0 for name in _PROBABILITIES)


def module_draws_by_layout(module: nn.Module) -> bool:
    """Whether the memory layout of what a random module takes decides which element gets which number."""
    return not isinstance(module, _MODULES_DRAWING_BY_INDEX)


def values_drawn_like(op: Operator) -> list[Value]:
    """Return the tensors whose memory layout decides which element gets which number of a random ATen operator."""
    by_index = op.target is None or op.target._schema.name.split("::")[-1] in _DRAWING_BY_INDEX
    return [] if by_index else list(dict.fromkeys(op.values))


def _drops(module: nn.Module) -> bool:
    """Whether it is a Dropout layer, or has a dropout of its own (nn.LSTM, nn.MultiheadAttention)."""
    return bool(getattr(module, "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout", 0))
