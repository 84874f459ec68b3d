"""The sections of `make reproduce`: what their pages make of figures, and their claims in small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import reproduce
from launches import free_port
from namespaces import namespaces
from reproduction import ddp, real_computing, rivals, slow_links, table1, time_to_accuracy
from reproduction.results import Results

from pdtool.artifacts.metrics import UpdateLine

LARGE_CLASSIFIER = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model():
    features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.MaxPool2d(4), nn.Flatten())
    return nn.Sequential(features, nn.Linear(32, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.Linear(1000, 2))

def dataset(split):
    x = torch.randn(128, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum((1, 2, 3)) > 0).long())

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.01)

def metrics(output, target):
    return {"accuracy": ((output.argmax(1) == target).sum(), len(target))}
"""


@pytest.mark.rows_of_the_day(days=3)
@namespaces
def test_the_pipeline_updates_more_often_than_distributed_data_parallel_over_slow_links(folder, monkeypatch):
    """Four megabytes of gradients take a third of a second over 100 Mbit/s, however fast the machine is; a pipeline
    sends 64 KB of activations at most, and computes for some milliseconds: a factor of two leaves room for a busy
    machine.
    """
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    results = Results(folder.path)
    monkeypatch.chdir(results.work)
    Path("model.py").write_text(LARGE_CLASSIFIER, encoding="utf-8")
    folder.pdtool("profile", "model.py", "--batch-size", "16", "--threads", "1")
    folder.pdtool("partition", "--topology", "2", "--bandwidth", time_to_accuracy.BANDWIDTH, "-o", "plan.yaml")
    asked = ("--minibatches", "10", "--epochs", "2")  # nine are in steady state, whichever plan is chosen
    pipeline = time_to_accuracy.train_pipeline(results, "plan.yaml", "model.py", *asked)
    ddp = time_to_accuracy.train_ddp(results, 16, str(results.work / "model.py"), *asked)
    assert ddp["time_per_update_s"] > 0.9 * 4.1e6 / 12.5e6
    assert pipeline["time_per_update_s"] < ddp["time_per_update_s"] / 2
    assert ddp["epochs"] == pipeline["epochs"] == 2


def test_time_to_accuracy_says_whether_the_goal_is_held_and_how_it_went_on_the_way():
    figures = {"target": 0.975, "config": "1-1", "simulated_s": 0.05, "ddp_simulated_s": 0.6, "one_worker_s": 0.1}

    def way(seconds: float, first_accuracy: float) -> dict:
        curve = [(seconds / 2, first_accuracy), (seconds, 0.98)]
        return {"epochs": 2, "time_per_update_s": 0.05, "seconds": seconds, "curve": curve}

    for ratio, said in ((3.5, "3.5): the goal of 3 is held"), (2.5, "2.5): the goal of 3 is not held")):
        runs = [
            figures | {"seed": seed, "pipeline": way(10.0, 0.94), "ddp": way(seconds, 0.96), "alone": way(12.0, 0.96)}
            for seed, seconds in ((0, 50.0), (1, 10 * ratio))
        ]
        page = "\n".join(time_to_accuracy.page(runs))
        assert said in page
        assert "One worker takes 1.2 times as long as the pipeline with two (worst 1.2)" in page
        assert "target is 97.5% of the digits" in page
        assert f"| 90% | 5.0, 1.2 | {ratio:.1f}, 1.2 |" in page  # both after their first epoch
        assert f"| 95% | 2.5, 0.6 | {ratio / 2:.1f}, 0.6 |" in page  # the pipeline after its second
    assert "lower accuracies" not in "\n".join(time_to_accuracy.page([run | {"target": 0.5} for run in runs]))


def test_a_picture_drawn_again_is_the_same_file(tmp_path):
    pytest.importorskip("matplotlib")
    curve = [(1.0, 0.9), (2.0, 0.98)]
    figures = [{"target": 0.97, "pipeline": {"curve": curve}, "ddp": {"curve": curve}, "alone": {"curve": curve}}]
    path, texts = tmp_path / "picture.svg", set()
    for _ in range(2):
        reproduce.save(time_to_accuracy.plot(figures), path)
        texts.add(path.read_text(encoding="utf-8"))
    assert len(texts) == 1


def test_what_distributed_data_parallel_and_a_pipeline_take_is_counted_within_epochs():
    """The time between epochs, of validations, is not part of it."""
    times = ((0, 1), (1, 1), (2, 1), (9, 2), (12, 2))
    lines = [(at_s, UpdateLine(epoch=epoch, step=1, loss=1.0)) for at_s, epoch in times]
    assert time_to_accuracy.time_per_update_s(lines) == pytest.approx(5 / 3)


def test_real_computing_is_compared_by_the_median_of_its_runs():
    plan = {"strategy": "straight", "config": "1-1", "simulated_s": 0.1}
    plan |= {"predicted_stages_s": [0.1, 0.08], "measured_stages_s": [0.09, 0.1]}
    plans = [plan | {"measured_s": [0.3, 0.11, 0.1]}, plan | {"measured_s": [0.07]}]
    figures = [{"model": "net", "settings": ["width=2"], "batch_size": 8, "cores": 2, "plans": plans}]
    page = "\n".join(real_computing.page(figures))
    assert "median error of 20.0%" in page
    assert "worst -30.0%" in page
    assert "| net width=2 | 8 | straight | 1-1 | 100 | 110 | 100 to 300 | +10.0% | -10%, +25% |" in page
    assert "together are off by 5.6% (median)" in page
    assert "shared" not in page
    assert "2 workers shared 1 core" in "\n".join(real_computing.page([figures[0] | {"cores": 1}]))


def test_rivals_are_compared_with_the_plan():
    plan = {"simulated_s": 0.1, "emulated_s": 0.1, "samples_per_update": 64, "bytes_per_sample": 1e6}
    plans = [
        plan | {"name": "this plan", "config": "3-1", "memory_bytes": 12e9},
        plan
        | {"name": "data-parallel", "config": "4", "memory_bytes": 10e9, "emulated_s": 0.25}
        | {"bytes_per_sample": 4e6},
    ]
    figures = {"model": "VGG-16", "bandwidth": "10Gbit/s", "device": "v100", "batch_size": 64, "plans": plans}
    page = "\n".join(rivals.page([figures]))
    assert "| data parallelism | 4 | 64 | 640 | 256 | 4 | 10 |" in page
    assert "| up to 85 % less traffic than data parallelism | 75% less |" in page
    assert "| memory on par with data parallelism | 1.20 times as much |" in page
    assert "| more than that of data parallelism | 2.50 × |" in page
    assert "| up to 1.9 × that of hybrid parallelism | not measured |" in page


def test_each_section_is_measured_where_it_is_not_disturbed():
    """Alone, beside what is not timed, or beside what sleeps; bandwidths are planned, and some of them emulated."""
    timed = [*reproduce.COMPUTING, *reproduce.EMULATED]
    assert sorted({*timed, *reproduce.UNTIMED}) == sorted(reproduce.SECTIONS)
    assert len(timed) == len(set(timed))
    assert set(timed) & reproduce.UNTIMED.keys() == {"bandwidth"}


def test_slow_links_show_the_gain_beside_the_one_wanted():
    plans = {"own": {"config": "3-1", "bottleneck_s": 0.05}, "rival": {"config": "4", "bottleneck_s": 0.28}}
    figures = [{"topology": "4", "bandwidth": "1Gbit/s", "wanted": 5.0, **plans}]
    assert "| 4 | 1Gbit/s | 3-1 | 50 | 4 | 280 | 5.60 | 5 |" in "\n".join(slow_links.page(figures))


def test_table_1_says_what_holds_up_plans_that_differ():
    times = {"simulated_s": 0.08, "emulated_s": 0.08, "data_parallel_s": 0.1, "memory_bytes": 1e9}
    terms = {"compute_s": 0.07, "allreduce_s": 0.01, "transfer_s": 0.002, "bytes_per_sample": 1e6}
    ours = times | terms | {"config": "1-1-2"}
    paper = ours | {"config": "1-1-1-1", "compute_s": 0.001, "transfer_s": 0.3}
    figures = {"ours": ours, "paper": paper, "data_parallel_emulated_s": 0.1, "sweep": []}
    differing = next(row for row in table1.TABLE_1 if row.model == "GNMT-16")
    rows = [figures if row == differing else figures | {"ours": paper} for row in table1.TABLE_1]
    page = "\n".join(table1.page(rows))
    assert "- GNMT-16 on 1x4: the paper's 1-1-1-1 by sending (300); pdtool's 1-1-2 by computing (70); " in page
    assert page.count("the paper's 1-1-1-1 by") == 1


def test_a_loop_with_ddp_that_misses_its_target_fails(tmp_path):
    (tmp_path / "model.py").write_text(LARGE_CLASSIFIER, encoding="utf-8")
    arguments = ["model.py", "--batch-size", "64", "--epochs", "1", "--target", "1.1", "-o", "."]
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended = subprocess.run(
        [sys.executable, ddp.__file__, *arguments],
        cwd=tmp_path,
        env={**os.environ, **variables, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("accuracy 1.1 was not reached in 1 epochs\n")
    assert len((tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2 + 1


def test_a_part_of_the_sections_needs_a_page_of_its_own(capsys, monkeypatch):
    """It would stand in place of the page of all sections."""
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--only", "learning"])
    with pytest.raises(SystemExit):
        reproduce.main()
    assert "name its page with -o" in capsys.readouterr().err


def test_figures_are_kept_with_their_commit_and_not_measured_again(tmp_path):
    results = Results(tmp_path)
    assert results.get("one", lambda: {"a": 1}) == {"a": 1}
    assert results.get("one", lambda: pytest.fail("measured again")) == {"a": 1}
    [commit] = results.commits
    assert json.loads((tmp_path / "one.json").read_text(encoding="utf-8"))["commit"] == commit
    assert len(results.seconds) == 2
