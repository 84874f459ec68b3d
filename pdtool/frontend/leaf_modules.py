"""Say which torch.nn modules are one operator each, and how such a leaf module is constructed again.

The call of a leaf module stands in the graph, in the profile and in the generated code as one operator, under the
module's original name. The table below names each type's constructor arguments; nothing is ever read from a repr.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

# Constructor arguments that are attributes of the module under the same name; `bias` is whether there is one.
# `inplace` is left out: the module may be the first of its stage, and a received tensor must not change.
_CONV = "in_channels out_channels kernel_size stride padding dilation groups bias padding_mode"
_CONV_TRANSPOSE = "in_channels out_channels kernel_size stride padding output_padding groups bias dilation padding_mode"
_NORM = "num_features eps momentum affine track_running_stats"
_RNN = "input_size hidden_size num_layers bias batch_first dropout bidirectional"
_AVERAGE_POOL = "kernel_size stride padding ceil_mode count_include_pad"
_MAX_POOL = "kernel_size stride padding dilation return_indices ceil_mode"

# Arguments that torch keeps as a tuple, and people write as one number where all dimensions have the same.
_PER_DIMENSION = {"kernel_size", "stride", "padding", "dilation", "output_padding", "normalized_shape"}

LEAF_MODULES: dict[type[nn.Module], str] = {
    nn.Linear: "in_features out_features bias",
    nn.Bilinear: "in1_features in2_features out_features bias",
    nn.Embedding: "num_embeddings embedding_dim padding_idx scale_grad_by_freq",
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _CONV),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _CONV_TRANSPOSE),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _NORM),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _NORM),
    nn.GroupNorm: "num_groups num_channels eps affine",
    nn.LayerNorm: "normalized_shape eps elementwise_affine bias",
    nn.RMSNorm: "normalized_shape eps elementwise_affine",
    nn.LSTM: _RNN + " proj_size",
    nn.GRU: _RNN,
    nn.RNN: _RNN + " nonlinearity",
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell), "input_size hidden_size bias"),
    nn.RNNCell: "input_size hidden_size bias nonlinearity",
    nn.MultiheadAttention: "embed_dim num_heads dropout bias add_zero_attn batch_first",
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), _MAX_POOL),
    nn.AvgPool1d: _AVERAGE_POOL,
    **dict.fromkeys((nn.AvgPool2d, nn.AvgPool3d), _AVERAGE_POOL + " divisor_override"),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), "output_size"),
    **dict.fromkeys((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d), "output_size return_indices"),
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout), "p"),
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid, nn.SELU), ""),
    **dict.fromkeys((nn.Sigmoid, nn.Tanh, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink, nn.Identity), ""),
    nn.LeakyReLU: "negative_slope",
    nn.ELU: "alpha",
    nn.CELU: "alpha",
    nn.GELU: "approximate",
    nn.Softplus: "beta threshold",
    nn.Hardtanh: "min_val max_val",
    nn.PReLU: "num_parameters",
    nn.GLU: "dim",
    nn.Softmax: "dim",
    nn.LogSoftmax: "dim",
    nn.Flatten: "start_dim end_dim",
    nn.Unflatten: "dim unflattened_size",
    nn.Upsample: "size scale_factor mode align_corners recompute_scale_factor",
    nn.PixelShuffle: "upscale_factor",
    nn.PixelUnshuffle: "downscale_factor",
    **dict.fromkeys((nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d), "padding"),
    **dict.fromkeys((nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReplicationPad1d, nn.ReplicationPad2d), "padding"),
}


def is_leaf(module: nn.Module) -> bool:
    """Whether a call of `module` is one operator: its type is one of the table, and nothing changes what it does."""
    return (
        type(module) in LEAF_MODULES
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
        and getattr(module, "max_norm", None) is None  # an Embedding that rewrites its weights in forward
        and getattr(module, "momentum", 0.1) is not None  # a batch norm that computes with the number of its calls
        and getattr(module, "bias_k", None) is None  # attention with learned extra keys
        and getattr(module, "_qkv_same_embed_dim", True)
    )


def constructor_arguments(module: nn.Module) -> list[tuple[str, Any, bool]]:
    """Return (argument, value, required) of the call that makes such a module; defaults are left out."""
    signature = inspect.signature(nn.RNNBase if isinstance(module, nn.RNNBase) else type(module))
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()} | {"nonlinearity": "tanh"}
    arguments = []
    for name in LEAF_MODULES[type(module)].split():
        value = _value(module, name)
        default = defaults[name]
        if default is inspect.Parameter.empty or value != default:
            arguments.append((name, value, default is inspect.Parameter.empty))
    tensors = (*module.parameters(), *module.buffers())
    dtypes = {t.dtype for t in tensors if t.is_floating_point()} - {torch.float32}
    if dtypes:
        arguments.append(("dtype", min(dtypes, key=str), False))
    return arguments


def _value(module: nn.Module, name: str) -> Any:
    if name == "bias" and not isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        attribute = "in_proj_bias" if isinstance(module, nn.MultiheadAttention) else "bias"
        return getattr(module, attribute) is not None
    value = getattr(module, name)
    if isinstance(value, tuple) and value and len(set(value)) == 1 and name in _PER_DIMENSION:
        return value[0]  # Conv2d(3, 64, kernel_size=3), not kernel_size=(3, 3)
    return value
