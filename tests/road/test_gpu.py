"""The road on a CUDA device: profile, two workers that share it, and NCCL beside gloo (the laws: test_run_gpu.py)."""

import pytest
import torch
import torch.distributed as dist

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.plan import PlanOptions
from pdtool.frontend.model_file import ModelFile
from pdtool.generator.generate import generate
from pdtool.planner.choice.make_plan import make_plan
from pdtool.profiler.measure import measure
from pdtool.runtime.config import RunConfig
from pdtool.runtime.launch.launcher import launch
from pdtool.runtime.stage.pipeline_stage import PipelineStage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
MODELS = ["digits", "lstm_lm", "transformer"]


def trained(name, workers, tmp_path):
    """The report of a few steps, on `workers` workers of this machine."""
    file = ModelFile.load(ModelRef(source=f"pdtool.zoo.{name}"))
    profile = measure(file, batch_size=16)
    plan = make_plan(profile, "p.json", make_cluster([workers], [1e9]), PlanOptions(straight=True))
    bundle = generate(plan, profile, file, tmp_path / "bundle")
    return launch(
        RunConfig(
            plan=plan,
            bundle=bundle,
            bundle_dir=tmp_path / "bundle",
            model=file.ref,
            out=tmp_path / "run",
            steps=20,
            device="cuda",
            timeout_s=120.0,
        )
    )


@pytest.mark.parametrize("name", MODELS)
def test_profile_on_the_device(name):
    profile = measure(ModelFile.load(ModelRef(source=f"pdtool.zoo.{name}")), batch_size=16, device="cuda")
    assert profile.device.name == torch.cuda.get_device_name()
    assert all(n.forward_s > 0 for n in profile.nodes if n.op in ("Conv2d", "LSTM", "Linear"))
    assert 0.3 < profile.coverage < 3


def test_profile_leaves_the_memory_to_the_workers_that_this_process_may_start():
    measure(ModelFile.load(ModelRef(source="pdtool.zoo.vgg16")), batch_size=16, device="cuda")
    assert torch.cuda.memory_reserved() < 2**27


@pytest.mark.parametrize("name", MODELS)
def test_two_workers_share_one_device_through_gloo(name, tmp_path):
    report = trained(name, 2, tmp_path)
    assert report.minibatches == 20
    assert [stage.peak_versions for stage in report.stages] == [2, 1]


@pytest.mark.filterwarnings("error:RNN module weights are not part of single contiguous chunk")
def test_versions_of_recurrent_weights_stay_flat():
    """cuDNN warns where it has to copy weights that lie in several places."""
    lstm = torch.nn.LSTM(8, 16, 2).to("cuda")
    stage = PipelineStage(lstm, None)
    for minibatch in range(3):
        stage.forward(minibatch, [torch.randn(5, 4, 8, device="cuda", requires_grad=True)])
        stage.weights.prepare_update()
    assert stage.weights.peak_versions == 4


def test_one_worker_runs_with_nccl_beside_gloo(tmp_path):
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    report = trained("digits", 1, tmp_path)
    assert report.minibatches == 20
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        nccl = dist.new_group([0], backend="nccl")
        on_device, on_host = torch.ones(3, device="cuda"), torch.ones(3)
        dist.all_reduce(on_device, group=nccl)
        dist.all_reduce(on_host)
        assert torch.equal(on_device.cpu(), on_host)
    finally:
        dist.destroy_process_group()
