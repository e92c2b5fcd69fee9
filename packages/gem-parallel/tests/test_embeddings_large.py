"""Beyond 32 bits on one GPU: the last rows of large tables are read and updated, and no other; every id counts."""

import pytest
import torch

from gem_parallel import FeatureConfig, ShardedEmbeddings, SparseOptimizerConfig, TableConfig
from gem_parallel._src.embeddings import module as module_source


def needs(gibibytes):
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory")


@pytest.mark.gpu
@pytest.mark.memory
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "dim"), [(2**26 + 8, 64), (2**31 - 2, 4)], ids=["elements", "rows"])
def test_rows_beyond_32_bits_of_elements(monkeypatch, num_rows, dim, dtype):
    needs(40)
    # Drawing four billion numbers on the CPU takes minutes.
    monkeypatch.setattr(module_source, "fill_initial", lambda weight, *_: weight.zero_())
    tables = [TableConfig(name="big", num_rows=num_rows, dim=dim), TableConfig(name="after", num_rows=8, dim=dim)]
    features = [FeatureConfig(name=table.name, table=table.name, pooling="none") for table in tables]
    module = ShardedEmbeddings(
        tables,
        features,
        optimizer=SparseOptimizerConfig(kind="sgd", learning_rate=0.5),
        weight_dtype=dtype,
        device="cuda",
    )
    weights = {name: module.state_dict()[f"tables.{name}.weight"] for name in ("big", "after")}
    ids = torch.tensor([0, 2**25, num_rows - 7, num_rows - 1], device="cuda")
    for number, row in enumerate(ids.tolist()):
        weights["big"][row] = number + 1
    weights["after"][3] = 9
    pairs = {
        "big": (ids, torch.tensor([0, 4], device="cuda")),
        "after": (torch.tensor([3], device="cuda"), torch.tensor([0, 1], device="cuda")),
    }
    rows = module.lookup(module.exchange(pairs))
    assert rows["big"][:, 0].tolist() == [1, 2, 3, 4]
    assert rows["after"][:, dim - 1].tolist() == [9]
    (rows["big"].sum() + rows["after"].sum()).backward()
    assert weights["big"][ids, dim - 1].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert weights["after"][3, 0].item() == 8.5
    weights["big"][ids] = 0
    assert not any(bool(part.any()) for part in weights["big"].split(2**23))


@pytest.mark.gpu
def test_more_ids_than_one_lookup_takes_are_refused_before_any_work():
    tables = [TableConfig(name="small", num_rows=8, dim=4)]
    features = [FeatureConfig(name="small", table="small")]
    module = ShardedEmbeddings(tables, features, optimizer=SparseOptimizerConfig(kind="sgd"), device="cuda")
    ids = torch.zeros(1, dtype=torch.int64, device="cuda").expand(2**31)
    offsets = torch.tensor([0, 2**31], device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with pytest.raises(ValueError, match=r"at most 2147483646 ids in one batch of a rank .*got 2147483648; split"):
        module.exchange({"small": (ids, offsets)})
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.gpu
@pytest.mark.memory
def test_a_batch_of_more_than_2_to_31_ids():
    """Two engines, each of half of them; sums of whole numbers, so every bit is known."""
    needs(120)
    num, size, rows = 2**30 + 2**12, 2**12, 2**10
    tables = [TableConfig(name=f"t{dim}", num_rows=rows, dim=dim) for dim in (4, 8)]
    features = [FeatureConfig(name=table.name, table=table.name) for table in tables]
    optimizer = SparseOptimizerConfig(kind="sgd", learning_rate=2.0**-22)
    module = ShardedEmbeddings(tables, features, optimizer=optimizer, device="cuda")
    for weight in module.state_dict().values():
        weight.fill_(1)
    ids = torch.arange(num, device="cuda").remainder_(rows)
    offsets = torch.arange(0, num + 1, size, device="cuda")
    outputs = module.lookup(module.exchange({table.name: (ids, offsets) for table in tables}))
    assert sum(table.num_rows for table in tables) < 2**31 < 2 * num
    for table in tables:
        assert outputs[table.name].shape == (num // size, table.dim)
        assert bool((outputs[table.name] == size).all())
    torch.autograd.backward(list(outputs.values()), [torch.ones_like(each) for each in outputs.values()])
    for weight in module.state_dict().values():
        assert bool((weight == 1 - (num // rows) * 2.0**-22).all())
    # The last id of all is looked at, too.
    ids[-1] = rows
    with pytest.raises(IndexError, match=rf"feature 't4': ids of table 't4' must lie in \[0, {rows}\).*got {rows} "):
        module.lookup(module.exchange({table.name: (ids, offsets) for table in tables}))
