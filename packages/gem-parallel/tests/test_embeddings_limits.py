"""Batches and tables beyond 32-bit numbers: refused before any work, or laid out with 64-bit ones; no large memory."""

from dataclasses import dataclass

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from gem_parallel import FeatureConfig, ShardedEmbeddings, SparseOptimizerConfig, TableConfig
from gem_parallel._src.embeddings import batch_layout as layout_source
from gem_parallel._src.embeddings import local as local_source
from gem_parallel._src.embeddings.batch_layout import Structure
from gem_parallel._src.embeddings.layout import FeatureSlot
from gem_parallel._src.embeddings.limits import MAX_BAGS, MAX_IDS, check_num_received
from gem_parallel._src.embeddings.unit_layout import Unit

BILLION = 2**30


def make(pooling="sum", features=1, mesh=None, kind="sgd", hashed=False):
    return ShardedEmbeddings(
        [TableConfig(name="t", num_rows=9, dim=8, hashed=hashed)],
        [FeatureConfig(name=f"f{at}", table="t", pooling=pooling) for at in range(features)],
        optimizer=SparseOptimizerConfig(kind=kind),
        mesh=mesh,
    )


def many(num):
    """(num,) zeros of one element's memory."""
    return torch.zeros(1, dtype=torch.int64).expand(num)


@dataclass(frozen=True, kw_only=True)
class Refused:
    id: str
    sizes: tuple[tuple[int, int], ...]
    """Values and offsets of each feature."""
    text: str
    pooling: str = "sum"
    kind: str = "sgd"


REFUSED = [
    Refused(id="ids of one feature", sizes=((2**31, 2),), text=r"feature 'f0' .*at most 2147483646 ids in .*83648;"),
    Refused(id="ids together", sizes=((BILLION, 2), (BILLION, 2)), text=r"features 'f0', 'f1' .* ids together .*got 2"),
    Refused(id="ids not pooled", sizes=((2**32 + 5, 2),), text=r"ids in one batch .*4294967301", pooling="none"),
    Refused(id="bags of one feature", sizes=((1, 2**31),), text=r"at most 2147483646 bags in .*got 2147483647; split"),
    Refused(id="bags together", sizes=((1, BILLION + 1), (1, BILLION + 1)), text=r"bags together .*got 2147483648;"),
    Refused(id="PyTorch's engine", sizes=((2**31, 2),), text=r"at most 2147483646 ids", kind="adam"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.id)
def test_too_large_batches_are_refused_before_any_work(case):
    module = make(case.pooling, len(case.sizes), kind=case.kind)
    assert (module._local is None) == (case.kind == "adam")
    batch = {f"f{at}": (many(values), many(offsets)) for at, (values, offsets) in enumerate(case.sizes)}
    with pytest.raises(ValueError, match=case.text):
        module.exchange(batch)
    good = {"f0": (torch.tensor([3]), torch.tensor([0, 1]))}
    assert module.lookup(module.exchange(good))["f0"].shape == (1, 8)


class NoOperator(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran")


@pytest.mark.parametrize("hashed", [False, True], ids=["rows", "hashed"])
@pytest.mark.parametrize("way", ["kernel", "operators", "PyTorch's engine"])
def test_no_operator_runs_before_too_many_ids_are_refused(monkeypatch, way, hashed):
    """A copy or a hash of them would take 16 GiB."""
    monkeypatch.setattr(local_source, "lays_out_by_kernel", lambda device: way == "kernel")
    module = make(kind="adam" if way == "PyTorch's engine" else "sgd", hashed=hashed)
    batch = {"f0": (many(2**31), torch.tensor([0, 2**31]))}
    with pytest.raises(ValueError, match="at most 2147483646 ids"), NoOperator():
        module.exchange(batch)


def test_what_one_rank_is_asked_for():
    check_num_received(8, 3, MAX_IDS)
    with pytest.raises(ValueError, match=r"at most 2147483646 rows of tables of dim 8 .*2147483647 for rank 3; use"):
        check_num_received(8, 3, MAX_IDS + 1)


def test_tables_beyond_the_rows_of_a_rank_are_refused():
    config = TableConfig(name="huge", num_rows=2**31 - 1, dim=4)
    with pytest.raises(ValueError, match=r"table 'huge' must have at most 2147483646 rows on one rank.*2 ranks"):
        ShardedEmbeddings([config], [], optimizer=SparseOptimizerConfig())


def rank_refused(rank, world_size, folder):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("sparse_shard",))
    module = make(mesh=mesh)
    texts = []
    for size in (2**31, 2):
        batch = {"f0": (many(size if rank == 1 else 2), torch.tensor([0, 2]))}
        try:
            texts.append(tuple(module.lookup(module.exchange(batch))["f0"].shape))
        except (ValueError, RuntimeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


@pytest.mark.dist
def test_one_rank_with_too_many_ids_ends_the_exchange_on_all(ranks):
    other, mine = ranks("rank_refused", 2)
    assert mine[0].startswith("ValueError: exchange: feature 'f0' of tables of dim 8 must have at most 2147483646 ids")
    assert other[0].startswith("RuntimeError: exchange: rank 1: refused its batch")
    assert mine[1] == other[1] == (1, 8)


@pytest.mark.parametrize("total", [1, 8, 9, 24, 25, 1000])
def test_single_rows_are_bags_that_fbgemm_can_number(monkeypatch, total):
    engine = make()._engines[0][0]._inner
    monkeypatch.setattr(engine, "max_bags", 24)
    offsets = engine._single_offsets(total)
    assert offsets.dtype == torch.int64
    assert 1 <= offsets.numel() - 1 <= 24
    assert offsets[0] == 0
    assert offsets[-1] == total
    assert bool((offsets.diff() >= 0).all())


# ---------------------------------------------------------------- numbers


def unit(names, poolings, dim=8):
    """A unit with a table of nearly 2^31 rows per feature."""
    slots = tuple(
        FeatureSlot(config=FeatureConfig(name=name, table=name, pooling=pooling), table=at, index=at, piece=0)
        for at, (name, pooling) in enumerate(zip(names, poolings, strict=True))
    )
    return Unit(
        slots=slots,
        num_rows=(MAX_BAGS,) * len(slots),
        bases=tuple(at * (MAX_BAGS + 1) for at in range(len(slots))),
        tables=tuple(range(len(slots))),
        dim=dim,
        sums=True,
    )


def test_positions_of_a_batch_of_six_billion_elements():
    """Three engines whose values and offsets lie beyond 2^32: every bound and place by plain integers."""
    units = [
        unit(["a", "b"], ["none", "sum"]),
        unit(["c", "d"], ["sum", "mean"], dim=16),
        unit(["e"], ["none"], dim=32),
    ]
    names = ["e", "d", "c", "b", "a"]
    structure = Structure(units, [[True] * len(each.slots) for each in units], names, torch.device("meta"))
    values = [BILLION, BILLION - 7, 3, BILLION * 2 - 9, BILLION + 1]
    offsets = [2, BILLION - 5, 1, 5, BILLION]
    layout = structure.lay_out(values, offsets)
    assert layout.bounds is None
    assert structure.names == ["a", "b", "c", "d", "e"]
    total = sum(values)
    assert layout.num_values == total > 2**32
    assert layout.num_elements == total + BILLION + sum(offsets)
    # Of b the offsets of a's bags of one id come first; those of a and e are checked only.
    assert layout.parts == [
        *(values[0] + values[1], values[2] + values[3], values[4]),
        *(BILLION + offsets[1], offsets[2] + offsets[3], 0),
        offsets[0] + offsets[4],
    ]
    expected, at = [], 0
    for table, size in zip((0, 1, 0, 1, 0), values, strict=True):
        expected.append((at, at + size, 0, MAX_BAGS - 1, table * (MAX_BAGS + 1)))
        at += size
    runs = [(None, 0), (1, BILLION), (2, 0), (3, values[2]), (0, 0), (4, 0)]
    for feature, shift in runs:
        if feature is None:
            bounds = [(0, 0, 0), (BILLION, 0, BILLION), (0, 0, 0)]
        else:
            size, num = values[feature], offsets[feature]
            end = size if num > 1 else 0
            bounds = [(1, 0, 0), (max(num - 2, 0), 0, size), (min(num - 1, 1), end, end)]
        for length, low, high in bounds:
            expected.append((at, at + length, low, high, shift))
            at += length
    found = [(each.start, each.end, each.low, each.high, each.shift) for each in layout.segments]
    assert found == expected
    assert at == layout.num_elements
    assert layout.impossible
    assert [each[0] for each in layout.pairs()] == structure.names
    for (_, start, end, first, last), size, num in zip(layout.pairs(), values, offsets, strict=True):
        assert (end - start, last - first) == (size, num)
    assert layout.units[1].kept.dtype == torch.int64
    assert layout.units[1].kept.numel() == offsets[2] + offsets[3] - 1
    assert layout.units[0].counting.numel() == BILLION


def test_bounds_are_written_out_in_64_bits(monkeypatch):
    """The same numbers per element and per segment; rows and shifts beyond 2^32."""
    units = [unit(["a", "b", "c"], ["none", "sum", "mean"])]
    arguments = units, [[True] * 3], ["a", "b", "c"], torch.device("cpu")
    sizes = [4, 3, 5], [3, 4, 2]
    written = Structure(*arguments).lay_out(*sizes)
    monkeypatch.setattr(layout_source, "MAX_EXPANDED", 0)
    segments = Structure(*arguments).lay_out(*sizes)
    assert written.segments == []
    assert segments.bounds is None
    lengths = torch.tensor([each.end - each.start for each in segments.segments])
    for name in ("low", "high", "shift"):
        numbers = torch.tensor([getattr(each, name) for each in segments.segments])
        assert torch.equal(getattr(written.bounds, name), torch.repeat_interleave(numbers, lengths))
        assert getattr(written.bounds, name).dtype == torch.int64
    assert int(written.bounds.shift.max()) == 2 * (MAX_BAGS + 1) > 2**31
    assert torch.equal(written.units[0].kept, segments.units[0].kept)
