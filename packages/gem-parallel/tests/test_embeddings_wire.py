"""What travels: number and bytes of collectives per step, precision on the wire, and transfers started early."""

import pytest
import torch
import torch.distributed as dist
from sparse_cases import SparseCase, compare, full_state, make, rank_batch, train_step

from gem_parallel import FeatureConfig, ParallelDims, ShardedEmbeddings, SparseOptimizerConfig, TableConfig
from gem_parallel._src.embeddings import link
from gem_parallel._src.embeddings.wire import bytes_per_row, pack_rows, unpack_rows

# Relative to the largest magnitude of a row: half a spacing of the format at its top, where it is widest.
BOUNDS = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float8_e4m3fn: 2.0**-4}
DIM = 16


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_pack_and_unpack(dtype):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(50, DIM, generator=generator)
    # gradients as small as a mean over a large batch makes them, and large ones
    rows *= torch.logspace(-12, 12, 50).unsqueeze(1)
    rows[3] = 0
    packed = pack_rows(rows, dtype)
    assert packed.shape == (50, bytes_per_row(DIM, dtype))
    out = torch.full_like(rows, float("nan"))
    unpack_rows(packed, dtype, out)
    bound = BOUNDS[dtype] * rows.abs().amax(1, keepdim=True)
    assert bool(((out - rows).abs() <= bound).all())
    # what was rounded once is not rounded again on the next hop
    again = torch.empty_like(rows)
    unpack_rows(pack_rows(out, dtype), dtype, again)
    assert torch.equal(again, out)
    rows[7, 2] = float("nan")
    unpack_rows(pack_rows(rows, dtype), dtype, out)
    assert bool(out[7, 2].isnan())
    assert bool(out[[0, 49]].isfinite().all())
    none = torch.empty(0, DIM)
    unpack_rows(pack_rows(none, dtype), dtype, none)


@pytest.mark.parametrize("exponent", [-149, -130, -126, -1, 0, 127])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_pack_keeps_powers_of_two_at_the_ends_of_float32(dtype, exponent):
    rows = torch.full((1, 4), 2.0**exponent)
    out = torch.empty_like(rows)
    unpack_rows(pack_rows(rows, dtype), dtype, out)
    flushed = {torch.bfloat16: -133, torch.float8_e4m3fn: -135}.get(dtype, -150)
    assert torch.equal(out, torch.zeros_like(rows) if exponent < flushed else rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_cuda_packs_the_same_bytes(dtype):
    rows = torch.randn(300, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-12, 12, 300).unsqueeze(1)
    rows[5] = 0
    packed = pack_rows(rows.cuda(), dtype)
    assert torch.equal(packed.cpu(), pack_rows(rows, dtype))
    out, expected = torch.empty_like(rows, device="cuda"), torch.empty_like(rows)
    unpack_rows(packed, dtype, out)
    unpack_rows(packed.cpu(), dtype, expected)
    assert torch.equal(out.cpu(), expected)


class Recorder:
    """Counts collectives and the bytes that each rank puts in."""

    def __init__(self):
        self.calls = []
        places = ((dist, "all_to_all_single"), (link, "all_gather_single"), (dist, "all_reduce"))
        self.originals = [(place, name, getattr(place, name)) for place, name in places]

    def __enter__(self):
        for place, name, original in self.originals:
            setattr(place, name, self.recorded(name, original))
        return self

    def recorded(self, name, original):
        def call(*args, **options):
            tensor = args[0] if name == "all_reduce" else args[1]
            self.calls.append((name, tensor.numel() * tensor.element_size()))
            return original(*args, **options)

        return call

    def __exit__(self, *_):
        for place, name, original in self.originals:
            setattr(place, name, original)


TABLES = {"rows": ("row_wise", 40), "copy": ("replicated", 6), "columns": ("column_wise", 12)}


def make_counted(mesh, **options):
    tables = [TableConfig(name=name, num_rows=rows, dim=DIM, placement=kind) for name, (kind, rows) in TABLES.items()]
    features = [FeatureConfig(name=name, table=name) for name in TABLES]
    optimizer = SparseOptimizerConfig(kind="adagrad")
    return ShardedEmbeddings(tables, features, optimizer=optimizer, mesh=mesh, **options)


def counted_batch(rank):
    """8, 3 and 4 distinct ids on each rank, each twice."""
    found = {}
    for name, first, count in (("rows", rank * 2, 8), ("copy", 0, 3), ("columns", rank, 4)):
        values = (torch.arange(count) * 3 + first).repeat(2) % TABLES[name][1]
        found[name] = (values, torch.tensor([0, count, 2 * count]))
    return found


def rank_counts(rank, world_size, folder):
    found = {}
    meshes = {
        replicas: ParallelDims.for_world(world_size, sparse_replicate=replicas).build_mesh("cpu").sparse
        for replicas in (1, 2)
    }
    for replicas, gather in ((1, "tables"), (2, "tables"), (2, "rows")):
        for dtype in BOUNDS:
            module = make_counted(meshes[replicas], wire_dtype=dtype, gather=gather)
            phases = []
            with Recorder() as recorder:
                pending = module.exchange(counted_batch(rank))
                phases.append(recorder.calls.copy())
                recorder.calls.clear()
                outputs = module.lookup(pending)
                phases.append(recorder.calls.copy())
                recorder.calls.clear()
                sum(each.sum() for each in outputs.values()).backward()
                phases.append(recorder.calls.copy())
            received = [int(request.rows.numel()) for request in pending.requests]
            asked = [sum(way.counts) for way in (each.replicas for each in pending.requests) if way is not None]
            found[replicas, gather, dtype] = (phases, received, asked)
    return found


@pytest.fixture(scope="module")
def counts(ranks):
    return ranks("rank_counts", 4)


@pytest.mark.dist
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_collectives_of_one_copy(counts, dtype):
    """Per step 1 + 3 per sharded group; ids 8 bytes, rows and gradients at the wire's width, once per distinct id."""
    # groups: rows (dim 16), copy (replicated), columns (4 parts of 4 columns)
    for result in counts:
        (exchange, lookup, backward), (num_rows, _, num_columns), _ = result[1, "tables", dtype]
        tables = 1 + 4
        assert exchange == [
            ("all_to_all_single", 4 * (7 + tables) * 8),
            ("all_to_all_single", 8 * 8),
            ("all_to_all_single", 4 * 4 * 8),
        ]
        assert lookup == [
            ("all_to_all_single", num_rows * bytes_per_row(16, dtype)),
            ("all_to_all_single", num_columns * bytes_per_row(4, dtype)),
        ]
        assert backward == [
            ("all_to_all_single", 8 * bytes_per_row(16, dtype)),
            ("all_reduce", 6 * 17 * 4),
            ("all_to_all_single", 4 * 4 * bytes_per_row(4, dtype)),
        ]
    assert sum(result[1, "tables", dtype][1][0] for result in counts) == 4 * 8


@pytest.mark.dist
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_collectives_of_two_copies(counts, dtype):
    """A second exchange of counts; per sharded group one gather of a slice, ids and gradients once more."""
    for result in counts:
        (exchange, lookup, backward), (num_rows, _, num_columns), _ = result[2, "tables", dtype]
        # columns: 2 parts of 8 columns, on 2 ranks; counts per table and slice
        tables = 1 + 2
        assert exchange == [
            ("all_to_all_single", 2 * (7 + 2 * tables) * 8),
            ("all_to_all_single", 2 * (9 + 2 * tables) * 8),
            ("all_to_all_single", 8 * 8),
            ("all_to_all_single", 2 * 4 * 8),
        ]
        assert lookup == [
            ("all_gather_single", 10 * 16 * 4),
            ("all_to_all_single", num_rows * 8),
            ("all_gather_single", 6 * 8 * 4),
            ("all_to_all_single", num_columns * 8),
            ("all_to_all_single", num_rows * bytes_per_row(16, dtype)),
            ("all_to_all_single", num_columns * bytes_per_row(8, dtype)),
        ]
        assert backward == [
            ("all_to_all_single", 8 * bytes_per_row(16, dtype)),
            ("all_reduce", 6 * 17 * 4),
            ("all_to_all_single", 2 * 4 * bytes_per_row(8, dtype)),
            ("all_to_all_single", num_rows * bytes_per_row(16, dtype)),
            ("all_to_all_single", num_columns * bytes_per_row(8, dtype)),
        ]


@pytest.mark.dist
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_collectives_of_two_copies_that_gather_rows(counts, dtype):
    """Rows in place of tables between the copies; all else as with tables."""
    for result in counts:
        (exchange, lookup, backward), (num_rows, _, num_columns), asked = result[2, "rows", dtype]
        tables = result[2, "tables", dtype][0]
        assert (exchange, backward) == (tables[0], tables[2])
        assert lookup == [
            ("all_to_all_single", num_rows * 8),
            ("all_to_all_single", num_columns * 8),
            ("all_to_all_single", asked[0] * bytes_per_row(16, dtype)),
            ("all_to_all_single", num_rows * bytes_per_row(16, dtype)),
            ("all_to_all_single", asked[1] * bytes_per_row(8, dtype)),
            ("all_to_all_single", num_columns * bytes_per_row(8, dtype)),
        ]


CASE = SparseCase("mixed", "mixed", "sgd", True)


def rank_modes(rank, world_size, folder):
    """Ids a batch ahead and rows started early, kept gathers, narrow wires: state after three steps of each."""
    mesh = ParallelDims.for_world(world_size, sparse_replicate=2).build_mesh("cpu").sparse
    batches = [rank_batch(CASE, step, rank, world_size) for step in range(3)]
    ids = [{name: pair[:2] for name, pair in batch.items()} for batch in batches]
    found = {}
    plain = make(CASE, mesh)
    found["plain"] = [train_step(plain, CASE, batch) for batch in batches], full_state(plain)
    asking = make(CASE, mesh, gather="rows")
    found["rows"] = [train_step(asking, CASE, batch) for batch in batches], full_state(asking)
    with torch.no_grad():
        # evaluation asks, too
        looked = [module.lookup(module.exchange(ids[0])) for module in (plain, asking)]
    assert all(torch.equal(value, looked[1][name]) for name, value in looked[0].items())
    early = make(CASE, mesh)
    outputs, pending = [], early.exchange(ids[0])
    for at, batch in enumerate(batches):
        early.start_lookup(pending)
        following = early.exchange(ids[at + 1]) if at + 1 < len(batches) else None
        rows = early.lookup(pending)
        sum((each * batch[name][2]).sum() for name, each in rows.items()).backward()
        outputs.append({name: each.detach() for name, each in rows.items()})
        pending = following
    found["early"] = outputs, full_state(early)
    for dtype in list(BOUNDS)[1:]:
        narrow = make(CASE, mesh, wire_dtype=dtype)
        found[dtype] = [train_step(narrow, CASE, batch) for batch in batches], full_state(narrow)
    kept = make(CASE, mesh, keep_gathered=True)
    gathers = []
    start = full_state(plain)
    for module in (plain, kept):
        stores = [store.gathered for store in module._stores if getattr(store, "gathered", None) is not None]
        before = sum(store.num_gathers for store in stores)
        module.load_state_dict({key: start[key] for key in module.state_dict()})
        with torch.no_grad():
            looked = [module.lookup(module.exchange(ids[0])) for _ in range(3)]
        between = sum(store.num_gathers for store in stores)
        states = {store.state.value for store in stores}
        train_step(module, CASE, batches[0])
        after = [store.state.value for store in stores]
        looked.append(module.lookup(module.exchange(ids[0])))
        gathers.append((len(stores), between - before, states, set(after), looked))
    return found, gathers


@pytest.fixture(scope="module")
def modes(ranks):
    return ranks("rank_modes", 2)


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["early", "rows"])
def test_early_start_and_gathering_rows_change_nothing(modes, mode):
    for found, _ in modes:
        for one, other in zip(found["plain"][0], found[mode][0], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
        assert all(torch.equal(value, found[mode][1][key]) for key, value in found["plain"][1].items())


@pytest.mark.dist
@pytest.mark.parametrize("dtype", list(BOUNDS)[1:], ids=str)
def test_narrow_wire_stays_within_its_rounding(modes, dtype):
    """Outputs are sums of at most 4 rows below 3; three SGD steps of 0.125 on gradients below 80, rounded twice."""
    for found, _ in modes:
        outputs, state = found[dtype]
        for one, other in zip(found["plain"][0], outputs, strict=True):
            for name, value in one.items():
                assert float((value - other[name]).abs().max() if value.numel() else 0) <= 4 * 3 * BOUNDS[dtype] + (
                    3 * 0.125 * 80 * 2 * BOUNDS[dtype]
                ), name
        moved = False
        for key, value in found["plain"][1].items():
            error = float((value - state[key]).abs().max())
            assert error <= 3 * 0.125 * 80 * 2 * BOUNDS[dtype], key
            moved |= error > 0
        # gradients are multiples of 1/8 with few bits: only the narrowest format rounds all of them away
        assert moved or dtype != torch.float8_e4m3fn


@pytest.mark.dist
def test_gathered_tables_are_released_or_kept(modes):
    for _, ((num, released, states, after, looked), (_, kept, kept_states, kept_after, kept_looked)) in modes:
        assert num > 1
        assert (released, states) == (3 * num, {"sharded"})
        assert (kept, kept_states) == (num, {"gathered"})
        # an update makes a kept copy stale
        assert after == kept_after == {"sharded"}
        for one, other in zip(looked, kept_looked, strict=True):
            for name, value in one.items():
                compare(value.detach(), other[name].detach(), True, name)


def test_gather_is_checked():
    with pytest.raises(ValueError, match="`gather` must be one of tables, rows, got 'all'"):
        make_counted(None, gather="all")
    with pytest.raises(ValueError, match="`keep_gathered` must be False with gather='rows'"):
        make_counted(None, gather="rows", keep_gathered=True)


def test_wire_dtype_is_checked():
    with pytest.raises(ValueError, match=r"`wire_dtype` must be one of torch.float32, .*got torch.float64"):
        make_counted(None, wire_dtype=torch.float64)


def test_a_batch_is_looked_up_once():
    module = make_counted(None)
    pending = module.exchange(counted_batch(0))
    module.start_lookup(pending)
    with pytest.raises(ValueError, match="start_lookup: `pending` must be a batch that was not looked up"):
        module.start_lookup(pending)
    module.lookup(pending)
    with pytest.raises(ValueError, match="lookup: `pending` must be a batch that was not looked up"):
        module.lookup(pending)
