"""Train a model.py with torch's DistributedDataParallel, as a loop of one's own would: one of several processes.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as torchrun sets them. What differs from a loop that anyone would
write is that the samples come in pdtool's order, and that metrics.jsonl has pdtool's lines, so that both can be
compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, default_collate

from pdtool.runtime.loading.minibatches import sample_order


def main() -> None:
    """Train until the target is reached, or for a number of epochs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model.py")
    parser.add_argument(
        "--batch-size", type=int, required=True, help="Samples in an update, of all processes together."
    )
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--minibatches", type=int, help="In an epoch, at most.")
    parser.add_argument("--target", type=float, default=float("inf"), help="Accuracy at which the training ends.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True, help="Folder of metrics.jsonl.")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(imported(arguments.model), arguments)
    dist.barrier()  # nobody closes a connection that another still reads
    os._exit(0)  # over slow links the destructor of Gloo's threads has aborted the process ("terminate called ...")


def imported(path: Path) -> ModuleType:
    """The module in a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(code: ModuleType, arguments: argparse.Namespace) -> None:
    """Train the model on this process's part of each minibatch; rank 0 writes metrics.jsonl.

    Raises:
        SystemExit: it does not reach the target.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(arguments.seed)
    model = DistributedDataParallel(code.model())
    optimizer = code.optimizer(list(model.module.named_parameters()))
    training, validation = code.dataset("train"), code.dataset("valid")
    size, step = arguments.batch_size, 0
    with (arguments.output / "metrics.jsonl" if rank == 0 else Path("/dev/null")).open("w", buffering=1) as log:
        for epoch in range(1, arguments.epochs + 1):
            order = list(sample_order(arguments.seed, epoch, len(training)))
            starts = range(0, len(order) - size + 1, size)[: arguments.minibatches]
            for start in starts:
                indices = order[start : start + size]
                x, y = default_collate([training[i] for i in indices[rank::world_size]])
                loss = code.loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                log.write(json.dumps({"split": "train", "epoch": epoch, "step": step, "loss": loss.item()}) + "\n")
            valid_loss, accuracy = validate(model.module, code, validation, rank, world_size)
            figures = {"loss": valid_loss, "accuracy": accuracy}
            log.write(json.dumps({"split": "valid", "epoch": epoch, "step": step, **figures}) + "\n")
            if accuracy >= arguments.target:
                return
    if arguments.target < float("inf"):
        raise SystemExit(f"accuracy {arguments.target} was not reached in {arguments.epochs} epochs")


@torch.no_grad()
def validate(model: torch.nn.Module, code: ModuleType, data: Dataset, rank: int, world_size: int) -> list[float]:
    """Loss and accuracy on the validation set, of which each process computes a part."""
    model.eval()
    x, y = default_collate([data[i] for i in range(rank, len(data), world_size)])
    output = model(x)
    correct, count = code.metrics(output, y)["accuracy"]
    totals = torch.tensor([float(code.loss(output, y)) * count, correct, count], dtype=torch.float64)
    dist.all_reduce(totals)
    model.train()
    return (totals[:2] / totals[2]).tolist()


if __name__ == "__main__":
    main()
