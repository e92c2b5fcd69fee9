"""Which engine where: decisions for machines that this one is not, and the engines themselves on CUDA."""

import pytest
import torch
import torch.distributed as dist

from gem_parallel._src.collectives import choose, memory
from gem_parallel.collectives import (
    DefaultCollectives,
    choose_collectives,
    collectives_status,
    group_status,
    set_fully_shard_collectives,
    zero_cta_options,
)


class Peers:
    """torch.cuda of a machine with GPUs."""

    def __init__(self, monkeypatch, *, nccl=(2, 28, 9), driver=13000, links=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
        monkeypatch.setattr(choose, "_driver_version", lambda: driver)
        monkeypatch.setattr(choose, "_peers", lambda one, two: links)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        policy = type("ProcessGroupNCCL", (), {"NCCL_CTA_POLICY_ZERO": 2})
        monkeypatch.setattr(dist, "ProcessGroupNCCL", policy, raising=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without CUDA")
def test_without_cuda_only_the_default():
    status = collectives_status()
    assert [name for name, each in status.items() if each.available] == ["default"]
    for name in ("nccl_zero_cta", "symm_mem_low_contention"):
        assert status[name].reason == "torch sees no CUDA device"
        assert status[name].remedy


@pytest.mark.parametrize(
    ("machine", "engine", "reason"),
    [
        ({}, "nccl_zero_cta", ""),
        ({}, "symm_mem_low_contention", ""),
        ({"nccl": (2, 27, 7)}, "nccl_zero_cta", "NCCL 2.27.7 has no copy-engine collectives, which 2.28 brought"),
        ({"driver": 12040}, "nccl_zero_cta", "the driver is for CUDA 12.4, copy-engine collectives need 12.5"),
        ({"links": False}, "symm_mem_low_contention", "GPUs 0 and 1 of this host cannot access each other's memory"),
    ],
)
def test_a_machine_with_gpus(monkeypatch, machine, engine, reason):
    Peers(monkeypatch, **machine)
    status = collectives_status()[engine]
    assert status.available == (not reason)
    assert bool(status.remedy) == bool(reason)
    assert reason in status.reason


RANK = {"host": 7, "nccl": True, "zero_cta_policy": True, "available": (1, 1)}


@pytest.mark.parametrize(
    ("others", "zero_cta", "low_contention"),
    [
        ([{}], "", ""),
        ([], "the group has one rank, so nothing moves", "the group has one rank, so nothing moves"),
        ([{"host": 8}], "the group spans 2 hosts", "the group spans 2 hosts"),
        ([{}, {"nccl": False}], "the group's backend is cuda:nccl", "the group's backend is cuda:nccl"),
        ([{}, {"zero_cta_policy": False}], "the group has another CTA policy", ""),
        ([{"available": (1, 0)}, {}], "", "rank 1 of the group lacks it"),
    ],
)
def test_a_group_narrows_what_the_machine_can(monkeypatch, others, zero_cta, low_contention):
    Peers(monkeypatch)
    ranks = [choose._Rank(**(RANK | other)) for other in ({}, *others)]
    found = choose.narrow(collectives_status(), ranks, "cuda:nccl")
    assert found["default"].available
    for engine, reason in (("nccl_zero_cta", zero_cta), ("symm_mem_low_contention", low_contention)):
        assert found[engine].available == (not reason)
        if reason:
            assert found[engine].reason == reason
            assert found[engine].remedy


def test_missing_symmetric_memory_is_named(monkeypatch):
    Peers(monkeypatch)
    monkeypatch.delattr(torch.distributed._symmetric_memory, "rendezvous")
    for engine in ("nccl_zero_cta", "symm_mem_low_contention"):
        assert "no symmetric memory that this engine can use: rendezvous" in collectives_status()[engine].reason


def test_multicast_is_off_unless_the_environment_has_it(monkeypatch):
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        monkeypatch.delenv(name, raising=False)
    memory.keep_multicast_off()
    assert (memory.os.environ["NCCL_NVLS_ENABLE"], memory.os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"]) == ("0", "1")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    memory.keep_multicast_off()
    assert memory.os.environ["NCCL_NVLS_ENABLE"] == "1"


def test_one_backend_of_symmetric_memory_per_process(monkeypatch):
    def refuse(name):
        raise RuntimeError("in use")

    monkeypatch.setattr(torch.distributed._symmetric_memory, "get_backend", lambda device: "CUDA")
    monkeypatch.setattr(torch.distributed._symmetric_memory, "set_backend", refuse)
    with pytest.raises(ValueError, match=r"got NCCL \(in use\); use one engine per process"):
        memory.use_backend("NCCL")
    assert memory.use_backend("CUDA") is torch.distributed._symmetric_memory


def test_unknown_engine():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"`engine` must be auto or one of default, nccl_zero_cta, .* got 'fast'"):
            choose_collectives(dist.group.WORLD, "fast")
    finally:
        dist.destroy_process_group()


# On CUDA: as many ranks as GPUs, at most 4.


def rank_engine(rank, world_size, folder, engine):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    options = zero_cta_options() if engine == "nccl_zero_cta" else None
    group = dist.new_group(pg_options=options)
    if world_size == 1 and engine != "default":
        with pytest.raises(ValueError, match="the group has one rank, so nothing moves; use default"):
            choose_collectives(group, engine)
        return []
    plain, chosen = choose_collectives(group, "default"), choose_collectives(group, engine)
    assert chosen.name == engine
    differences = []
    for dtype in (torch.bfloat16, torch.float32):
        for numel in (0, 3, 4096, 1 << 20):
            mine = torch.randn(numel, device=device, dtype=dtype)
            for own in (False, True):
                expected = torch.empty(world_size * numel, device=device, dtype=dtype)
                plain.all_gather(expected, mine, group)
                size = (world_size * numel,)
                output = chosen.allocate(size, dtype=dtype, device=device) if own else torch.empty_like(expected)
                work = chosen.all_gather(output, mine, group, async_op=own)
                if own:
                    work.wait()
                differences.append(float((output.float() - expected.float()).abs().sum()))
            # Small integers: every order of adding is exact.
            whole = torch.randint(-4, 5, (world_size * numel,), device=device).to(dtype)
            expected, output = torch.empty_like(mine), torch.empty_like(mine)
            plain.reduce_scatter(expected, whole, group)
            chosen.reduce_scatter(output, whole, group)
            differences.append(float((output.float() - expected.float()).abs().sum()))
    return differences


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["default", "nccl_zero_cta", "symm_mem_low_contention"])
def test_engines_agree_on_cuda(ranks, engine):
    for differences in ranks("rank_engine", min(torch.cuda.device_count(), 4), backend="nccl", engine=engine):
        assert differences == [0.0] * len(differences)


@pytest.mark.parametrize("group", ["nccl_zero_cta", None, 3], ids=["the engine", "None", "a number"])
def test_a_group_must_be_given(group):
    text = f"choose_collectives: `group` must be a process group, got {type(group).__name__} .*; pass mesh.ep_group"
    with pytest.raises(TypeError, match=text):
        choose_collectives(group)
    with pytest.raises(TypeError, match="group_status: `group` must be a process group"):
        group_status(group)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((3, DefaultCollectives()), "`module` must be an nn.Module, got int"),
        ((torch.nn.Linear(1, 1), "default"), "`collectives` must be an engine, got str 'default'; pass choose_coll"),
    ],
)
def test_fully_shard_takes_modules_and_engines(arguments, text):
    with pytest.raises(TypeError, match="set_fully_shard_collectives: " + text):
        set_fully_shard_collectives(*arguments)
