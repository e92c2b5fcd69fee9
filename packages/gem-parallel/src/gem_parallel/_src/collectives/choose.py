"""Which engines of collectives this machine and this group can use, and why not."""

from __future__ import annotations

import ctypes
import importlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args
from zlib import crc32

import torch
import torch.distributed as dist

from gem_parallel._src.agree import agree
from gem_parallel._src.collectives.base import Collectives, DefaultCollectives
from gem_parallel._src.collectives.low_contention import LowContentionCollectives
from gem_parallel._src.collectives.zero_cta import ZeroCtaCollectives, has_zero_cta_policy
from gem_parallel._src.status import FeatureStatus

__all__ = ["Engine", "choose_collectives", "collectives_status", "group_status"]

Engine = Literal["default", "nccl_zero_cta", "symm_mem_low_contention"]
NCCL_RELEASE = (2, 28)
"""First with copy-engine collectives."""
CUDA_DRIVER = 12050
"""Lowest driver for them, 1000 * major + 10 * minor."""


def collectives_status() -> dict[str, FeatureStatus]:
    """Engine -> what this machine and installation say, whatever the group. Two of them also depend on it.

    Returns:
        For each engine its status, the reason with it.
    """
    default = FeatureStatus(feature="default", available=True, reason="NCCL's kernels on CUDA, gloo on the CPU")
    return {status.feature: status for status in (default, _zero_cta(), _low_contention())}


def _cuda(feature: str) -> FeatureStatus | None:
    if torch.cuda.is_available():
        return None
    remedy = "run on a machine with CUDA GPUs and a CUDA build of torch"
    return FeatureStatus(feature=feature, available=False, reason="torch sees no CUDA device", remedy=remedy)


def _memory(feature: str, names: tuple[str, ...]) -> FeatureStatus | None:
    try:
        memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
        missing = [name for name in names if not hasattr(memory, name)]
    except ImportError as error:
        missing = [str(error)]
    if not missing:
        return None
    return FeatureStatus(
        feature=feature,
        available=False,
        reason=f"torch {torch.__version__} has no symmetric memory that this engine can use: {', '.join(missing)}",
        remedy="pip install 'torch>=2.11'",
    )


def _zero_cta() -> FeatureStatus:
    name = "nccl_zero_cta"
    problem = _cuda(name) or _memory(name, ("get_mem_pool", "rendezvous", "set_backend"))
    if problem is not None:
        return problem
    if not dist.is_nccl_available() or not hasattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO"):
        reason = f"torch {torch.__version__} has no NCCL with the zero-CTA policy"
        return FeatureStatus(feature=name, available=False, reason=reason, remedy="pip install 'torch>=2.11'")
    version = torch.cuda.nccl.version()
    text = ".".join(map(str, version))
    if tuple(version[:2]) < NCCL_RELEASE:
        reason = f"NCCL {text} has no copy-engine collectives, which 2.28 brought"
        return FeatureStatus(
            feature=name, available=False, reason=reason, remedy="pip install 'nvidia-nccl-cu13>=2.28'"
        )
    driver = _driver_version()
    if driver < CUDA_DRIVER:
        reason = f"the driver is for CUDA {driver // 1000}.{driver % 1000 // 10}, copy-engine collectives need 12.5"
        return FeatureStatus(feature=name, available=False, reason=reason, remedy="update the NVIDIA driver")
    reason = f"NCCL {text}, for groups on one host made with zero_cta_options() or under NCCL_CTA_POLICY=2"
    return FeatureStatus(feature=name, available=True, reason=reason)


def _driver_version() -> int:
    """CUDA version that the installed driver is for, 12050 for 12.5; 0 if it cannot be asked."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def _low_contention() -> FeatureStatus:
    name = "symm_mem_low_contention"
    problem = _cuda(name) or _memory(name, ("empty", "rendezvous", "set_backend"))
    if problem is not None:
        return problem
    count = torch.cuda.device_count()
    apart = [(one, two) for one in range(count) for two in range(count) if one != two and not _peers(one, two)]
    if apart:
        reason = f"GPUs {apart[0][0]} and {apart[0][1]} of this host cannot access each other's memory"
        remedy = "use GPUs that are linked, through CUDA_VISIBLE_DEVICES"
        return FeatureStatus(feature=name, available=False, reason=reason, remedy=remedy)
    reason = f"{count} GPUs that access each other's memory, for groups on one host"
    return FeatureStatus(feature=name, available=True, reason=reason)


def _peers(one: int, two: int) -> bool:
    return bool(torch.cuda.can_device_access_peer(one, two))


def _check_group(owner: str, group: object) -> None:
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{owner}: `group` must be a process group, got {type(group).__name__} {group!r}; pass mesh.ep_group or "
            "torch.distributed.group.WORLD, and the engine after it"
        )


def group_status(group: dist.ProcessGroup) -> dict[str, FeatureStatus]:
    """Engine -> whether this group can use it, and why not. All ranks of the group call it; equal on all of them.

    Args:
        group: Ranks with one GPU each, or on the CPU.

    Raises:
        TypeError: ``group`` is no process group.
    """
    _check_group("group_status", group)
    found = collectives_status()
    backends = dist.get_backend_config(group)
    cuda = torch.cuda.is_available() and "nccl" in backends
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    optional = [name for name in found if name != "default"]
    policy = cuda and found["nccl_zero_cta"].available and has_zero_cta_policy(group)
    mine = [
        crc32(socket.gethostname().encode()),
        int(cuda),
        int(policy),
        *(int(found[name].available) for name in optional),
    ]
    table = torch.empty((dist.get_world_size(group), len(mine)), dtype=torch.int64, device=device)
    DefaultCollectives().all_gather(table.view(-1), torch.tensor(mine, dtype=torch.int64, device=device), group)
    return narrow(found, [_Rank(row[0], bool(row[1]), bool(row[2]), row[3:]) for row in table.tolist()], backends)


class _Rank(NamedTuple):
    """What one rank of a group says of itself."""

    host: int
    nccl: bool
    zero_cta_policy: bool
    available: Sequence[int]
    """By engine, without the default."""


def narrow(found: Mapping[str, FeatureStatus], ranks: Sequence[_Rank], backends: str) -> dict[str, FeatureStatus]:
    """The status of a machine, as far as it holds for a group of these ranks."""
    result = dict(found)
    for position, name in enumerate(name for name in found if name != "default"):
        if not found[name].available:
            continue
        reason = remedy = ""
        lacking = [rank for rank, each in enumerate(ranks) if not each.available[position]]
        hosts = len({each.host for each in ranks})
        if not all(each.nccl for each in ranks):
            reason, remedy = f"the group's backend is {backends}", "make the group with nccl"
        elif lacking:
            reason, remedy = f"rank {lacking[0]} of the group lacks it", "see engine_report() on that rank"
        elif len(ranks) == 1:
            reason, remedy = "the group has one rank, so nothing moves", "use default"
        elif hosts > 1:
            reason, remedy = f"the group spans {hosts} hosts", "use it for groups inside a host, as of the axis ep"
        elif name == "nccl_zero_cta" and not all(each.zero_cta_policy for each in ranks):
            reason = "the group has another CTA policy"
            remedy = "make it with pg_options=zero_cta_options(), or set NCCL_CTA_POLICY=2"
        if reason:
            result[name] = FeatureStatus(feature=name, available=False, reason=reason, remedy=remedy)
    return result


def choose_collectives(group: dist.ProcessGroup, engine: Engine | Literal["auto"] = "auto") -> Collectives:
    """An engine for a group. All ranks of the group call it.

    auto is nccl_zero_cta where the group was made for it, else default: the others are chosen by name, on a
    measurement (``benchmarks/bench_collectives.py``).

    - default: the backend's own.
    - nccl_zero_cta: NCCL's copy engines for all-gather, in symmetric memory; reduce-scatter as default.
    - symm_mem_low_contention: copies between the GPUs of a host by copy engines, and one sum for reduce-scatter.

    A process uses symmetric memory through one of the two engines only. Neither uses NVLink multicast: the first call
    sets NCCL_NVLS_ENABLE=0 and TORCH_SYMM_MEM_DISABLE_MULTICAST=1 unless the environment has them.

    Args:
        group: Ranks with one GPU each, or on the CPU.
        engine: Name, or auto.

    Raises:
        TypeError: ``group`` is no process group.
        ValueError: an unknown engine, another one than on other ranks, or one that this group cannot use, with the
            reason and the remedy.
        RuntimeError: another rank was given an unknown engine.
    """
    _check_group("choose_collectives", group)
    refusal: Exception | None = None
    if engine not in ("auto", *get_args(Engine)):
        refusal = ValueError(
            f"choose_collectives: `engine` must be auto or one of {', '.join(get_args(Engine))}, got {engine!r}; "
            "auto is right for every group"
        )
    mine = crc32(str(engine).encode())
    others = [
        rank
        for rank, each in enumerate(agree("choose_collectives", "`engine`", group, refusal, [mine]))
        if each != [mine]
    ]
    if others:
        raise ValueError(
            f"choose_collectives: `engine` must be equal on all ranks of the group, got {engine} here and another on "
            f"ranks {others}; pass the same on all"
        )
    if engine == "default":
        return DefaultCollectives()
    status = group_status(group)
    if engine == "auto":
        engine = "nccl_zero_cta" if status["nccl_zero_cta"].available else "default"
    if not status[engine].available:
        raise ValueError(
            f"choose_collectives: `engine` must be one that the group can use, got {engine}: {status[engine].reason}; "
            f"{status[engine].remedy}"
        )
    if engine == "nccl_zero_cta":
        return ZeroCtaCollectives()
    if engine == "symm_mem_low_contention":
        return LowContentionCollectives(torch.device("cuda", torch.cuda.current_device()))
    return DefaultCollectives()
