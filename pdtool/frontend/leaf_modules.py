"""Say which torch.nn modules are one operator each, and how to construct such a leaf module again.

A call of a leaf module is one operator in the graph, the profile and the generated code, under the module's original
name. Its constructor arguments are read from the module's attributes of the same names, never from a repr.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

# Arguments that torch keeps as a tuple, and people write as one number if all dimensions are equal.
_PER_DIMENSION = {"kernel_size", "stride", "padding", "dilation", "output_padding", "normalized_shape"}

# Arguments that a stage leaves out, though modules keep them: `inplace`, because the module may be the first of its
# stage and must not change a received tensor; `sparse`, because gradients are dense; and those without effect once a
# module's state is loaded.
_LEFT_OUT = {"inplace", "sparse", "norm_type", "kdim", "vdim", "init"}

_LEAF_NAMES = (
    "Linear Bilinear Embedding EmbeddingBag Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d "
    "BatchNorm1d BatchNorm2d BatchNorm3d InstanceNorm1d InstanceNorm2d InstanceNorm3d GroupNorm LayerNorm RMSNorm "
    "LSTM GRU RNN LSTMCell GRUCell RNNCell MultiheadAttention "
    "MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d "
    "AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d Dropout Dropout1d Dropout2d Dropout3d AlphaDropout "
    "ReLU ReLU6 SiLU Mish Hardswish Hardsigmoid SELU Sigmoid Tanh Softsign LogSigmoid Tanhshrink Identity "
    "LeakyReLU ELU CELU GELU Softplus Hardtanh PReLU GLU Softmax LogSoftmax "
    "Flatten Unflatten Upsample PixelShuffle PixelUnshuffle ZeroPad1d ZeroPad2d ZeroPad3d "
    "ReflectionPad1d ReflectionPad2d ReplicationPad1d ReplicationPad2d"
)
_LEAF_TYPES = {getattr(nn, name) for name in _LEAF_NAMES.split()}


def is_leaf(module: nn.Module) -> bool:
    """Whether a call of `module` is one operator: its type is listed above, and nothing changes its behaviour."""
    return (
        type(module) in _LEAF_TYPES
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
        and getattr(module, "max_norm", None) is None  # an Embedding that rewrites its weights in forward
        and getattr(module, "momentum", 0.1) is not None  # a batch norm that computes with the number of its calls
        and getattr(module, "bias_k", None) is None  # attention with learned extra keys
        and getattr(module, "_qkv_same_embed_dim", True)
    )


def constructor_arguments(module: nn.Module) -> list[tuple[str, Any, bool]]:
    """Return (argument, value, required) of the call that makes such a module; defaults are left out."""
    is_rnn = isinstance(module, nn.RNNBase)
    parameters = inspect.signature(nn.RNNBase if is_rnn else type(module)).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    if is_rnn:  # whose `mode` is the type itself
        del defaults["mode"]
        defaults["nonlinearity"] = "tanh"
    arguments = []
    for name, default in defaults.items():
        if name not in _LEFT_OUT and (name == "bias" or hasattr(module, name)):
            value, required = _value(module, name), default is inspect.Parameter.empty
            if required or value != default:
                arguments.append((name, value, required))
    tensors = (*module.parameters(), *module.buffers())
    dtypes = {t.dtype for t in tensors if t.is_floating_point() or t.is_complex()}
    if torch.get_default_dtype() == torch.float32:
        dtypes -= {torch.float32}
    if dtypes:
        arguments.append(("dtype", min(dtypes, key=str), False))
    return arguments


def _value(module: nn.Module, name: str) -> Any:
    if name == "bias" and not isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        attribute = "in_proj_bias" if isinstance(module, nn.MultiheadAttention) else "bias"
        return getattr(module, attribute) is not None or not getattr(module, "affine", True)
    value = getattr(module, name)
    if isinstance(value, tuple) and value and len(set(value)) == 1 and name in _PER_DIMENSION:
        return value[0]  # Conv2d(3, 64, kernel_size=3), not kernel_size=(3, 3)
    return value
