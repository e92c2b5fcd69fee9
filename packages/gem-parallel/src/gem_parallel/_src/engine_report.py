"""Which optional engines are here, why not, and what to install."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import re
import warnings
from functools import cache

import torch

from gem_parallel._src.collectives.choose import collectives_status
from gem_parallel._src.optional import has_triton
from gem_parallel._src.status import FeatureStatus

__all__ = ["FeatureStatus", "engine_report", "require_fbgemm"]

KNOWN_PAIRS = {"fbgemm-gpu-cpu": ("2.13", "1.8"), "fbgemm-gpu": ("2.11", "1.6")}
"""Build of fbgemm -> the torch and fbgemm releases that this project's tests ran on, as the extras cpu and cuda pin."""


def _release(version: str) -> str:
    match = re.match(r"(\d+)\.(\d+)", version)
    return f"{match[1]}.{match[2]}" if match else version


def _wanted_build() -> str:
    # By the device, not by torch's build: from the package index torch for CUDA also comes to machines without a GPU.
    return "fbgemm-gpu" if torch.cuda.is_available() else "fbgemm-gpu-cpu"


def _pip_line(distribution: str) -> str:
    torch_release, fbgemm_release = KNOWN_PAIRS[distribution]
    torch_part = "" if _release(torch.__version__) == torch_release else f"'torch=={torch_release}.*' "
    return f"pip install {torch_part}'{distribution}=={fbgemm_release}.*'"


def installed_fbgemm() -> tuple[str, str] | None:
    """(distribution, version) of the fbgemm build in this environment; None without one."""
    for distribution in ("fbgemm-gpu", "fbgemm-gpu-cpu"):
        try:
            return distribution, importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@cache
def _import_problem() -> str | None:
    """Why fbgemm cannot be used, None when it can."""
    try:
        # fbgemm warns on import about parts of its own that a wheel leaves out; none of them is used here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        # fbgemm_gpu may import although its library did not load; the missing operator tells.
        _ = torch.ops.fbgemm.split_embedding_codegen_lookup_sgd_function_pt2
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return None


def _fbgemm_status() -> FeatureStatus:
    wanted = _wanted_build()
    found = installed_fbgemm()
    problem = _import_problem()
    if problem is None:
        name = " ".join(found) if found is not None else "fbgemm_gpu (no distribution metadata)"
        return FeatureStatus(feature="fbgemm", available=True, reason=f"{name} imports")
    if found is None:
        reason = f"{wanted} is not installed"
    else:
        reason = f"{found[0]} {found[1]} does not load with torch {torch.__version__} ({problem})"
    return FeatureStatus(feature="fbgemm", available=False, reason=reason, remedy=_pip_line(wanted))


def _pair_status() -> FeatureStatus:
    name, wanted = "torch_fbgemm_pair", _wanted_build()
    found = installed_fbgemm()
    if found is None:
        reason = f"{wanted} is not installed"
        return FeatureStatus(feature=name, available=False, reason=reason, remedy=_pip_line(wanted))
    pair = f"torch {torch.__version__} with {found[0]} {found[1]}"
    if KNOWN_PAIRS[found[0]] == (_release(torch.__version__), _release(found[1])):
        return FeatureStatus(feature=name, available=True, reason=f"{pair} is a tested pair")
    known = ", ".join(f"torch {left} with {build} {right}" for build, (left, right) in KNOWN_PAIRS.items())
    reason = f"{pair} is not a tested pair; tested: {known}"
    return FeatureStatus(feature=name, available=False, reason=reason, remedy=_pip_line(wanted))


def _cuda_status(fbgemm: FeatureStatus) -> FeatureStatus:
    name = "embeddings_cuda"
    if not torch.cuda.is_available():
        return FeatureStatus(
            feature=name,
            available=False,
            reason="torch sees no CUDA device",
            remedy="run on a machine with a CUDA GPU and a CUDA build of torch",
        )
    if not fbgemm.available:
        return FeatureStatus(feature=name, available=False, reason=fbgemm.reason, remedy=fbgemm.remedy)
    found = installed_fbgemm()
    if found is not None and found[0] == "fbgemm-gpu-cpu":
        return FeatureStatus(
            feature=name,
            available=False,
            reason=f"{found[0]} {found[1]} holds CPU kernels only",
            remedy=_pip_line("fbgemm-gpu"),
        )
    return FeatureStatus(feature=name, available=True, reason=f"tables on {torch.cuda.get_device_name()}")


def _kernel_status() -> FeatureStatus:
    name = "batch_layout_kernel"
    if not has_triton():
        return FeatureStatus(
            feature=name,
            available=False,
            reason="triton is not installed; on CUDA torch's operators lay batches out, with more launches",
            remedy="pip install triton, on Linux",
        )
    return FeatureStatus(feature=name, available=True, reason="on CUDA, in one process, one kernel lays a batch out")


def engine_report() -> dict[str, FeatureStatus]:
    """Say what this installation can do.

    Returns:
        Feature -> status. ``fbgemm``: the library loads. ``torch_fbgemm_pair``: the versions are a pair this project
        tests (an untested pair may work). ``embeddings_cpu``, ``embeddings_cuda``: tables on that device.
        ``batch_layout_kernel``: Triton, for tables of one process on CUDA.
        ``adam_cpu``, ``rowwise_adagrad_weight_decay_cpu``: these optimizers for CPU tables. ``nccl``, ``gloo``:
        backends for several ranks. ``collectives_*``: the engines of ``gem_parallel.collectives``, before a group
        narrows them.
    """
    fbgemm = _fbgemm_status()
    cpu = FeatureStatus(
        feature="embeddings_cpu",
        available=fbgemm.available,
        reason="tables in host memory" if fbgemm.available else fbgemm.reason,
        remedy=fbgemm.remedy,
    )
    in_torch = [
        FeatureStatus(
            feature=feature,
            available=fbgemm.available,
            reason=f"in PyTorch: fbgemm has no CPU kernel for {what}" if fbgemm.available else fbgemm.reason,
            remedy=fbgemm.remedy,
        )
        for feature, what in (
            ("adam_cpu", "Adam"),
            ("rowwise_adagrad_weight_decay_cpu", "row-wise AdaGrad with weight decay"),
        )
    ]
    rows = [fbgemm, _pair_status(), cpu, _cuda_status(fbgemm), _kernel_status(), *in_torch]
    for backend in ("nccl", "gloo"):
        available = torch.distributed.is_available() and torch.distributed.is_backend_available(backend)
        rows.append(
            FeatureStatus(
                feature=backend,
                available=available,
                reason=f"this build of torch {'has' if available else 'lacks'} {backend}",
                remedy="" if available else f"install a build of torch with {backend}",
            )
        )
    for status in collectives_status().values():
        rows.append(dataclasses.replace(status, feature=f"collectives_{status.feature}"))
    return {row.feature: row for row in rows}


def require_fbgemm(owner: str) -> None:
    """Raise ImportError with the pip line when fbgemm cannot be used."""
    status = _fbgemm_status()
    if not status.available:
        raise ImportError(f"{owner}: needs fbgemm-gpu, but {status.reason}; {status.remedy}")
