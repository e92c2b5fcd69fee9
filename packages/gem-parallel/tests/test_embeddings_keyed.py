"""Joined batches give what the same features give one by one, bit for bit, and what is wrong with them is named."""

import os
import re

import pytest
import torch

from gem_parallel import (
    FeatureConfig,
    KeyedJaggedIds,
    Pending,
    ShardedEmbeddings,
    SparseOptimizerConfig,
    TableConfig,
)
from gem_parallel._src.embeddings import local as local_source
from gem_parallel._src.embeddings.keyed_path import KeyedBatch

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on CPU tensors: needs TRITON_INTERPRET=1"
)
gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
KERNEL_DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=gpu)]
TABLES = {"a": (40, 8), "b": (7, 8), "c": (1, 8), "wide": (25, 16)}
ONE_CALL = {
    "sum": {"b": "sum", "a": "sum", "a again": "sum", "c": "sum"},
    "mean": {"a": "mean", "b": "mean", "a again": "mean"},
    "none": {"a": "none", "c": "none", "b": "none"},
}
"""What one call of one engine takes."""
SEVERAL = {
    "dims": {"a": "sum", "wide": "sum", "b": "sum", "wide again": "sum"},
    "poolings": {"a": "sum", "b": "none", "a again": "mean", "c": "sum"},
}


def make(poolings, device, *, hashed=(), **options):
    names = dict.fromkeys(name.split()[0] for name in poolings)
    options.setdefault("optimizer", SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.1))
    return ShardedEmbeddings(
        [
            TableConfig(name=name, num_rows=TABLES[name][0], dim=TABLES[name][1], hashed=name in hashed)
            for name in names
        ],
        [FeatureConfig(name=name, table=name.split()[0], pooling=each) for name, each in poolings.items()],
        device=device,
        **options,
    )


def draw(generator, keys, device, num_bags=None, longest=4):
    """A joined batch; each bag has 0 to ``longest`` ids, and some keys none."""
    if num_bags is None:
        num_bags = int(torch.randint(1, 9, (1,), generator=generator))
    lengths = torch.randint(0, longest + 1, (len(keys), num_bags), generator=generator)
    lengths[torch.rand(len(keys), generator=generator) < 0.2] = 0
    values = [
        torch.randint(0, TABLES[key.split()[0]][0], (int(each.sum()),), generator=generator)
        for key, each in zip(keys, lengths, strict=True)
    ]
    return KeyedJaggedIds(keys, torch.cat(values).to(device), lengths=lengths.flatten().to(device))


def run(module, batch, *, joined):
    """One step whose gradient differs everywhere; the rows, feature after feature."""
    pending = module.exchange(batch)
    flat = (
        module.lookup_joined(pending) if joined else torch.cat([*map(torch.flatten, module.lookup(pending).values())])
    )
    if flat.numel():
        (flat * torch.linspace(-1, 2, flat.numel(), device=flat.device).view_as(flat)).sum().backward()
    return flat.detach().flatten()


def equal_states(left, right):
    left, right = left.state_dict(), right.state_dict()
    assert left.keys() == right.keys()
    return all(torch.equal(torch.as_tensor(value), torch.as_tensor(right[name])) for name, value in left.items())


def check_steps(device, poolings, *, fast, joined=True, **options):
    """Joined batches against mappings of the same; keys in the order of the tables, so that sums are, too."""
    left, right = (make(poolings, device, **options) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        keys = [key for key in poolings if float(torch.rand(1, generator=generator)) < 0.8] or list(poolings)
        batch = draw(generator, keys, device)
        pending = left.exchange(batch)
        taken = fast and batch.values.numel() > 0 and not set(keys) & set(options.get("hashed", ()))
        assert isinstance(pending.local, KeyedBatch) is taken, step
        ours = run(left, batch, joined=joined)
        assert torch.equal(ours, run(right, batch.split(), joined=False)), step
    assert equal_states(left, right)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*SEVERAL, *ONE_CALL])
@pytest.mark.parametrize("joined", [True, False])
def test_equal_to_a_mapping(device, joined, name):
    # Rows of two dims are not one tensor: test_rows_of_several_dims.
    joined = joined and name != "dims"
    check_steps(device, {**SEVERAL, **ONE_CALL}[name], fast=device == "cuda" and name in ONE_CALL, joined=joined)


@pytest.mark.parametrize("device", DEVICES)
def test_hashed_ids_and_measured_updates(device):
    poolings = {"a": "sum", "b": "sum"}
    check_steps(device, poolings, fast=device == "cuda", hashed=("a",))
    check_steps(device, poolings, fast=False, measure_updates=True)


def with_kernel(monkeypatch, device, block=8):
    """Joined batches of modules made from now on take the kernel, in programs of ``block`` elements."""
    from gem_parallel._src.embeddings import keyed_kernel

    monkeypatch.setattr(local_source, "lays_out_by_kernel", lambda _: True)
    monkeypatch.setattr(keyed_kernel, "BLOCK", block)
    # Made for another block.
    monkeypatch.setattr(keyed_kernel, "_compiled", {})


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("policy", ["error", "drop", "clamp"])
@pytest.mark.parametrize("name", list(ONE_CALL))
def test_the_kernel(monkeypatch, name, policy, device):
    """Good and bad batches: the same rows, updates, counts and errors as of the features one by one."""
    with_kernel(monkeypatch, device)
    poolings = ONE_CALL[name]
    left, right = (make(poolings, device, id_policy=policy) for _ in range(2))
    generator = torch.Generator().manual_seed(5)
    raised = passed = 0
    for step in range(16):
        keys = [key for key in poolings if float(torch.rand(1, generator=generator)) < 0.8] or list(poolings)
        batch = draw(generator, keys, device)
        if step % 3:
            batch = spoilt(generator, batch)
        found = []
        for module, joined in ((left, True), (right, False)):
            try:
                # What a key's own offsets say is said by split, too, in words of its own.
                pairs = batch if joined else batch.split()
                found.append(run(module, pairs, joined=joined))
            except (IndexError, ValueError) as error:
                found.append(str(error))
        if isinstance(found[0], str):
            assert found[0] == found[1], step
            raised += 1
        else:
            assert torch.equal(*found), step
            passed += 1
    assert raised > 1
    assert passed > 5
    assert equal_states(left, right)
    assert left.out_of_range_counts() == right.out_of_range_counts()
    assert sum(left.out_of_range_counts().values()) > 0


def unchecked(keys, values, offsets):
    """Ids whose offsets nobody has looked at, as on CUDA; on the CPU those of a batch that was changed since."""
    batch = KeyedJaggedIds(keys, values[:0], offsets=torch.zeros_like(offsets))
    batch.values, batch.offsets = values, offsets
    return batch


def spoilt(generator, batch):
    """The batch with one id or offset replaced."""
    values, offsets = batch.values.clone(), batch.offsets.clone()
    which = values if values.numel() and float(torch.rand(1, generator=generator)) < 0.5 else offsets
    at = int(torch.randint(0, which.numel(), (1,), generator=generator))
    choices = (-(2**63), -1, 0, 1, 3, 7, 40, 2**31, 2**63 - 1)
    which[at] = choices[int(torch.randint(0, len(choices), (1,), generator=generator))]
    return unchecked(batch.keys, values, offsets)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_every_offset_and_id_is_checked(monkeypatch, device):
    with_kernel(monkeypatch, device)
    module = make({"a": "sum", "b": "sum"}, device)
    values = torch.arange(7, device=device).repeat(3)
    offsets = torch.tensor([0, 4, 9, 9, 12, 20, 21], device=device)
    module.exchange(KeyedJaggedIds(["a", "b"], values, offsets=offsets))
    faulty = 0
    for at in range(offsets.numel()):
        low = offsets[at - 1] if at else 1
        high = offsets[at + 1] if at + 1 < offsets.numel() else 20
        for wrong in {int(low) - 1, int(high) + 1, -(2**63), 2**63 - 1} - {int(offsets[at])}:
            bad = offsets.clone()
            bad[at] = wrong
            with pytest.raises(ValueError, match="offsets"):
                module.lookup(module.exchange(unchecked(["a", "b"], values, bad)))
            with pytest.raises(ValueError, match=r"^KeyedJaggedIds: feature '[ab]': offsets must start at 0"):
                KeyedJaggedIds(["a", "b"], values, offsets=bad, validate=True)
            faulty += 1
    assert faulty > 20
    for at in range(values.numel()):
        name, rows = ("a", 40) if at < 9 else ("b", 7)
        for wrong in (-1, rows, 2**63 - 1):
            bad = values.clone()
            bad[at] = wrong
            with pytest.raises(IndexError, match=rf"feature '{name}'.*\[0, {rows}\).*got {wrong} \(1 such"):
                module.lookup(module.exchange(KeyedJaggedIds(["a", "b"], bad, offsets=offsets)))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_keys_in_any_order(monkeypatch, device):
    with_kernel(monkeypatch, device)
    module = make(ONE_CALL["sum"], device, optimizer=SparseOptimizerConfig(kind="sgd", learning_rate=0.1))
    generator = torch.Generator().manual_seed(1)
    batch = draw(generator, ["c", "a again", "b", "a"], device)
    pending = module.exchange(batch)
    assert isinstance(pending.local, KeyedBatch)
    joined = module.lookup_joined(pending)
    rows = module.lookup(module.exchange(batch))
    assert list(rows) == ["c", "a again", "b", "a"]
    expected = module.lookup(module.exchange(batch.split()))
    assert torch.equal(joined, torch.cat([expected[key] for key in rows]))
    assert all(torch.equal(rows[key], expected[key]) for key in rows)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_tensors_that_begin_anywhere_or_have_strides(monkeypatch, device):
    """After aligned ones, for which the kernel may have been made."""
    with_kernel(monkeypatch, device, block=64)
    module = make({"a": "sum", "b": "sum"}, device)
    module.eval()
    generator = torch.Generator().manual_seed(2)
    batch = draw(generator, ["a", "b"], device, num_bags=40)
    expected = module.lookup_joined(module.exchange(batch))
    for shift in (1, 3):
        values, offsets = (torch.cat([each.new_zeros(shift), each])[shift:] for each in (batch.values, batch.offsets))
        shifted = KeyedJaggedIds(batch.keys, values, offsets=offsets)
        assert torch.equal(module.lookup_joined(module.exchange(shifted)), expected)
    values = torch.stack([batch.values, batch.values + 1], dim=1)[:, 0]
    strided = KeyedJaggedIds(batch.keys, values, offsets=batch.offsets)
    assert torch.equal(module.lookup_joined(module.exchange(strided)), expected)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_one_gradient_is_not_copied(monkeypatch, device, pooling):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with_kernel(monkeypatch, device, block=64)
    module = make({"a": pooling, "b": pooling}, device)
    batch = draw(torch.Generator().manual_seed(2), ["a", "b"], device, num_bags=40)
    run(module, batch, joined=True)
    joined = module.lookup_joined(module.exchange(batch))
    gradient = torch.ones_like(joined)
    with Operators() as operators:
        joined.backward(gradient)
    assert any("backward_codegen_rowwise_adagrad" in name for name in operators.names)
    assert not {"cat", "copy_", "clone", "index_select", "sum", "add"}.intersection(operators.names), operators.names


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_tensors_changed_before_lookup(monkeypatch, device):
    """What was looked up is what came; a fault that can no longer be named is refused all the same."""
    with_kernel(monkeypatch, device)
    module = make({"a": "sum"}, device)
    stream = torch.cuda.current_stream() if device == "cuda" else None
    values, offsets = torch.tensor([3, 41], device=device), torch.tensor([0, 1, 2], device=device)
    # Not the module's exchange, which reads the check at once on the CPU.
    batch = module._local.keyed.exchange(KeyedJaggedIds(["a"], values, offsets=offsets), stream)
    values.zero_()
    assert batch.values.tolist() == [3, 39]
    with pytest.raises(ValueError, match="must not change before lookup returns"):
        module._local.keyed.faults(batch)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_refused_batch_is_not_looked_up(monkeypatch, device):
    with_kernel(monkeypatch, device)
    module = make({"a": "sum"}, device)
    ids = unchecked(["a"], torch.tensor([3, 4], device=device), torch.tensor([0, 1, 3], device=device))
    stream = torch.cuda.current_stream() if device == "cuda" else None
    path = module._local.keyed
    # Its check is not read yet, as by exchange on CUDA.
    pending = Pending(
        requests=(), works=[], summary=None, ready=None, local=path.exchange(ids, stream), path=path, stream=stream
    )
    pending.owner = module
    with pytest.raises(ValueError, match=r"feature 'a': offsets must .* got 0 to 3"):
        module.lookup(pending)
    with pytest.raises(ValueError, match="was not looked up"):
        module.lookup(pending)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["sum", "none", "poolings"])
def test_with_and_without_gradients(device, name):
    poolings = {**SEVERAL, **ONE_CALL}[name]
    module = make(poolings, device)
    batch = draw(torch.Generator().manual_seed(4), list(poolings), device, num_bags=9)
    before = module.state_dict()["tables.a.weight"].clone()
    with torch.no_grad():
        assert not module.lookup_joined(module.exchange(batch)).requires_grad
    module.eval()
    assert not module.lookup_joined(module.exchange(batch)).requires_grad
    module.train()
    pending = module.exchange(batch)
    module.start_lookup(pending)
    with torch.no_grad():
        rows = module.lookup_joined(pending)
    assert torch.equal(before, module.state_dict()["tables.a.weight"])
    rows.sum().backward()
    assert not torch.equal(before, module.state_dict()["tables.a.weight"])
    for look_up in (module.lookup, module.lookup_joined):
        with pytest.raises(ValueError, match="was not looked up, got one that was"):
            look_up(pending)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_bags", [0, 5])
def test_batches_without_ids(device, num_bags):
    module = make({"a": "sum", "b": "sum"}, device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    batch = KeyedJaggedIds(["b", "a"], none, lengths=torch.zeros(2 * num_bags, dtype=torch.int64, device=device))
    rows = module.lookup_joined(module.exchange(batch))
    assert torch.equal(rows.detach(), torch.zeros(2 * num_bags, 8, device=device))
    rows.sum().backward()
    rows = module.lookup(module.exchange(batch))
    assert [each.shape for each in rows.values()] == [(num_bags, 8)] * 2


def test_what_is_not_one_tensor():
    module = make(SEVERAL["dims"], "cpu")
    batch = draw(torch.Generator().manual_seed(6), ["wide", "a"], "cpu")
    pending = module.exchange(batch)
    with pytest.raises(ValueError, match=r"lookup_joined.*one dim, got 8 \('a'\), 16 \('wide'\); call lookup"):
        module.lookup_joined(pending)
    assert module.lookup(pending)["wide"].shape[1] == 16
    with pytest.raises(ValueError, match="must be of KeyedJaggedIds, got a batch that came as a mapping"):
        module.lookup_joined(module.exchange(batch.split()))
    with pytest.raises(TypeError, match="lookup_joined: `pending` must be a Pending, got dict"):
        module.lookup_joined({})


IDS = torch.tensor([1, 2, 3])
OFFSETS = torch.tensor([0, 1, 3])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("a", IDS), TypeError, "`keys` must be a sequence of feature names, got str"),
        (([1, 2], IDS), TypeError, "`keys` must be str, got int"),
        (([], IDS), ValueError, "at least one feature, got none"),
        ((["a", "b", "a"], IDS), ValueError, "distinct, got 'a' 2 times"),
        ((["a", "b"], [1]), TypeError, "`values` must be a Tensor, got list"),
        ((["a", "b"], IDS.int()), TypeError, "`values` must be int64, got torch.int32; use .long"),
        ((["a", "b"], IDS.view(1, 3)), ValueError, r"`values` must have one dim, got shape \(1, 3\)"),
        ((["a", "b"], IDS.to_sparse()), TypeError, "dense tensor, got one of layout .*; use .to_dense"),
        ((["a", "b", "c"], IDS), ValueError, "keys x bags \\+ 1 numbers.* 3 keys, got 3"),
    ],
)
def test_refused_joined_ids(arguments, error, text):
    with pytest.raises(error, match=text):
        KeyedJaggedIds(*arguments, offsets=OFFSETS)


def test_refused_offsets_and_lengths():
    with pytest.raises(ValueError, match="got neither"):
        KeyedJaggedIds(["a"], IDS)
    with pytest.raises(ValueError, match="got both"):
        KeyedJaggedIds(["a"], IDS, offsets=OFFSETS, lengths=OFFSETS)
    with pytest.raises(ValueError, match="`lengths` must be at least 0, got -1 at place 1"):
        KeyedJaggedIds(["a"], IDS, lengths=torch.tensor([3, -1]))
    with pytest.raises(ValueError, match=r"`lengths` must sum to the number of values, 3, got 2"):
        KeyedJaggedIds(["a"], IDS, lengths=torch.tensor([1, 1]))
    with pytest.raises(TypeError, match=r"`lengths` must be int64 or int32, got torch.float32; keep integers"):
        KeyedJaggedIds(["a"], IDS, lengths=OFFSETS.float())
    with pytest.raises(ValueError, match="keys x bags numbers, as many bags for each of the 2 keys, got 3"):
        KeyedJaggedIds(["a", "b"], IDS, lengths=IDS)
    with pytest.raises(ValueError, match="got 0"):
        KeyedJaggedIds(["a"], IDS, offsets=OFFSETS[:0])
    with pytest.raises(TypeError, match="`validate` must be a bool, got int 1"):
        KeyedJaggedIds(["a"], IDS, offsets=OFFSETS, validate=1)
    with pytest.raises(ValueError, match="on one device, got cpu and meta"):
        KeyedJaggedIds(["a"], IDS, offsets=OFFSETS.to("meta"))
    assert torch.equal(KeyedJaggedIds(["a"], IDS, lengths=torch.tensor([1, 2], dtype=torch.int32)).offsets, OFFSETS)


@pytest.mark.parametrize("device", DEVICES)
def test_refused_batches(device):
    module = make({"a": "sum", "b": "sum"}, device)
    values = torch.tensor([1, 2, 3], device=device)

    def refused(error, text, keys=("a", "b"), offsets=(0, 1, 3), ids=values, made=False):
        offsets = torch.tensor(offsets, device=ids.device)
        with pytest.raises(error, match=f"^exchange: {text}"):
            module.lookup(module.exchange(unchecked(keys, ids, offsets)))
        if made:
            KeyedJaggedIds(keys, ids, offsets=offsets, validate=True)
            return
        # Sooner and in the same words: on the CPU always, on CUDA on request.
        with pytest.raises(error, match=f"^KeyedJaggedIds: {text}"):
            KeyedJaggedIds(keys, ids, offsets=offsets, validate=device == "cuda")

    text = "`ids` must name configured features only, got 'c'; the features are a, b"
    refused(ValueError, text, keys=("a", "c"), made=True)
    # The same rule and remedy as of a mapping, see test_ids.py.
    rule = r"feature '{}': offsets must start at 0, never fall and end at .*, got {}.*; build them as a 0"
    refused(ValueError, rule.format("a", "1 to 1"), offsets=(1, 1, 3))
    refused(ValueError, rule.format("a", "0 to 4"), offsets=(0, 4, 3))
    refused(ValueError, rule.format("b", "1 to 2"), offsets=(0, 1, 2))
    refused(ValueError, rule.format("b", "1 to 4"), offsets=(0, 1, 4))
    refused(
        ValueError, rule.format("a", r"1 place in the batch .* \('a' has 2, then 1 at bag 1\)"), offsets=(0, 2, 1, 2, 3)
    )
    text = r"feature 'b': ids of table 'b' must lie in \[0, 7\)"
    refused(IndexError, text, ids=torch.tensor([9, 9, 9], device=device), made=True)
    refused(ValueError, rule.format("b", "0 to 0"), offsets=(0,))
    good = KeyedJaggedIds(["a", "b"], values, offsets=torch.tensor([0, 1, 3], device=device))
    assert module.lookup_joined(module.exchange(good)).shape == (2, 8)


@pytest.mark.parametrize("device", DEVICES)
def test_more_ids_than_one_lookup_takes_are_refused_before_any_work(device):
    module = make({"a": "sum"}, device)
    ids = torch.zeros(1, dtype=torch.int64, device=device).expand(2**31)
    with pytest.raises(ValueError, match=r"at most 2147483646 ids in one batch of a rank .*got 2147483648; split"):
        module.exchange(KeyedJaggedIds(["a"], ids, offsets=torch.tensor([0, 2**31], device=device)))


@gpu
def test_a_batch_on_another_device_is_refused():
    module = make({"a": "sum"}, "cuda")
    with pytest.raises(ValueError, match="on the tables' device cuda"):
        module.exchange(KeyedJaggedIds(["a"], IDS, offsets=torch.tensor([0, 3])))


@gpu
def test_a_batch_ahead_from_another_stream():
    """Batches of many programs, whose bags and ids have other sizes each time."""
    poolings = ONE_CALL["sum"]
    left, right = (make(poolings, "cuda") for _ in range(2))
    generator = torch.Generator().manual_seed(9)
    side = torch.cuda.Stream()
    batches = [draw(generator, list(poolings), "cuda", num_bags=5000 + at) for at in range(12)]
    torch.cuda.synchronize()
    pending = None
    for number, batch in enumerate(batches):
        mine = left.exchange(batch) if pending is None else pending
        with torch.cuda.stream(side):
            pending = left.exchange(batches[(number + 1) % len(batches)])
        ours = left.lookup_joined(mine)
        # Small numbers, of which sums are exact in any order.
        ours.backward(torch.ones_like(ours))
        theirs = right.lookup(right.exchange(batch.split()))
        torch.autograd.backward(list(theirs.values()), [torch.ones_like(each) for each in theirs.values()])
        torch.testing.assert_close(ours, torch.cat(list(theirs.values())), rtol=1e-6, atol=1e-6)


def ranks_agree(rank, world_size, folder):
    """Every rank: joined batches against mappings of the same."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    poolings = SEVERAL["poolings"]
    left, right = (make(poolings, "cpu", mesh=mesh) for _ in range(2))
    generator = torch.Generator().manual_seed(rank)
    same = []
    for _ in range(4):
        batch = draw(generator, list(poolings), "cpu")
        ours = run(left, batch, joined=True)
        same.append(torch.equal(ours, run(right, batch.split(), joined=False)))
    texts = []
    values, offsets = torch.tensor([1, 2]), torch.tensor([0, 1, 2])
    for bad in ([0, 2, 1], [0, 1, 2]):
        given = torch.tensor(bad) if rank == 1 else offsets
        ids = torch.tensor([1, 99]) if rank == 1 else values
        try:
            left.lookup(left.exchange(unchecked(["a", "b"], ids, given)))
            texts.append("")
        except (ValueError, IndexError, RuntimeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    rows = left.lookup(left.exchange(KeyedJaggedIds(["a", "b"], values, offsets=offsets)))
    states = [
        {
            name: each.full_tensor() if hasattr(each, "full_tensor") else each
            for name, each in module.state_dict().items()
        }
        for module in (left, right)
    ]
    return {
        "same": same,
        "texts": texts,
        "shape": tuple(rows["a"].shape),
        "states": all(torch.equal(states[0][name], each) for name, each in states[1].items()),
    }


def test_several_ranks(ranks):
    found = ranks("ranks_agree", 2)
    for rank, each in enumerate(found):
        assert all(each["same"]), rank
        assert each["states"], rank
        assert each["shape"] == (1, 8)
    assert re.match(r"ValueError: exchange: feature 'b': .*got 2 to 1 ", found[1]["texts"][0])
    assert re.match("RuntimeError: exchange: rank 1: refused its batch", found[0]["texts"][0])
    for each in found:
        assert re.match("IndexError: exchange: rank 1: feature 'b'.*got 99", each["texts"][1])


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_rows_are_written_in_32_or_64_bits(monkeypatch, device, pooling):
    with_kernel(monkeypatch, device)
    path = make({"a": pooling, "b": pooling}, device)._local.keyed
    batch = draw(torch.Generator().manual_seed(7), ["b", "a"], device, num_bags=9)
    stream = torch.cuda.current_stream() if device == "cuda" else None
    found = []
    for dtype in (torch.int32, torch.int64):
        path._dtype = dtype
        laid = path.exchange(batch, stream)
        assert path.faults(laid) is None
        assert laid.values.dtype == dtype
        found.append((laid.values.long(), None if laid.bags is None else laid.bags.long(), laid.starts))
    (values, bags, starts), (wide_values, wide_bags, wide_starts) = found
    assert torch.equal(values, wide_values)
    assert torch.equal(bags, wide_bags) if pooling == "sum" else starts == wide_starts == [0, int(batch.offsets[9])]


@gpu
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_32_bit_rows_change_nothing(pooling, kind, weight_dtype):
    """fbgemm gets the rows of joined batches in 32 bits, and those of mappings in 64."""
    poolings = dict.fromkeys(("a", "b"), pooling)
    options = {"optimizer": SparseOptimizerConfig(kind=kind, learning_rate=0.1), "weight_dtype": weight_dtype}
    modules = [make(poolings, "cuda", **options) for _ in range(3)]
    modules[1]._local.keyed._dtype = torch.int64
    generator = torch.Generator().manual_seed(8)
    for _ in range(3):
        batch = draw(generator, list(poolings), "cuda", num_bags=9)
        # Rounding of float16 rows draws random numbers.
        found = []
        for module, given in zip(modules, (batch, batch, batch.split()), strict=True):
            torch.cuda.manual_seed(1)
            pending = module.exchange(given)
            if given is batch:
                assert pending.local.values.dtype == module._local.keyed._dtype
            rows = torch.cat(list(module.lookup(pending).values()))
            (rows * torch.linspace(-1, 2, rows.numel(), device="cuda").view_as(rows)).sum().backward()
            found.append(rows.detach())
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
    assert equal_states(modules[0], modules[1])
    assert equal_states(modules[0], modules[2])


@pytest.mark.compile
@pytest.mark.parametrize("written", ["*i32", "*i64"])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("capability", [90, 100])
def test_it_compiles_without_a_gpu(capability, drop, pooled, written):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gem_parallel._src.embeddings.keyed_kernel import BLOCK
    from gem_parallel._src.embeddings.keyed_kernel import _check_keyed_kernel as kernel

    constants = {"KEYS": 32, "BLOCK": BLOCK, "POOLED": pooled, "DROP": drop}
    numbers = ("num_values", "num_offsets", "num_keys", "num_bags", "num_value_programs")
    kinds = {"laid": written, **dict.fromkeys(numbers, "i32"), **dict.fromkeys(constants, "constexpr")}
    types = {name: kinds.get(name, "*i64") for name in kernel.arg_names}
    options = {"num_warps": 4, "enable_fp_fusion": True}
    compiled = triton.compile(
        ASTSource(kernel, types, constants), target=GPUTarget("cuda", capability, 32), options=options
    )
    assert compiled.metadata.shared < 4096
    assert not re.search(r"st\.local|ld\.local", compiled.asm["ptx"])


def test_a_batch_on_another_kind_of_device_is_refused():
    batch = KeyedJaggedIds(["a"], IDS.to("meta"), offsets=OFFSETS.to("meta"))
    module = make({"a": "sum"}, "cpu")
    with pytest.raises(ValueError, match="`values` of joined ids must be on the tables' device cpu, got meta"):
        module.exchange(batch)
