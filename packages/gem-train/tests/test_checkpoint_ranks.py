"""What ranks do together: compare their copies before a checkpoint takes one of them for all, and share its reading."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from gem_train import checkpoint
from gem_train.checkpoint import Checkpointer
from gem_train.errors import CheckpointError
from gem_train.replicas import _part, find_differing_copies
from gem_train.world import World

NUM_RANKS = 3


class Meeting:
    """Where threads that stand for ranks exchange values."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(NUM_RANKS, timeout=20)
        self.values: list[Any] = [None] * NUM_RANKS

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


def worlds() -> list[World]:
    meeting = Meeting()

    class Thread(World):
        def gather(self, value: Any) -> list[Any]:
            return meeting.gather(self.rank, value)

    return [Thread(rank=rank, size=NUM_RANKS) for rank in range(NUM_RANKS)]


def on_ranks(function: Callable[[World], Any]) -> list[Any]:
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(function, worlds()))


def state(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.weight": torch.randn(5, 3, generator=generator),
        "model.narrow": torch.randn(7, generator=generator).bfloat16(),
        "model.flag": torch.tensor([True, False, True]),
        "optimizer.step": torch.tensor(4.0),
        "model.empty": torch.zeros(0, 3),
        f"rng.rank_{rank}": torch.full((2,), rank),
        **({"tables.only": torch.ones(2)} if rank == 1 else {}),
    }


def test_equal_copies_and_what_one_rank_alone_holds_are_no_difference() -> None:
    assert on_ranks(lambda world: find_differing_copies(state(world.rank), world)) == [[]] * NUM_RANKS


def nudge(tensor: Tensor) -> None:
    tensor[-1, -1] = torch.nextafter(tensor[-1, -1], torch.tensor(9.0))


def swap(tensor: Tensor) -> None:
    tensor[[0, 1]] = tensor[[1, 0]]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param("model.weight", nudge, id="one unit in the last place"),
        pytest.param("model.weight", swap, id="two rows swapped"),
        pytest.param("model.narrow", lambda x: x.__setitem__(6, -x[6]), id="a sign in bfloat16"),
        pytest.param("model.flag", lambda x: x.logical_not_(), id="bool"),
        pytest.param("optimizer.step", lambda x: x.add_(1), id="scalar"),
        pytest.param("model.weight", lambda x: x.mul_(-0.0), id="zeros"),
    ],
)
def test_a_copy_that_differs_is_found_by_all_ranks(name: str, change: Callable[[Tensor], object]) -> None:
    def find(world: World) -> list[tuple[str, int, int]]:
        tensors = state(world.rank)
        if world.rank == 2:
            change(tensors[name])
        return find_differing_copies(tensors, world)

    assert on_ranks(find) == [[(name, 0, 2)]] * NUM_RANKS


def test_a_difference_beyond_the_first_chunk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem_train.replicas._CHUNK", 4)

    def find(world: World) -> list[tuple[str, int, int]]:
        x = torch.arange(10.0)
        if world.rank == 1:
            x[[3, 7]] = x[[7, 3]]  # the same place in two chunks
        return find_differing_copies({"x": x}, world)

    assert on_ranks(find) == [[("x", 0, 1)]] * NUM_RANKS


def test_nothing_is_saved_of_copies_that_differ(tmp_path: Path) -> None:
    def save(world: World) -> str:
        tensors = state(world.rank)
        tensors["model.weight"][0, 0] += world.rank == 1
        with pytest.raises(CheckpointError) as caught:
            Checkpointer(tmp_path / "checkpoints", world=world).save(3, tensors, {})
        return str(caught.value)

    messages = on_ranks(save)
    assert messages == [messages[0]] * NUM_RANKS
    assert "got model.weight with other values on rank 1 than on rank 0; nothing was saved" in messages[0]
    assert not (tmp_path / "checkpoints").exists()


def test_ranks_share_the_reading_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: tensor for name, tensor in state(1).items() if tensor.numel()}
    path = Checkpointer(tmp_path).save(3, tensors, {})
    read: list[str] = []

    def describe(file: Path) -> dict[str, Any]:
        read.append(file.name)
        return describe_file(file)

    describe_file = checkpoint._describe_file
    monkeypatch.setattr(checkpoint, "_describe_file", describe)
    on_ranks(lambda world: Checkpointer(tmp_path, world=world).verify(3))
    assert sorted(read) == sorted({file.name for file in path.iterdir()} - {"manifest.json"})


@pytest.fixture
def rank_3_of_4() -> Iterator[None]:
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_parts_over_a_replicating_axis_are_copies(rank_3_of_4: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    part = torch.ones(2, 3)

    def placed(*placements: Any) -> DTensor:
        return DTensor.from_local(part, mesh, placements, run_check=False)

    assert _part(part) == _part(placed(Replicate(), Replicate())) == "whole"
    # Rank 3 is the second of both axes: what it holds of a sharded axis tells its part, its replica does not.
    assert _part(placed(Replicate(), Shard(0))) == _part(placed(Shard(0), Replicate())) == "1"
    assert _part(placed(Shard(0), Shard(1))) == "1,1"
