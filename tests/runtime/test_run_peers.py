"""What workers send each other is data: a stranger in the place of one executes nothing, and is named (SECURITY.md)."""

from __future__ import annotations

import dataclasses
import io
import math
import multiprocessing
import pickle
import re
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness import start_server
from torch import Tensor
from torch.utils._pytree import tree_flatten

from pdtool.artifacts.text_formats import read_message, write_message
from pdtool.errors import ModelError, WorkerDiedError
from pdtool.frontend.model_io import Structure
from pdtool.profiler.probe_rendezvous import Rendezvous
from pdtool.runtime.groups import all_gather, broadcast
from pdtool.runtime.stage.losses import _as_data, _of_data, _sum
from pdtool.runtime.status import PeerError

PACKAGE = Path(__file__).parents[2] / "pdtool"


class Malicious:
    """Its pickle touches a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def pickled(path: Path) -> None:
    dist.all_gather_object([None, None], Malicious(path))


def pickled_by_torch(path: Path) -> None:
    file = io.BytesIO()
    torch.save(Malicious(path), file)
    send(file.getvalue())


def another_type(path: Path) -> None:
    send(b'[["text"]]')


def nested(path: Path) -> None:
    send(b"[" * 100_000)


def too_long(path: Path) -> None:
    dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(2)], torch.tensor([2**40]))


def of_negative_length(path: Path) -> None:
    dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(2)], torch.tensor([-1]))


def send(content: bytes) -> None:
    """Send bytes as `all_gather` sends a message; nothing is read, and the other one's are not longer."""
    dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(2)], torch.tensor([len(content)]))
    message = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    dist.all_gather([torch.empty_like(message) for _ in range(2)], message)


def broadcasts_a_pickle(path: Path) -> None:
    dist.broadcast_object_list([Malicious(path)], src=1)


def _meet(folder: Path, rank: int, stranger: Callable[[Path], None]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    if rank:
        stranger(folder / "executed")
        return
    try:
        if stranger is broadcasts_a_pickle:
            broadcast({}, dict[str, int], 1, "the order of the samples")
        else:
            all_gather({"a": 1}, dict[str, int], dist.group.WORLD, "the settings of the run")
    except PeerError as error:
        (folder / "error").write_text(f"{error.peer}: {error}")


@pytest.mark.parametrize(
    ("stranger", "said"),
    [
        (pickled, "the settings of the run from rank 1 cannot be read; none of it was executed (Invalid JSON"),
        (pickled_by_torch, "the settings of the run from rank 1 cannot be read"),
        (another_type, "cannot be read; none of it was executed ([0]: Input should be an object"),
        (nested, "cannot be read; none of it was executed (Invalid JSON: recursion limit exceeded"),
        (too_long, f"from rank 1 would have {2**40} bytes, but the limit is {2**26}"),
        (of_negative_length, "from rank 1 would have -1 bytes"),
        (broadcasts_a_pickle, "the order of the samples from rank 1 cannot be read; none of it was executed"),
    ],
)
def test_a_stranger_in_the_place_of_a_worker(
    tmp_path: Path, stranger: Callable[[Path], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    start_server()
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_meet, args=(tmp_path, rank, stranger)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    error = (tmp_path / "error").read_text()
    assert error.startswith("1: ")
    assert said in error
    assert not (tmp_path / "executed").exists()


def test_the_attack_works_where_pickles_are_read(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Malicious(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


def test_nothing_in_pdtool_reads_pickles_of_others() -> None:
    """Not by torch's object collectives, nor by its rendezvous that unpickles."""
    forbidden = re.compile(r"(gather|broadcast|scatter|send|recv)_object|(pickle|torch)\.loads?\(|marshal|\bc10d\b")
    for path in PACKAGE.rglob("*.py"):
        code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
        assert not forbidden.search(code), path


@pytest.mark.parametrize(
    "total",
    [
        0.1,
        math.inf,
        torch.tensor([[1.5, math.nan], [0.0, -math.inf]]),
        torch.tensor(3, dtype=torch.int64),
        torch.randn(3, 2, dtype=torch.complex128).conj().t(),
        torch.zeros(2, 0, 3),
        torch.eye(3).to_sparse(),
    ],
)
def test_the_sums_of_metrics_arrive_as_they_were(total: Any) -> None:
    kind = dict[str, float | bytes]
    (received,) = map(_of_data, read_message(write_message({"m": _as_data(total)}, kind), kind).values())
    expected = total.to_dense() if isinstance(total, Tensor) else total
    torch.testing.assert_close(received, expected, rtol=0, atol=0, equal_nan=True)


def test_sums_of_metrics_are_those_of_a_plain_loop() -> None:
    """Counts beyond what a float32, a bfloat16 or a byte holds."""
    parts = [{"m": (torch.tensor([2**24 + 1, 200]), 1.0)}, {"m": (torch.tensor([2**24 + 2, 100]), 1.0)}]
    total, count = _sum(parts)["m"]
    assert (total.tolist(), count) == ([2**25 + 3, 300], 2.0)
    for dtype, expected in ((torch.uint8, 300), (torch.bool, 3), (torch.bfloat16, 300)):
        value = torch.tensor([100 if dtype != torch.bool else 1], dtype=dtype)
        assert _sum([{"m": (value, 1.0)}] * 3)["m"][0].tolist() == [expected]
        assert value.item() in (100, True), "the user's tensor is not changed"


def test_a_pickle_in_the_place_of_a_sum_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allow_pickle="):
        _of_data(pickle.dumps(Malicious(tmp_path / "executed")))
    assert not (tmp_path / "executed").exists()


class Boxes(NamedTuple):
    corners: Tensor
    label: Tensor | None


@dataclasses.dataclass(frozen=True)
class Masks:
    pixels: Tensor
    boxes: Boxes

    def __post_init__(self) -> None:
        assert isinstance(self.boxes, Boxes)


class Named(dict[str, Any]):
    """A dict of the user's own."""


TENSOR = torch.zeros(1, 3, dtype=torch.float64)


@pytest.mark.parametrize(
    "target",
    [
        TENSOR,
        None,
        (),
        [TENSOR, (torch.zeros(1), None)],
        {"a": TENSOR, 3: {True: [], None: TENSOR}, 1.0: ()},
        OrderedDict(b=TENSOR, a=TENSOR),
        defaultdict(list, a=[TENSOR]),
        deque([TENSOR, TENSOR], maxlen=2),
        Boxes(TENSOR, None),
        Masks(TENSOR, Boxes(TENSOR, torch.zeros(1, dtype=torch.bool))),
        Named(a=Masks(TENSOR, Boxes(TENSOR, TENSOR))),
        torch.max(torch.zeros(1, 2), 1),
    ],
    ids=str,
)
def test_a_target_is_described_by_what_it_is(target: Any) -> None:
    made = read_message(write_message(Structure.of(target), Structure), Structure).example()
    (found, structure), (expected, same) = tree_flatten(made), tree_flatten(target)
    assert structure == same
    assert type(made) is type(target)
    for one, other in zip(found, expected, strict=True):
        assert one is other is None or (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one is None or one.untyped_storage().nbytes() <= 8


def local_class() -> Any:
    class Local(dict[str, Any]):
        pass

    return Local(a=TENSOR)


@pytest.mark.parametrize(
    ("target", "named"),
    [
        (2**70, "holds int,"),
        ({"a": "text"}, "holds str,"),
        ({(1, 2): TENSOR}, r"holds the key \(1, 2\),"),
        (local_class(), "local_class.<locals>.Local, a class that is not found in"),
        (defaultdict(local_class, a=TENSOR), "holds a defaultdict of <function local_class"),
    ],
)
def test_a_target_that_cannot_be_described(target: Any, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        Structure.of(target)


@pytest.mark.parametrize(
    "structure",
    [
        Structure("os:system", children=(Structure("float32"),)),
        Structure("os:_Environ", children=()),
        Structure("builtins:type", children=()),
        Structure("antigravity:fly", children=()),
        Structure("no:such", children=()),
        Structure("builtins:dict", keys=(1,), children=()),
        Structure("load"),
        Structure("float32", shape=(-3,)),
        Structure("float32", shape=(2**62, 2**62)),
        Structure("collections:defaultdict", children=(), factory="eval"),
        Structure(f"{__name__}:Masks", keys=("__class__",), children=(Structure("float32"),)),
        Structure(f"{__name__}:Boxes", children=()),
    ],
    ids=str,
)
def test_a_structure_that_no_worker_sends(structure: Structure) -> None:
    with pytest.raises(ModelError, match="this worker cannot make a"):
        structure.example()
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("answer", [b"\x80\x04N.", b'["fast"]', b"[null]", b"[" * 10_000, b""])
def test_a_stranger_answers_a_probe(answer: bytes) -> None:
    store = dist.HashStore()
    store.set("1/1", answer)
    with pytest.raises(WorkerDiedError, match="coming together: the answer of worker 1 cannot be read"):
        Rendezvous(store, 0, 2, 1.0).exchange(0.5, float)
