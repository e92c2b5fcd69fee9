"""What works in this installation, what does not, why, and what to install."""

import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Diagnosis", "Finding", "commit", "examine", "format_diagnosis", "versions"]

PACKAGES = ("gem_kernels", "gem_precision", "gem_parallel", "gem_model", "gem_train")
_LIBRARIES = ("torch", "triton", "fbgemm-gpu", "fbgemm-gpu-cpu", "transformer-engine", "numpy", "pyarrow")
_ASSEMBLERS = {"ptxas": "TRITON_PTXAS_PATH", "ptxas-blackwell": "TRITON_PTXAS_BLACKWELL_PATH"}
"""Program -> variable that tells Triton to run another one in its place."""

TESTED = (
    {"torch": "2.13", "triton": "3.9", "fbgemm": "1.8"},
    {"torch": "2.11", "triton": "3.6", "fbgemm": "1.6"},
)
"""Releases that this project's tests ran on together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One feature."""

    feature: str
    """What it is for."""
    available: bool
    """Whether it works here."""
    reason: str
    """What was found, or why it does not work."""
    remedy: str = ""
    """What to install or change; empty when available."""
    needed: bool = False
    """Whether a run on the CPU needs it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """All that was found."""

    versions: dict[str, str]
    """Library or package -> version."""
    devices: tuple[str, ...]
    """Names of the GPUs, with compute capability and memory."""
    findings: tuple[Finding, ...]
    """Feature by feature."""

    @property
    def works(self) -> bool:
        """Whether a run on the CPU works."""
        return all(finding.available for finding in self.findings if finding.needed)


def versions() -> dict[str, str]:
    """Versions of Python, the libraries that matter and the packages of this project, of those that are installed.

    ptxas and ptxas-blackwell are the assemblers that Triton runs, which have bugs and versions of their own.
    """
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in _LIBRARIES[1:]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name in _ASSEMBLERS if "triton" in found else ():
        version = _assembler(name)
        if version is not None:
            found[name] = version
    for package in PACKAGES:
        try:
            found[package.replace("_", "-")] = str(importlib.import_module(package).__version__)
        except Exception:
            continue  # a broken package is a finding, not a version
    return found


def commit() -> str | None:
    """The commit of the checkout that gem-train runs from, with a word if it was changed since; None outside of one."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An environment can lie inside of another project's checkout.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    found = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", ":/packages")
    return f"{found}, changed since" if found and changed else found


def examine() -> Diagnosis:
    """Looks at everything; nothing is changed and nothing is downloaded.

    Returns:
        What was found.
    """
    found = versions()
    findings = [_package(name) for name in PACKAGES]
    findings += [_tested_together(found)]
    findings += _engines()
    findings += [
        _try("training step, CPU", lambda: _training_step(torch.device("cpu")), needed=True),
        _gpu(),
        _try("kernels, GPU", _gpu_kernels) if torch.cuda.is_available() else _no_gpu("kernels, GPU"),
        _native_mxfp8(),
    ]
    return Diagnosis(versions=found, devices=_devices(), findings=tuple(findings))


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """The diagnosis as text for a terminal.

    Args:
        diagnosis: From `examine`.
    """
    lines = ["versions"]
    width = max((len(name) for name in diagnosis.versions), default=0)
    lines += [f"  {name:<{width}}  {version}" for name, version in diagnosis.versions.items()]
    lines += ["", "devices"]
    lines += [f"  {name}" for name in diagnosis.devices] or [f"  no GPU; CPU {platform.machine()}"]
    lines += ["", "features"]
    width = max((len(finding.feature) for finding in diagnosis.findings), default=0)
    for finding in diagnosis.findings:
        mark = "ok " if finding.available else "NO "
        lines.append(f"  {mark} {finding.feature:<{width}}  {finding.reason}")
        if finding.remedy and not finding.available:
            lines.append(f"      {'':<{width}}  -> {finding.remedy}")
    verdict = "a run on the CPU works" if diagnosis.works else "a run on the CPU does NOT work: mend what is marked NO"
    return "\n".join([*lines, "", verdict])


def _assembler(name: str) -> str | None:
    """Version of one of Triton's assemblers, as Triton finds it; None if there is none that runs."""
    bundled = importlib.metadata.distribution("triton").locate_file(f"triton/backends/nvidia/bin/{name}")
    for path in (os.environ.get(_ASSEMBLERS[name]), str(bundled)):
        if not path:
            continue
        try:
            text = subprocess.run([path, "--version"], check=True, capture_output=True, text=True, timeout=20).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        if match := re.search(r"\bV(\d+(?:\.\d+)+)", text):
            return match[1]
    return None


def _package(name: str) -> Finding:
    shown = name.replace("_", "-")
    extra = "gem-train[recipes]" if name not in ("gem_parallel", "gem_train") else shown
    return _try(
        shown, lambda: f"{importlib.import_module(name).__version__} imports", f"pip install '{extra}'", needed=True
    )


def _try(feature: str, check: Callable[[], str], remedy: str = "see the reason", needed: bool = False) -> Finding:
    """A feature works if its check does; whatever it raises is the reason."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reason = check()
    except Exception as error:
        text = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {text[0] if text else 'no message'}"
        return Finding(feature=feature, available=False, reason=reason, remedy=remedy, needed=needed)
    return Finding(feature=feature, available=True, reason=reason, needed=needed)


def _release(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _tested_together(found: dict[str, str]) -> Finding:
    """Whether torch, triton and fbgemm are a combination that the tests ran on."""
    fbgemm = found.get("fbgemm-gpu") or found.get("fbgemm-gpu-cpu")
    ours = {"torch": found["torch"], "triton": found.get("triton"), "fbgemm": fbgemm}
    releases = {name: _release(version) if version else None for name, version in ours.items()}
    shown = ", ".join(f"{name} {version or 'missing'}" for name, version in ours.items())
    if releases in TESTED:
        return Finding(feature="tested combination", available=True, reason=shown)
    known = " or ".join(" + ".join(f"{name} {release}" for name, release in row.items()) for row in TESTED)
    return Finding(
        feature="tested combination",
        available=False,
        reason=f"{shown}; it may work, but no test ran on it",
        remedy=f"tested are {known}",
    )


def _engines() -> list[Finding]:
    """What gem-parallel says about its engines."""
    try:
        report = importlib.import_module("gem_parallel").engine_report()
    except Exception as error:
        return [Finding(feature="engines", available=False, reason=f"{type(error).__name__}: {error}", needed=True)]
    needed = ("fbgemm", "embeddings_cpu", "gloo")
    return [
        Finding(
            feature=status.feature,
            available=status.available,
            reason=status.reason,
            remedy=status.remedy,
            needed=status.feature in needed,
        )
        for status in report.values()
    ]


def _training_step(device: torch.device) -> str:
    """Trains the synthetic recipe for one small step, with the very functions that a run uses."""
    recipes = importlib.import_module("gem_train.recipes")
    data = importlib.import_module("gem_train.data")
    world = importlib.import_module("gem_train.world").World(device=device)
    log = data.generate(num_users=20, num_items=20, mean_events=8.0)
    config = recipes.RunConfig.resolve(recipes.get("synthetic"), log, {"data.global_batch_size": "16"})
    state = torch.get_rng_state()
    try:
        parts = recipes.build(config, log, world)
        batch = next(iter(parts.train_source)).to(device)
        loss = parts.model.loss(
            parts.model(batch, parts.embeddings.lookup(parts.embeddings.exchange(batch.ids))), batch
        )
        loss.total.backward()
    finally:
        torch.set_rng_state(state)
    value = float(loss.total) / batch.num_samples
    if not value < float("inf"):
        raise RuntimeError(f"the loss of one step is {value}")
    return f"loss {value:.3f} on {batch.num_samples} samples, forward and backward"


def _devices() -> tuple[str, ...]:
    names = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        names.append(f"{properties.name}, sm_{properties.major}{properties.minor}, {memory:.0f} GiB")
    return tuple(names)


def _no_gpu(feature: str) -> Finding:
    reason = "torch sees no CUDA device" if torch.version.cuda else f"torch {torch.__version__} is a build without CUDA"
    return Finding(feature=feature, available=False, reason=reason, remedy="a CUDA GPU and a CUDA build of torch")


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return _no_gpu("training step, GPU")
    return _try("training step, GPU", lambda: _training_step(torch.device("cuda", 0)))


def _gpu_kernels() -> str:
    """Compares the attention kernels of the GPU with those of the CPU on ragged input."""
    kernels = importlib.import_module("gem_kernels")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([0, 1, 63, 65])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    q, k, v = (torch.randn(int(offsets[-1]), 2, 32, generator=generator) for _ in range(3))
    worst = 0.0
    for name in ("jagged_attention", "gdpa"):
        results = []
        for device in ("cpu", "cuda"):
            on = offsets.to(device)
            tensors = (x.to(device, torch.bfloat16) for x in (q, k, v))
            out = getattr(kernels, name)(*tensors, offsets_q=on, offsets_k=on, max_seqlen_q=65, max_seqlen_k=65)
            results.append(out.float().cpu())
        error = float((results[0] - results[1]).norm() / results[0].norm())
        worst = max(worst, error)
    if not worst < 2e-2:
        raise RuntimeError(f"GPU and CPU kernels differ by {worst:.1%}")
    return f"jagged_attention and gdpa agree with the CPU to {worst:.1e} in bf16"


def _native_mxfp8() -> Finding:
    feature = "mxfp8, native"
    if not torch.cuda.is_available():
        return _no_gpu(feature)
    major, minor = torch.cuda.get_device_capability()
    gpu = f"sm_{major}{minor} {'has' if major >= 10 else 'has no'} MX matrix products"
    return Finding(
        feature=feature,
        available=False,
        reason=f"mxfp8 is emulated in this version: same rounding, no gain in speed; {gpu}",
        remedy="the bf16 recipe where speed is the aim",
    )
