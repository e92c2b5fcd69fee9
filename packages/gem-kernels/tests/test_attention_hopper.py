"""What Hopper's kernels of both attentions share: which calls they take, how they cut a batch, how they are called."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from gem_kernels._src.attention.hopper import call as hopper_call
from gem_kernels._src.attention.hopper import launch
from gem_kernels._src.attention.hopper.schedule import make_schedule
from gem_kernels._src.attention.pairing import pair_sequences


@dataclass(frozen=True, kw_only=True)
class SelectionCase:
    """One way in which a call differs from one that the kernels take."""

    id: str
    serves: bool = False
    device: str = "cuda"
    capability: tuple[int, int] = (9, 0)
    triton: str = "3.6.0"
    dtype: torch.dtype = torch.bfloat16
    head_dims: tuple[int, int] = (128, 128)
    """Of q and k, and of v."""
    window: tuple[int, int] = (-1, -1)
    pairing: dict[str, Any] = field(default_factory=dict)
    rows: int = 70
    row_stride: int | None = None
    head_stride: int | None = None
    """Of all three tensors, in place of the packed ones."""


SELECTION = [
    SelectionCase(id="bfloat16", serves=True),
    SelectionCase(id="float16", serves=True, dtype=torch.float16),
    SelectionCase(id="patch-version", serves=True, triton="3.6.1"),
    SelectionCase(id="wide-rows", serves=True, row_stride=1024),
    SelectionCase(id="requests-merged", serves=True, pairing={"request_index": torch.tensor([0])}),
    SelectionCase(id="cpu", device="cpu"),
    SelectionCase(id="ampere", capability=(8, 0)),
    SelectionCase(id="blackwell", capability=(10, 0)),
    SelectionCase(id="triton-3.9", triton="3.9.0"),
    SelectionCase(id="float32", dtype=torch.float32),
    SelectionCase(id="head-dim", head_dims=(96, 96)),
    SelectionCase(id="other-values", head_dims=(128, 64)),
    SelectionCase(id="left", window=(5, -1)),
    SelectionCase(id="causal", window=(-1, 0)),
    SelectionCase(id="seeds", pairing={"offsets_q": None}),
    SelectionCase(id="requests-window", window=(5, 5), pairing={"request_index": torch.tensor([0])}),
    SelectionCase(id="gap-between-heads", head_stride=136, row_stride=1024),
    SelectionCase(id="rows-not-of-16-bytes", row_stride=516),
    SelectionCase(id="beyond-32-bits", rows=2**31),
]


def selects(case, monkeypatch):
    """``serves`` on tensors of which there is nothing but their kind."""
    monkeypatch.setattr(launch, "capability_of", lambda _: case.capability)
    monkeypatch.setattr(launch.triton, "__version__", case.triton)
    with FakeTensorMode():
        made = []
        for dim in (case.head_dims[0], *case.head_dims):
            strides = (case.row_stride or 4 * dim, case.head_stride or dim, 1)
            made.append(torch.empty_strided((case.rows, 4, dim), strides, dtype=case.dtype, device=case.device))
    q, k, v = made
    offsets = torch.tensor([0, case.rows])
    options = {"offsets_q": offsets, "offsets_k": offsets, "request_index": None} | case.pairing
    left, right = case.window
    # Seeds make offsets on the device of q, whose rows are all that pairing reads of it.
    pairing = pair_sequences(torch.empty(0), max_seqlen_q=70, left=left, right=right, **options)
    return launch.serves(q, k, v, pairing, left, right, head_dims=(64, 128))


@pytest.fixture
def forget_version():
    """The version of Triton is looked up anew before and after."""
    for function in (launch.has_tested_gluon, launch._warn_of_gluon):
        function.cache_clear()
    yield
    for function in (launch.has_tested_gluon, launch._warn_of_gluon):
        function.cache_clear()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("case", SELECTION, ids=lambda case: case.id)
def test_which_calls_the_kernels_take(case, forget_version, monkeypatch):
    assert selects(case, monkeypatch) == case.serves


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_another_triton_is_said_once(forget_version, monkeypatch):
    (case,) = (case for case in SELECTION if case.id == "triton-3.9")
    with pytest.warns(UserWarning, match=r"have run with Triton 3\.6 alone, got 3\.9.*; install triton 3\.6") as caught:
        taken = [selects(case, monkeypatch) for _ in range(2)]
    assert taken == [False, False]
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_none_inside_portable_only(forget_version, monkeypatch):
    with launch.portable_only():
        with launch.portable_only():
            pass
        assert not selects(SELECTION[0], monkeypatch)
    assert selects(SELECTION[0], monkeypatch)


def offsets_of(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)])


@dataclass(frozen=True, kw_only=True)
class ScheduleCase:
    id: str
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]


SCHEDULES = [
    ScheduleCase(id="one", lengths_q=(5,), lengths_k=(3,)),
    ScheduleCase(id="empty-sides", lengths_q=(0, 0, 3, 129), lengths_k=(1, 0, 0, 0)),
    ScheduleCase(id="more-than-a-block", lengths_q=(5,) * 300, lengths_k=(3,) * 300),
    ScheduleCase(id="mixed", lengths_q=(200,) * 90, lengths_k=(40, 64, 65, 256, 257, 900) * 15),
    ScheduleCase(id="long", lengths_q=(3000, 1), lengths_k=(256, 5000)),
]


@pytest.mark.parametrize("max_tiles", [1, 8])
@pytest.mark.parametrize("case", SCHEDULES, ids=lambda case: case.id)
def test_chunks_cover_every_query_row_once_and_come_with_most_work_first(case, max_tiles, interpreter):
    offsets_q, offsets_k = offsets_of(case.lengths_q), offsets_of(case.lengths_k)
    schedule = make_schedule(
        offsets_q, offsets_k, sum(case.lengths_q), tile_rows=128, resident_keys=256, max_tiles=max_tiles
    )
    count = int(schedule.num_chunks)
    chunks = schedule.chunks[:count].tolist()
    expected = []
    for first_q, len_q, first_k, len_k in zip(
        offsets_q.tolist()[:-1], case.lengths_q, offsets_k.tolist()[:-1], case.lengths_k, strict=True
    ):
        rows = 128 * max_tiles if len_k <= 256 else 128
        expected += [[first_q + i, min(rows, len_q - i), first_k, len_k] for i in range(0, len_q, rows)]
    assert sorted(chunks) == sorted(expected)
    work = {row[2:][0]: 0 for row in chunks}
    for _first_q, rows, first_k, len_k in chunks:
        work[first_k] = max(work[first_k], rows * len_k)
    order = [work[row[2]] for row in chunks]
    if len(set(case.lengths_k)) == len(case.lengths_k):
        assert order == sorted(order, reverse=True)


def test_a_kernel_is_looked_up_once_for_each_kind_of_call(monkeypatch):
    monkeypatch.setattr(hopper_call, "_compiled", {})
    calls = []

    class Kernel:
        arg_names = ("x", "scale", "places", "D")

        def __getitem__(self, grid):
            def launch(*args, **constants):
                calls.append(("looked up", grid, constants))
                return Compiled()

            return launch

    class Compiled:
        def __getitem__(self, grid):
            return lambda *args: calls.append(("called", grid, args[1:]))

    kernel, device = Kernel(), torch.device("cuda", 0)
    rows = torch.zeros(33, dtype=torch.int64)
    unaligned = rows[1:]
    for arguments, constants in (
        ((rows, 0.5, None), {"D": 64}),
        ((rows[2:], 0.25, None), {"D": 64}),
        ((unaligned, 0.5, None), {"D": 64}),
        ((rows.int(), 0.5, None), {"D": 64}),
        ((rows, 0.5, rows), {"D": 64}),
        ((rows, 0.5, None), {"D": 128}),
    ):
        hopper_call.call(kernel, 7, arguments, constants, device)
    assert [name for name, *_ in calls] == ["looked up", "called"] + ["looked up"] * 4
    assert calls[1] == ("called", (7, 1, 1), (0.25, None, 64))


@pytest.mark.parametrize("stride", [64, 512, 1024])
@pytest.mark.parametrize(("first", "length"), [(0, 1), (5, 0), (1000, 129), (2**30 - 70, 70)])
def test_rows_of_a_sequence_descriptor_are_where_they_are_and_end_with_the_sequence(stride, first, length):
    pytest.importorskip("triton.experimental.gluon")
    x = torch.empty(8 * 1024, dtype=torch.bfloat16).as_strided((8, 1, 64), (stride, 64, 1))
    made = hopper_call.sequence_descriptor(x, 128)
    assert made.block_shape == [1, 1, 128, 64]
    # What the driver demands: sizes of 32 bits, strides of whole 16 bytes below 2**40.
    assert all(size < 2**31 for size in made.shape)
    assert all(0 < 2 * s < 2**40 and 2 * s % 16 == 0 for s in made.strides[:-1])
    for row in (0, 1, 127, 128, length - 1, length, length + 200):
        for channel in (0, 63):
            end = hopper_call.SEQUENCE_END
            coordinates = (end, first + length, end - length + row, channel)
            assert all(0 <= c < 2**31 for c in coordinates)
            address = 2 * sum(c * s for c, s in zip(coordinates, made.strides, strict=True))
            assert address % 2**64 == 2 * ((first + row) * stride + channel)
            # Only the row decides whether the element is one of the tensor.
            inside = [c < size for c, size in zip(coordinates, made.shape, strict=True)]
            assert inside == [True, True, row < length, True]
