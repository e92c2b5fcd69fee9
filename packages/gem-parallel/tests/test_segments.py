import pytest
import torch

from gem_parallel._src.embeddings.segments import sum_segments

STARTS = {
    "hot": [0, 3, 3, 998],
    "all-in-one": [0],
    "ones": list(range(1000)),
    "on-the-cuts": [0, 64, 128, 640],
    "empty-at-the-ends": [0, 0, 0, 500, 1000, 1000],
}


def inputs(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    sources = torch.randn(300, 24, generator=generator, dtype=torch.float64)
    return torch.randint(0, 300, (1000,), generator=generator).to(device), sources.to(device)


def loop(index, sources, starts):
    ends = [*starts[1:], len(index)]
    return torch.stack([sources[index[a:b]].sum(0) for a, b in zip(starts, ends, strict=True)])


@pytest.mark.parametrize("piece", [None, 1, 64, 999, 1000, 5000])
@pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS)
def test_sums_are_those_of_a_loop(starts, piece):
    index, sources = inputs()
    actual = sum_segments(index, sources, torch.tensor(starts), piece=piece)
    torch.testing.assert_close(actual, loop(index, sources, starts), rtol=1e-13, atol=1e-13)


def test_no_rows():
    sources = torch.randn(3, 4)
    actual = sum_segments(torch.zeros(0, dtype=torch.int64), sources, torch.zeros(2, dtype=torch.int64), piece=64)
    assert torch.equal(actual, torch.zeros(2, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS)
def test_cuda_sums_in_pieces_and_in_one_order(starts):
    index, sources = inputs("cuda")
    actual = sum_segments(index, sources, torch.tensor(starts, device="cuda"))
    expected = loop(index.cpu(), sources.cpu(), starts)
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-13, atol=1e-13)
    assert torch.equal(actual, sum_segments(index, sources, torch.tensor(starts, device="cuda")))
