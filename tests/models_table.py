"""Take all models of tests/models through the commands, and write docs/models.md: which train, which are refused, why.

    python tests/models_table.py [-o FILE] [NAME ...]

NAME is a family (vision), or one model (vision.resnet), which is printed only. The models of torchvision, timm and
transformers are taken where these are installed. The exit code is 1 if a model trains wrongly, or does not do what the
tests expect of it.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
sys.path.append(str(Path(__file__).parent))

from collection import FAILS, FAMILIES, LIBRARIES, Outcome, take_the_road, tasks

from pdtool.units import counted

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
_PROCESSES = 2
_MODELS_PER_POOL = 40
_TIMEOUT_S = 900  # for one model, after which its process ends, and this program with an error
_HEAD = """# Models that pdtool trains

Written by `make test-models` with {versions}.

Each model is profiled, planned for three workers, generated, trained for 20 updates of two minibatches each (1F1B with
a flush), and exported. Its weights must then equal those of a plain PyTorch training loop on the same samples, within
1e-6 of a tensor's largest value. If a model draws its own random numbers, its weights must instead equal those that the
same commands train on one worker. The models are small and written like a user's (`tests/models`). If rounding errors
grow, as in all of torchvision and timm, they use double precision. A refused model ends with an error that says why and
what to do. A wrong model gets other weights, or fails in another way. For "to be refused", refusing is right.

| family | models | trained | refused | wrong |
|---|---|---|---|---|
"""


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Write docs/models.md: which models pdtool trains.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a family or a model; all if none is given")
    parser.add_argument("-o", "--output", type=Path, help="file to write; docs/models.md if no NAME is given")
    arguments = parser.parse_args()
    names = [name for family in (*FAMILIES, "refused", *_installed()) for name in tasks(family)]
    families = {name.partition(".")[0] for name in names}
    if unknown := {*arguments.names} - {*names} - families:
        parser.error(f"no family or model is called {', '.join(sorted(unknown))}; families: {', '.join(families)}")
    chosen = [n for n in names if not arguments.names or {n, n.partition(".")[0]} & {*arguments.names}]
    outcomes = {}
    for name, outcome in _outcomes(chosen):
        outcomes[name] = outcome
        print(f"{len(outcomes)}/{len(chosen)} {name}: {_sentence(name, outcome)}", flush=True)  # noqa: T201
    output = arguments.output or (None if arguments.names else DOCUMENT)
    if output:
        output.write_text(_document({name: outcomes[name] for name in chosen}))
    return int(any(not _is_expected(name, outcome) for name, outcome in outcomes.items()))


def _installed() -> list[str]:
    return [family for family in LIBRARIES if importlib.util.find_spec(family.removesuffix("_models"))]


def _outcomes(names: Sequence[str]) -> Iterator[tuple[str, Outcome]]:
    context = multiprocessing.get_context("spawn")
    for begin in range(0, len(names), _MODELS_PER_POOL):  # what models leave in a process ends with it
        with ProcessPoolExecutor(_PROCESSES, context) as pool:
            futures = {pool.submit(_outcome, name): name for name in names[begin : begin + _MODELS_PER_POOL]}
            for future in as_completed(futures):
                yield futures[future], future.result()


def _outcome(name: str) -> Outcome:
    warnings.simplefilter("ignore")
    task = tasks(name.partition(".")[0])[name]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        faulthandler.dump_traceback_later(_TIMEOUT_S, exit=True)
        try:
            return take_the_road(Path(folder), name, noisy=task.noisy)
        finally:
            faulthandler.cancel_dump_traceback_later()
            os.chdir("/")


def _is_expected(name: str, outcome: Outcome) -> bool:
    """Whether the tests expect this; of libraries' models they expect only that none is trained wrongly."""
    family = name.partition(".")[0]
    if outcome.wrong:
        return False
    if family == "refused":
        return name in FAILS or (outcome.code == 1 and tasks(family)[name].refused in outcome.message)
    return family in LIBRARIES or name in FAILS or outcome.code == 0


def _sentence(name: str, outcome: Outcome) -> str:
    if outcome.wrong:
        return f"WRONG: {outcome.wrong[0]}"
    if outcome.code:
        return f"refused: {outcome.message.removeprefix('error: ')}"
    whole = f"; opaque: {', '.join(outcome.opaque)}" if outcome.opaque else ""
    return f"trained on {counted(outcome.stages, 'stage')}{whole}"


def _document(outcomes: Mapping[str, Outcome]) -> str:
    families = list(dict.fromkeys(name.partition(".")[0] for name in outcomes))
    libraries = ["torch", *(family.removesuffix("_models") for family in families if family in LIBRARIES)]
    text = _HEAD.format(versions=", ".join(f"{name} {version(name).partition('+')[0]}" for name in libraries))
    for family in families:
        members = [outcome for name, outcome in outcomes.items() if name.startswith(f"{family}.")]
        wrong, refused = sum(bool(o.wrong) for o in members), sum(o.code != 0 for o in members)
        text += f"| {_title(family)} | {len(members)} | {len(members) - wrong - refused} | {refused} | {wrong} |\n"
    for family in families:
        text += f"\n## {_title(family).capitalize()}\n\n| model | outcome |\n|---|---|\n"
        for name, outcome in outcomes.items():
            if name.startswith(f"{family}."):
                text += f"| {name.partition('.')[2]} | {_sentence(name, outcome).replace('|', '/')} |\n"
    return text


def _title(family: str) -> str:
    return "to be refused" if family == "refused" else family.removesuffix("_models")


if __name__ == "__main__":
    sys.exit(main())
