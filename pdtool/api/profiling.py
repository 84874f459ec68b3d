"""To be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING

from pdtool.cli import click_options as options
from pdtool.cli.terminal import note, progress
from pdtool.errors import ModelError, UsageError
from pdtool.units import format_seconds

if TYPE_CHECKING:
    from pdtool.artifacts.device import DeviceSpec, Precision
    from pdtool.artifacts.profile import Profile
    from pdtool.frontend.model_file import ModelFile

_MEASURED_DEVICES = ("auto", "cpu", "cuda")
_MIN_STEP_S = 1e-3  # of a shorter step much is Python's own time, which no operator has


def profiled(
    model: str,
    output: str | None,
    *,
    model_settings: tuple[str, ...],
    batch_size: int,
    device: str,
    threads: int | None,
    precision: Precision | None,
    compiled: bool,
    calibrate: str | None,
) -> tuple[Profile, str]:
    """Profile a model with the values of the command's options; return the profile, and the path to write it to.

    Raises:
        UsageError: the options make no sense together; or the file to write is another than a profile.
        ModelError: the model cannot be imported, traced or executed.
    """
    from pdtool.artifacts.device import find_device
    from pdtool.frontend.compute_mode import default_device

    _check_options(device, threads, precision, compiled, calibrate)
    spec = None if device in _MEASURED_DEVICES else find_device(device)
    # From here on torch is imported, which takes seconds: the options were checked before.
    from pdtool.artifacts.profile import Profile
    from pdtool.frontend.model_file import ModelFile
    from pdtool.frontend.user_code import is_local, parse_ref
    from pdtool.profiler.estimate import estimate
    from pdtool.profiler.measure import measure

    folder = Path.cwd()
    with chdir("."), progress(f"{'estimating' if spec else 'measuring'} operators") as on_progress:
        file = ModelFile.load(parse_ref(model, model_settings), trusted=True)  # which may go to another folder
        if not is_local(file.path, folder):
            note(f"{model} is outside of this folder: name it to codegen and run, too, with --model {file.ref.source}")
        target = output or f"profiles/{options.file_name(file.name)}.json"
        Profile.check_target(folder / target)  # now, not when all is measured
        if spec is None:
            result = measure(
                file,
                batch_size=batch_size,
                device=default_device() if device == "auto" else device,
                threads=threads,
                precision="bf16" if precision == "bf16" else "fp32",
                compiled=compiled,
                progress=on_progress,
                note=note,
            )
            result = _with_loading(result, file)
        else:
            spec = _calibrated(spec, calibrate, precision) if calibrate else spec
            result = estimate(file, batch_size=batch_size, device=spec, precision=precision, progress=on_progress)
    if spec:
        note(f"the times below are estimated for {result.device.name}; nothing was run or measured")
        note(f"source: {spec.source}")
        result = _with_digests(result, device, calibrate)
    return result, target


def _check_options(
    device: str, threads: int | None, precision: Precision | None, compiled: bool, calibrate: str | None
) -> None:
    """Raise UsageError for options that only measuring, or only estimating, takes."""
    if device not in _MEASURED_DEVICES:
        if threads:
            raise UsageError(f"--device {device} estimates; --threads is for measuring", "leave it out")
        if compiled:
            what = f"--device {device} estimates operator by operator; what torch.compile makes of them can be measured"
            raise UsageError(what, "leave --compile out, or measure with --device cpu or cuda")
        return
    if calibrate:
        raise UsageError(f"--device {device} measures; --calibrate is for estimates", "leave it out")
    if precision not in (None, "fp32", "bf16"):
        raise UsageError(f"--device {device} measures what `run` computes in, not {precision}", "give fp32 or bf16")


def _calibrated(spec: DeviceSpec, path: str, precision: Precision | None) -> DeviceSpec:
    """Fit the device's factors to the measured profile in `path`."""
    from pdtool.artifacts.profile import Profile
    from pdtool.profiler.estimate import calibrate_device

    spec = calibrate_device(spec, Profile.load(path, may_be_pipe=True), path, tf32=precision == "tf32")
    factors = ", ".join(f"{kind} {factor:.3g}" for kind, factor in spec.factors.items())
    note(f"measured over estimated in {path}: {factors}")
    return spec


def _with_loading(result: Profile, file: ModelFile) -> Profile:
    """Add what loading a minibatch costs; a profile itself needs no sample but those of the first minibatch."""
    from pdtool.profiler.measure import measure_loading_s

    try:
        return result.model_copy(update={"loading_s": measure_loading_s(file, result.batch_size)})
    except ModelError as error:
        note(f"what loading costs was not measured: {error.what}")
        return result


def _with_digests(result: Profile, *paths: str | None) -> Profile:
    """Record the files that an estimate was made from besides the model's."""
    from pdtool.files import file_sha256

    files = [path for path in paths if path and path != "-" and Path(path).is_file()]
    return result.model_copy(update={"digests": {**result.digests, **{path: file_sha256(path) for path in files}}})


def _opaque_modules(result: Profile) -> Iterator[str]:
    """Say which modules are called whole, and why."""
    reasons: dict[str, list[str]] = {}
    for path, why in result.opaque.items():
        reasons.setdefault(why, []).append(path)
    for why, paths in reasons.items():
        names = ", ".join(paths[:5]) + f" and {len(paths) - 5} more" * (len(paths) > 5)
        reason = "as HINTS says" if why == "HINTS" else f"since its operators cannot be seen ({why})"
        yield f"{names}: called whole, and never cut, {reason}"


def _coverage_warnings(result: Profile) -> Iterator[str]:
    if result.launch_s > result.step_s:
        yield (
            f"warning: the kernels of a step take {format_seconds(result.step_s)}, but the host needs "
            f"{format_seconds(result.launch_s)} to launch them: a run will be slower than its plan; "
            "take a larger --batch-size"
        )
    is_long_enough = result.step_s >= _MIN_STEP_S
    if result.device.kind == "measured" and is_long_enough and not 0.9 <= result.coverage <= 1.1:
        why = "in segments torch.compile can fuse less than in the whole model; or " if result.compiled else ""
        yield (
            f"warning: the operators' times add up to {result.coverage:.2f} of a whole step (0.9 to 1.1 is usual); "
            f"{why}is something else running on this machine?"
        )
