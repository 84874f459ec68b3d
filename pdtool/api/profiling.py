"""Profile a model: measure its operators on this machine, or estimate them for a device that is not here."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pdtool.api.caller import unchanged_caller
from pdtool.api.console import note, progress
from pdtool.api.inputs import file_name, optional_text, path_text
from pdtool.api.model_settings import Settings, assignments
from pdtool.artifacts.device import DeviceSpec, Precision, find_device
from pdtool.artifacts.profile import Profile
from pdtool.errors import ModelError, UsageError
from pdtool.files import check_folder_of, file_sha256
from pdtool.options.declaration import read_options
from pdtool.options.plan_options import ProfileOptions

if TYPE_CHECKING:
    from pdtool.frontend.model_file import ModelFile

_MEASURED_DEVICES = ("auto", "cpu", "cuda")


@unchanged_caller()
def profile(
    model: Path | str,
    *,
    settings: Settings | None = None,
    batch_size: int = 32,
    device: Path | str = "auto",
    threads: int | None = None,
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = None,
    compile: bool = False,
    calibrate: Path | str | None = None,
    output: Path | str | None = None,
) -> Profile:
    """Measure the cost of each operator of a model, or estimate it for a device that is not here.

    Args:
        model: `model.py`, `model.py:FUNCTION`, `package.module` or `package.module:FUNCTION`.
        settings: keyword arguments of the model's function.
        batch_size: samples in one minibatch, the size that will run.
        device: `cpu` or `cuda` measures here, `auto` on cuda if there is one; a name from `pdtool devices`, or a YAML
            file, estimates.
        threads: CPU threads to measure with; use as many as each worker will have; None: as many
            as torch uses in this process, by default one for each core.
        precision: precision to measure or estimate; None: the model's own.
        compile: measure the compiled model, for `run(compile=True)`.
        calibrate: path of a measured profile to fit the estimate to.
        output: file to write; None: profiles/NAME.json.

    Returns:
        The profile, with times in seconds and sizes in bytes.

    Raises:
        UsageError: the options make no sense together, or the existing output file is not a profile.
        ModelError: the model cannot be imported, traced or executed.
    """
    given: dict[str, Any] = {"batch_size": batch_size, "device": device, "threads": threads, "precision": precision}
    given |= {"compile": compile, "calibrate": calibrate, "settings": assignments(settings)}
    asked = read_options("profile", ProfileOptions, given)
    result, path = profiled(path_text(model), optional_text(output), asked)
    result.save(path)
    return result


def profiled(model: str, output: str | None, asked: ProfileOptions) -> tuple[Profile, str]:
    """Profile a model as `asked` says; return the profile, and the path to write it to.

    Raises:
        UsageError: the options make no sense together, or the existing output file is not a profile.
        ModelError: the model cannot be imported, traced or executed.
    """
    from pdtool.frontend.compute_mode import default_device

    spec = None if asked.device in _MEASURED_DEVICES else find_device(asked.device)
    _check_options(asked)
    device, precision = asked.device, asked.precision
    # From here on torch is imported, which takes seconds: the options were checked before.
    from pdtool.frontend.model_file import ModelFile
    from pdtool.frontend.user_code import is_local, parse_ref, undoing_user_changes
    from pdtool.profiler.estimate import estimate
    from pdtool.profiler.measure import measure

    folder = Path.cwd()
    label = "estimating" if spec else "measuring"
    with undoing_user_changes(), progress(f"{label} operators") as on_progress:
        file = ModelFile.load(parse_ref(model, asked.model_settings), trusted=True)  # this may change the folder
        if not is_local(file.path, folder):
            note(f"{model} is outside this folder: pass it to codegen and run too, with --model {file.ref.source}")
        target = output or f"profiles/{file_name(file.name)}.json"
        Profile.check_target(folder / target)  # now, not after measuring
        check_folder_of(folder / target)
        if asked.calibrate and (folder / asked.calibrate).resolve() == (folder / target).resolve():
            raise UsageError(f"{target} would be overwritten, but --calibrate reads it", "pass another path with -o")
        if spec is None:
            result = measure(
                file,
                batch_size=asked.batch_size,
                device=default_device() if device == "auto" else device,
                threads=asked.threads,
                precision="bf16" if precision == "bf16" else "fp32",
                compiled=asked.compiled,
                progress=on_progress,
                note=note,
            )
            result = _with_loading(result, file)
        else:
            with chdir(folder):
                spec = _calibrated(spec, asked.calibrate, precision) if asked.calibrate else spec
            result = estimate(file, batch_size=asked.batch_size, device=spec, precision=precision, progress=on_progress)
    if spec:
        note(f"the times below are estimated for {result.device.name}. Nothing was run or measured")
        note(f"source: {spec.source}")
        paths = (path for path in (device, asked.calibrate) if path and path != "-" and Path(path).is_file())
        made_from = result.digests | {path: file_sha256(path) for path in paths}
        result = result.model_copy(update={"digests": made_from})
    return result.model_copy(update={"asked": asked}), target


def _check_options(asked: ProfileOptions) -> None:
    """Raise UsageError for options that apply only to measuring or only to estimating."""
    device = asked.device
    if device not in _MEASURED_DEVICES:
        if asked.threads:
            raise UsageError(f"--device {device} estimates, but --threads is for measuring", "leave it out")
        if asked.compiled:
            what = f"--device {device} estimates operator by operator, but a compiled model can only be measured"
            raise UsageError(what, "leave out --compile, or measure with --device cpu or cuda")
        return
    if asked.calibrate:
        raise UsageError(f"--device {device} measures, but --calibrate is for estimates", "leave it out")
    if asked.precision not in (None, "fp32", "bf16"):
        what = f"--device {device} cannot measure with --precision {asked.precision}"
        raise UsageError(what, "pass fp32 or bf16, the precisions of `run`")


def _calibrated(spec: DeviceSpec, path: str, precision: Precision | None) -> DeviceSpec:
    """Fit the device's factors to the measured profile in `path`."""
    from pdtool.profiler.estimate import calibrate_device

    spec = calibrate_device(spec, Profile.load(path, may_be_pipe=True), path, tf32=precision == "tf32")
    factors = ", ".join(f"{kind} {factor:.3g}" for kind, factor in spec.factors.items())
    note(f"ratio of measured to estimated times in {path}: {factors}")
    return spec


def _with_loading(result: Profile, file: ModelFile) -> Profile:
    """Add the loading time of a minibatch; the profile itself needs only the samples of the first minibatch."""
    from pdtool.profiler.measure import measure_loading_s

    try:
        return result.model_copy(update={"loading_s": measure_loading_s(file, result.batch_size)})
    except ModelError as error:
        note(f"the loading time was not measured: {error.what}")
        return result
