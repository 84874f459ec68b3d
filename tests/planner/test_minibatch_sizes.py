"""Given profiles of one model with several batch sizes, the plan is for the fastest of these sizes."""

import random
from pathlib import Path

import pytest
from graphs import random_profile, with_nodes

import pdtool
from pdtool.artifacts.profile import Profile
from pdtool.errors import NoPlanError, UsageError

SAMPLES, SIZES = 32, (4, 8, 16, 32)


def profiles_of_sizes(rng: random.Random, folder: Path) -> list[str]:
    """Paths of one random model's profiles, in which a sample costs more the smaller its minibatch is."""
    profile = random_profile(rng, rng.randint(3, 9)).model_copy(update={"graph_sha256": "a" * 64})
    paths = []
    for size in SIZES:
        share = size / SAMPLES
        share_s = share + rng.choice([0.0, 0.02, 0.1])  # each minibatch costs something by itself
        nodes = [
            node.model_copy(
                update={
                    "forward_s": node.forward_s * share_s,
                    "backward_s": node.backward_s * share_s,
                    "output_bytes": int(node.output_bytes * share),
                    "stash_bytes": int(node.stash_bytes * share),
                }
            )
            for node in profile.nodes
        ]
        paths.append(str(folder / f"{size}.json"))
        with_nodes(profile.model_copy(update={"batch_size": size}), nodes).save(paths[-1])
    return paths


@pytest.mark.rows_of_the_day(days=4)
@pytest.mark.parametrize("seed", range(8))
def test_the_plan_is_for_the_fastest_batch_size(tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)
    rng = random.Random(seed)
    paths = profiles_of_sizes(rng, tmp_path)
    options = {
        "topology": rng.choice(["2", "3", "2x2"]),
        "samples_per_update": SAMPLES,
        "schedule": rng.choice([None, "1f1b", "gpipe", "zb-h1", "auto"]),
        "memory": rng.choice(["none", "none", "60kB"]),
        "output": str(tmp_path / "plan.yaml"),
    }
    each = {}
    for path in paths:
        try:
            each[path] = pdtool.partition(path, **options)
        except NoPlanError:
            continue
    if not each:
        with pytest.raises(NoPlanError):
            pdtool.partition(paths, **options)
        return
    plan = pdtool.partition(paths, **options)
    rates = {path: own.predicted.throughput_samples_per_s for path, own in each.items()}
    assert rates[plan.profile] == max(rates.values())
    own = each[plan.profile]
    assert plan.plan_sha256 == own.plan_sha256
    assert plan.predicted == own.predicted
    assert plan.execution.minibatches_per_update == SAMPLES // plan.batch_size
    more = plan.why.rivals[len(own.why.rivals) :]
    assert len(more) == len(each) - 1
    assert all(rival.samples_per_update == SAMPLES for rival in more)
    others = sorted((f"{rate:.4g} samples/s" for path, rate in rates.items() if path != plan.profile), key=str)
    assert sorted(rival.why.split(", data")[0].split(", one")[0] for rival in more) == others
    assert all(finding.holds is not False for finding in pdtool.check(options["output"]))


def test_profiles_that_cannot_be_compared_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    paths = profiles_of_sizes(random.Random(0), tmp_path)
    options = {"topology": "2", "memory": "none", "output": str(tmp_path / "plan.yaml")}
    with pytest.raises(UsageError, match=r"comparing \d+ profiles needs --samples-per-update"):
        pdtool.partition(paths, **options)
    options["samples_per_update"] = 6
    with pytest.raises(UsageError, match=r"none of the batch sizes \[4, 8, 16, 32\] divides"):
        pdtool.partition(paths, **options)
    with pytest.raises(UsageError, match="no profile is given"):
        pdtool.partition([], **options)
    options["samples_per_update"] = 8
    assert pdtool.partition(paths, **options).batch_size in (4, 8)
    assert "leaving out batch sizes [16, 32], which do not divide 8 samples" in capsys.readouterr().err
    pdtool.partition(paths, **{**options, "memory": None})
    assert capsys.readouterr().err.count("no --memory given") == 1, "once, not for each size"
    Profile.load(paths[0]).save(tmp_path / "again.json")
    with pytest.raises(UsageError, match=r"were both made with --batch-size 4"):
        pdtool.partition([*paths, tmp_path / "again.json"], **options)
    Profile.load(paths[0]).model_copy(update={"precision": "bf16", "batch_size": 2}).save(tmp_path / "bf16.json")
    with pytest.raises(UsageError, match="they differ in precision"):
        pdtool.partition([*paths, tmp_path / "bf16.json"], **options)
