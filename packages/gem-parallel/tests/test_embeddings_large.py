"""Tables of more than 2^32 elements on one GPU: the last rows are read and updated, and no other."""

import pytest
import torch

from gem_parallel import FeatureConfig, ShardedEmbeddings, SparseOptimizerConfig, TableConfig
from gem_parallel._src.embeddings import module as module_source

ROWS, DIM = 2**26 + 8, 64


@pytest.mark.gpu
@pytest.mark.memory
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_beyond_32_bits_of_elements(monkeypatch, dtype):
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    # Drawing four billion numbers on the CPU takes minutes.
    monkeypatch.setattr(module_source, "fill_initial", lambda weight, *_: weight.zero_())
    tables = [TableConfig(name="big", num_rows=ROWS, dim=DIM), TableConfig(name="after", num_rows=8, dim=DIM)]
    features = [FeatureConfig(name=table.name, table=table.name, pooling="none") for table in tables]
    module = ShardedEmbeddings(
        tables,
        features,
        optimizer=SparseOptimizerConfig(kind="sgd", learning_rate=0.5),
        weight_dtype=dtype,
        device="cuda",
    )
    weights = {name: module.state_dict()[f"tables.{name}.weight"] for name in ("big", "after")}
    ids = torch.tensor([0, 2**25, 2**26 + 1, ROWS - 1], device="cuda")
    for number, row in enumerate(ids.tolist()):
        weights["big"][row] = number + 1
    weights["after"][3] = 9
    pairs = {
        "big": (ids, torch.tensor([0, 4], device="cuda")),
        "after": (torch.tensor([3], device="cuda"), torch.tensor([0, 1], device="cuda")),
    }
    rows = module.lookup(module.exchange(pairs))
    assert rows["big"][:, 0].tolist() == [1, 2, 3, 4]
    assert rows["after"][:, DIM - 1].tolist() == [9]
    (rows["big"].sum() + rows["after"].sum()).backward()
    assert weights["big"][ids, DIM - 1].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert weights["after"][3, 0].item() == 8.5
    weights["big"][ids] = 0
    assert not any(bool(part.any()) for part in weights["big"].split(2**23))
