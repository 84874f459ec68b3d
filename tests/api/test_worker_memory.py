"""Which memory a plan is made for: what is given, or else that of the device that was profiled; and it is said."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import samples
from graphs import chain

from pdtool.artifacts.device import Device
from pdtool.artifacts.plan import Plan, PlanOptions
from pdtool.artifacts.profile import Profile
from pdtool.planner.choice.make_plan import make_plan
from pdtool.planner.placement import Placement
from pdtool.planner.simulator.engine import simulate
from pdtool.planner.simulator.job import SimulationJob

GB = 10**9
RESERVED = 2**30
GPU = Device(name="V100", kind="estimated", memory_bytes=16 * GB)
CPU = Device(name="AMD EPYC, 2 threads", kind="measured", memory_bytes=12 * GB)
MB200 = 200_000_000
MEASURED_CPU = Device(name="AMD EPYC, 2 threads", kind="measured", memory_bytes=12 * GB + 1)
UNKNOWN = Device(name="AMD EPYC, 2 threads", kind="measured")


def saved(device, path="profiles/net.json"):
    """A profile for this device; a GPU keeps a reserve."""
    reserved_bytes = {GPU.name: RESERVED}.get(device.name, MB200 if device is MEASURED_CPU else 0)
    samples.profile().model_copy(update={"device": device, "reserved_bytes": reserved_bytes}).save(path)


@pytest.mark.parametrize(
    ("device", "topology", "memory", "expected", "words"),
    [
        (GPU, "2", [], 13_993_367_040, "no --memory given: planning for the 16 GB of V100 (for no limit, pass --"),
        (GPU, "2x2", [], 13_993_367_040, "of each worker's 16 GB, 2.01 GB is set aside for CUDA's context"),
        (
            CPU,
            "3",
            [],
            4 * GB,
            "planning for 4 GB per worker: the machine's 12 GB, shared by 3 workers (for no limit, pass",
        ),
        (CPU, "2x3", [], 4 * GB, "planning for 4 GB per worker: the machine's 12 GB, shared by 3 workers (for"),
        (CPU, "3x1", [], 12 * GB, "planning for 12 GB per worker (for no limit, pass --memory none)"),
        (UNKNOWN, "3", [], None, "the profile does not record its device's memory: planning without a limit"),
        (GPU, "2", ["--memory", "none"], None, ""),
        (GPU, "2", ["--memory", "8GB"], 6_493_367_040, "of each worker's 8 GB, 1.51 GB is set"),
        (CPU, "3", ["--memory", "8GB"], 8 * GB, ""),
        (MEASURED_CPU, "4", ["--memory", "8GB"], 6_825_000_001, "of each worker's 8 GB, 1.17 GB is set aside for the"),
        (MEASURED_CPU, "2", ["--memory", "8GB"], 6_708_333_335, "the processes themselves and for fragmentation"),
    ],
)
def test_a_worker_has_the_memory_of_the_profiled_device_unless_told_otherwise(
    folder, device, topology, memory, expected, words
):
    saved(device)
    bandwidth = ",".join("1GB/s" for _ in topology.split("x"))
    result = folder.pdtool("partition", "--topology", topology, "--bandwidth", bandwidth, *memory, "-o", "plan.yaml")
    assert Plan.load("plan.yaml").cluster.memory_bytes == expected
    assert words in result.stderr
    assert ("no --memory given" in result.stderr) == (not memory)


@pytest.mark.parametrize(
    ("memory", "expected"), [([], 16 * GB), (["--memory", "3GB"], 3 * GB), (["--memory", "none"], None)]
)
def test_what_a_cluster_file_says_goes_before_the_device_and_after_the_option(folder, memory, expected):
    saved(CPU)
    samples.cluster().save("cluster.yaml")
    result = folder.pdtool("partition", "--cluster", "cluster.yaml", *memory, "-o", "plan.yaml")
    assert Plan.load("plan.yaml").cluster.memory_bytes == expected
    assert "no --memory given" not in result.stderr


def test_less_than_processes_need_is_answered_with_what_would_do(folder):
    saved(MEASURED_CPU)
    stderr = folder.pdtool("partition", "--topology", "2", "--bandwidth", "1GB/s", "--memory", "10MB", code=4).stderr
    assert "10 MB of memory is not enough for the processes" in stderr
    assert "and a worker has nothing left for them" in stderr
    enough = re.search(r"at least --memory ([\d.]+\w*B)", stderr)[1]
    folder.pdtool("partition", "--topology", "2", "--bandwidth", "1GB/s", "--memory", enough)


def test_a_plan_that_leaves_its_workers_little_room_says_so(folder):
    saved(MEASURED_CPU)
    partition = ["partition", "--topology", "2", "--bandwidth", "1GB/s", "--straight", "-o", "plan.yaml", "--memory"]
    folder.pdtool(*partition, "none")
    needed = max(Plan.load("plan.yaml").memory_needed)
    little = Profile.load("profiles/net.json").memory_for(needed, 2)
    stderr = folder.pdtool(*partition, f"{little}B").stderr
    assert (
        "needs over 75 % of the memory left for tensors. So it will return freed memory to the system at once" in stderr
    )
    enough = re.search(r"If each worker has more memory, pass --memory ([\d.]+\w*B)", stderr)[1]
    assert "return freed memory" not in folder.pdtool(*partition, enough).stderr


def test_a_worker_with_chunks_needs_its_memory_once():
    """A plan has the whole worker's memory at each of its stages. Less than a third more than that is little room."""
    plan = samples.plan()
    assert plan.predicted
    predicted = plan.predicted.model_copy(update={"memory_bytes": (300, 110, 300, 110)})
    plan = plan.model_copy(update={"predicted": predicted, "chunks": 2, "stages": plan.stages * 2})
    assert plan.memory_needed == [300, 110]
    for limit, stages in ((None, []), (400, []), (399, [0]), (100, [0, 1])):
        cluster = replace(plan.cluster, memory_bytes=limit)
        assert plan.model_copy(update={"cluster": cluster}).stages_with_little_room == stages


def test_a_plan_with_chunks_needs_the_memory_of_its_simulated_workers():
    profile, cluster = chain([3.0, 6.0, 3.0, 4.0, 5.0], parameters=1000, crossing=50, stash=70), samples.plan().cluster
    plan = make_plan(profile, "net.json", cluster, PlanOptions(schedule="interleaved", microbatches=4, workers=2))
    job = SimulationJob.of(Placement.of(plan, profile), profile, cluster)
    assert plan.memory_needed == [usage.memory_bytes for usage in simulate(job).workers]


@pytest.mark.parametrize("extra", [[], ["--no-recompute"]])
def test_where_the_default_is_too_little_the_error_names_what_would_do(folder, extra):
    tiny = GPU.model_copy(update={"memory_bytes": RESERVED + 900})
    samples.profile().model_copy(update={"device": tiny, "reserved_bytes": RESERVED}).save("profiles/net.json")
    partition = ["partition", "--topology", "2", "--bandwidth", "1GB/s", *extra]
    stderr = folder.pdtool(*partition, code=4).stderr
    assert "no --memory given: planning for the 1.07 GB of V100" in stderr
    assert ("with every stage recomputing" in stderr) == (not extra)
    assert "leave out --no-recompute" not in stderr, "nothing fits if all stages recompute, either"
    enough = re.search(r"at least --memory ([\d.]+\w*B)", stderr)[1]
    folder.pdtool(*partition, "--memory", enough)
    folder.pdtool(*partition, "--memory", f"{RESERVED + 900}B", code=4)
    folder.pdtool(*partition, "--memory", "none")
