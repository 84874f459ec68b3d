"""The options of `pdtool profile`; all of them change the profile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from pdtool.options.declaration import option
from pdtool.options.values import Choice, Count, Flag, Text, Texts

_model = partial(option, section="Model", artifact="profile")
_computing = partial(option, section="Computing", artifact="profile")


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """How a model is profiled."""

    model_settings: tuple[str, ...] = _model(
        "--set NAME=VALUE",
        Texts(default=()),
        "Setting for model(), or for other functions of model.py that have a parameter NAME; may be repeated.",
        keyword="settings",
    )
    batch_size: int = _model("--batch-size N", Count(default=32), "Samples in one minibatch, the size that will run.")
    device: str = _computing(
        "--device NAME",
        Text(default="auto"),
        "On cpu or cuda, measure on this machine; auto is cuda where there is one, as of `run`. For any other (v100, "
        "a100, ...; an unknown one lists them) or a YAML file of your own, estimate without running the model.",
    )
    threads: int | None = _computing(
        "--threads N", Count(unset="all cores"), "CPU threads to measure with, as many as each worker will have."
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = _computing(
        "--precision",
        Choice(("fp32", "tf32", "bf16", "fp16"), unset="the model's own"),
        "Measure what `run` computes in: fp32, the model as it is, or bf16 by autocast. Or estimate as if the model "
        "were cast to fp32, bf16 or fp16; tf32: with products of fp32 in TF32.",
    )
    compiled: bool = _computing(
        "--compile",
        Flag(default=False),
        "Measure what `run --compile` runs. What torch.compile fuses is timed in segments; operators get shares.",
        keyword="compile",
    )
    calibrate: str | None = _model(
        "--calibrate PROFILE",
        Text(),
        "Estimate with factors fitted to a profile of any model that was measured on that device.",
    )
