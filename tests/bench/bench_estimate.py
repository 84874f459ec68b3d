"""Print how far estimates for a V100 are from what PipeDream measured on one.

`python tests/bench/bench_estimate.py FOLDER`, with the graph.txt files that PipeDream published in FOLDER. Figures, no
pass or fail, and nothing is fitted to them: the device table holds the data sheet's peaks alone.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.device import find_device
from pdtool.artifacts.profile import Node, Profile
from pdtool.frontend.model_file import ModelFile
from pdtool.profiler.estimate import estimate
from pdtool.profiler.pipedream_import import read_pipedream_profile

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "pipedream"
MODELS = ("vgg16", "alexnet", "resnet50")
STAGES = 4
Layers = list[tuple[int, float]]  # (bytes of parameters, seconds)


@dataclass(frozen=True)
class Comparison:
    """One model: seconds of forward and backward of a minibatch, and each stage's share of them.

    The stages are those that cut the measured time into equal parts, at borders between layers with parameters.
    """

    name: str
    batch_size: int
    measured: list[float]
    estimated: list[float]
    took_s: float

    @property
    def ratio(self) -> float:
        """Estimated over measured, of the whole."""
        return sum(self.estimated) / sum(self.measured)

    @property
    def shares(self) -> list[tuple[float, float]]:
        """(measured, estimated) share of the time by stage."""
        cuts = _cuts(self.measured)
        return [
            (sum(self.measured[a:b]) / sum(self.measured), sum(self.estimated[a:b]) / sum(self.estimated))
            for a, b in zip([0, *cuts], [*cuts, len(self.measured)], strict=True)
        ]


def compare(name: str, folder: Path = DATA) -> Comparison:
    """The zoo's model of that name, at the published minibatch, beside the published profile."""
    published = read_pipedream_profile((folder / f"{name}.graph.txt").read_text(), name, name=name)[0]
    start = time.perf_counter()
    file = ModelFile.load(ModelRef(source=f"pdtool.zoo.{name}"), trusted=True)
    profile = estimate(file, batch_size=published.batch_size, device=find_device("v100"))
    took_s = time.perf_counter() - start
    measured, estimated = _aligned(_layers(published), _layers(profile))
    return Comparison(name, published.batch_size, measured, estimated, took_s)


def _aligned(one: Layers, other: Layers) -> tuple[list[float], list[float]]:
    """The seconds of both by groups of layers with the same parameters: a block's branches may come in any order."""
    sums: tuple[list[float], list[float]] = ([], [])
    start = 0
    for end in range(1, len(one) + 1):
        groups = one[start:end], other[start:end]
        if sorted(size for size, _ in groups[0]) == sorted(size for size, _ in groups[1]):
            for seconds, group in zip(sums, groups, strict=True):
                seconds.append(sum(s for _, s in group))
            start = end
    if start != len(one) or len(one) != len(other):
        raise ValueError(f"after layer {start} the two profiles have other parameters")
    return sums


def _layers(profile: Profile) -> Layers:
    """(bytes of parameters, seconds) of each layer with parameters and what follows it; loss and inputs left out."""
    layers: Layers = []
    for node in profile.nodes:
        if node.op in ("input", "Input", "loss"):
            continue
        if node.parameter_bytes or not layers:
            layers.append((node.parameter_bytes, 0.0))
        layers[-1] = (layers[-1][0], layers[-1][1] + _seconds(node))
    return layers


def _seconds(node: Node) -> float:
    return node.forward_s + node.backward_s


def _cuts(seconds: list[float]) -> list[int]:
    """Where the running sum comes nearest to 1/4, 2/4 and 3/4 of the whole."""
    sums = [sum(seconds[:i]) for i in range(len(seconds) + 1)]
    return [min(range(len(sums)), key=lambda i: abs(sums[i] - sums[-1] * k / STAGES)) for k in range(1, STAGES)]


def main() -> None:
    """A line for each model."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA
    if not folder.is_dir():
        files = ", ".join(f"{name}.graph.txt" for name in MODELS)
        raise SystemExit(f"{folder} is not there: name a folder with {files}")
    columns = ("model", "batch", "measured", "estimated", "error", "without first layer", "stages' shares, %")
    sys.stdout.write("{:10}{:>6}{:>11}{:>11}{:>8}{:>21}   {}\n".format(*columns))
    for name in MODELS:
        c = compare(name, folder)
        rest = sum(c.estimated[1:]) / sum(c.measured[1:]) - 1
        shares = "  ".join(f"{100 * measured:.0f}/{100 * estimated:.0f}" for measured, estimated in c.shares)
        sys.stdout.write(
            f"{name:10}{c.batch_size:6}{sum(c.measured) * 1e3:8.0f} ms{sum(c.estimated) * 1e3:8.0f} ms"
            f"{c.ratio - 1:+8.0%}{rest:+21.0%}   {shares}   (in {c.took_s:.1f} s)\n"
        )


if __name__ == "__main__":
    main()
