"""The kernel that lays a batch out gives what torch's operators give, and finds what they find."""

import os
import re

import pytest
import torch

from gem_parallel import FeatureConfig, ShardedEmbeddings, SparseOptimizerConfig, TableConfig
from gem_parallel._src.embeddings import batch_layout as layout_source
from gem_parallel._src.embeddings import local as local_source

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on CPU tensors: needs TRITON_INTERPRET=1"
)
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
POLICIES = ["error", "drop", "clamp"]
TABLES = {"a": (40, 8), "b": (7, 8), "c": (1, 8), "wide": (25, 16)}
POOLINGS = {
    "pooled": {"a": "sum", "a again": "mean", "b": "sum", "c": "mean", "wide": "sum", "wide again": "sum"},
    "mixed": {"a": "sum", "a again": "none", "b": "mean", "c": "none", "wide": "mean", "wide again": "none"},
    "rows": {"a": "none", "b": "none", "wide": "none"},
    "one": {"a": "sum"},
}


def pair(monkeypatch, poolings, device, policy):
    """The same module twice: laid out by the kernel, and by operators."""
    found = []
    for kernel in (True, False):
        monkeypatch.setattr(local_source, "lays_out_by_kernel", lambda device, kernel=kernel: kernel)
        module = ShardedEmbeddings(
            [TableConfig(name=name, num_rows=rows, dim=dim) for name, (rows, dim) in TABLES.items()],
            [FeatureConfig(name=name, table=name.split()[0], pooling=each) for name, each in poolings.items()],
            optimizer=SparseOptimizerConfig(kind="sgd", learning_rate=0.1),
            id_policy=policy,
            device=device,
        )
        assert module._local._kernel is kernel
        found.append(module)
    return found


def draw(generator, poolings, device, longest=6, most_bags=6):
    """Features in any order, some left out, empty or without bags."""
    names = list(poolings)
    batch = {}
    for at in torch.randperm(len(names), generator=generator).tolist():
        kind = int(torch.randint(0, 6, (1,), generator=generator))
        if kind == 0 and len(names) > 1:
            continue
        num_bags = 0 if kind == 1 else int(torch.randint(1, most_bags, (1,), generator=generator))
        lengths = torch.randint(0, 1 if kind == 2 else longest, (num_bags,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        rows = TABLES[names[at].split()[0]][0]
        values = torch.randint(0, rows, (int(offsets[-1]),), generator=generator)
        if at % 2:
            # Of every second element.
            values = torch.stack([values, values + 1], dim=1).to(device)[:, 0]
        batch[names[at]] = values.to(device), offsets.to(device)
    return batch


def spoilt(generator, batch):
    """The batch with one id or offset replaced."""
    name = list(batch)[int(torch.randint(0, len(batch), (1,), generator=generator))]
    tensors = [each.clone() for each in batch[name]]
    which = int(torch.randint(0, 2, (1,), generator=generator)) if tensors[0].numel() else 1
    at = int(torch.randint(0, tensors[which].numel(), (1,), generator=generator))
    choices = (-(2**63), -1, 0, 1, 3, 7, 40, 2**31, 2**63 - 1)
    tensors[which][at] = choices[int(torch.randint(0, len(choices), (1,), generator=generator))]
    return {**batch, name: tuple(tensors)}


def compare(by_kernel, by_operators, batch, device):
    """Rows, bags and what came are equal, and whether there is a fault."""
    stream = torch.cuda.current_stream() if device == "cuda" else None
    left, right = (module._local.exchange(batch, stream) for module in (by_kernel, by_operators))
    if not batch:
        assert left.layout is right.layout is None
        return False
    for ours, theirs, unit in zip(left.values, right.values, left.layout.units, strict=False):
        assert torch.equal(ours.long(), theirs)
        assert len(ours) == unit.num_values
    faulty = bool(left.flag.read())
    assert faulty == bool(right.flag.read() - right.layout.num_falls)
    for ours, theirs in zip(left.bags, right.bags, strict=True):
        assert (ours is None) == (theirs is None)
        # Bags that fall are cut differently; they are not looked at.
        assert ours is None or faulty or torch.equal(ours.long(), theirs)
    assert left.layout.impossible == right.layout.impossible
    for (name, *ours), (_, *theirs) in zip(left.layout.pairs(), right.layout.pairs(), strict=True):
        for at in (0, 2):
            assert torch.equal(left.given[slice(*ours[at : at + 2])], right.given[slice(*theirs[at : at + 2])]), name
            assert torch.equal(left.given[slice(*ours[at : at + 2])], batch[name][at // 2])
    return faulty


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("poolings", list(POOLINGS))
def test_equal_to_the_operators(monkeypatch, poolings, policy, device):
    # Segments of many programs.
    monkeypatch.setattr(layout_source, "BLOCK", 8)
    features = POOLINGS[poolings]
    modules = pair(monkeypatch, features, device, policy)
    generator = torch.Generator().manual_seed(0)
    faulty = 0
    for _ in range(6):
        batch = draw(generator, features, device)
        assert not compare(*modules, batch, device)
        if batch:
            faulty += compare(*modules, spoilt(generator, batch), device)
    assert faulty > 1


@pytest.mark.parametrize("device", DEVICES)
def test_steps_and_messages(monkeypatch, device):
    """Updates, and what an error says, through the whole module."""
    features = POOLINGS["mixed"]
    modules = pair(monkeypatch, features, device, "error")
    generator = torch.Generator().manual_seed(1)
    raised = 0
    for step in range(8):
        batch = draw(generator, features, device)
        batch = spoilt(generator, batch) if batch and step % 2 else batch
        found = []
        for module in modules:
            try:
                outputs = module.lookup(module.exchange(batch))
            except (IndexError, ValueError) as error:
                found.append(str(error))
                raised += 1
            else:
                found.append(outputs)
                if outputs:
                    sum((each * each).sum() for each in outputs.values()).backward()
        if isinstance(found[0], str):
            assert found[0] == found[1]
        else:
            assert all(torch.equal(found[0][name], value) for name, value in found[1].items())
    assert raised >= 4
    states = [module.state_dict() for module in modules]
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
    assert modules[0].out_of_range_counts() == modules[1].out_of_range_counts()


@pytest.mark.gpu
def test_many_programs():
    """Batches beyond what operators write bounds out for, in several streams, with an id far inside."""
    module = ShardedEmbeddings(
        [TableConfig(name="t", num_rows=1000, dim=8)],
        [FeatureConfig(name="t", table="t")],
        optimizer=SparseOptimizerConfig(kind="sgd", learning_rate=0.1),
        device="cuda",
    )
    num = 2**22 + 3
    values, offsets = torch.arange(num, device="cuda") % 1000, torch.arange(num + 1, device="cuda")
    module.eval()
    rows = module.state_dict()["tables.t.weight"]
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert torch.equal(module.lookup(module.exchange({"t": (values, offsets)}))["t"], rows[values])
            bad = values.clone()
            bad[num // 2] = 1000
            with pytest.raises(IndexError, match="got 1000"):
                module.lookup(module.exchange({"t": (bad, offsets)}))
        torch.cuda.synchronize()


@pytest.mark.compile
@pytest.mark.parametrize("written", ["*i32", "*i64"])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("capability", [90, 100])
def test_it_compiles_without_a_gpu(capability, drop, written):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gem_parallel._src.embeddings.layout_kernel import _lay_out_kernel as kernel

    constants = {"BLOCK": layout_source.BLOCK, "DROP": drop}
    types = {"plan": "*i64", "laid": written, "given": "*i64", "faults": "*i64", "num_segments": "i32"}
    source = ASTSource(kernel, {name: types.get(name, "constexpr") for name in kernel.arg_names}, constants)
    # Where it is not given, Triton 3.9 warns that its default will change; the kernel has no floating point.
    options = {"num_warps": 4, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared < 1024
    assert not re.search(r"st\.local|ld\.local", compiled.asm["ptx"])
