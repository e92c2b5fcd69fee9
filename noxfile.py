"""Every check of the project, by name. `nox -l` lists them; `nox` runs what must be green on a machine without a GPU.

Sessions share one environment, `.nox/shared`, built on first use. With `GEM_NOX_ACTIVE=1` (or `nox -s ... -- --active`)
they use the Python that runs nox instead, install nothing and put the packages' sources on PYTHONPATH: that is how a
GPU runner with its own torch, or without a network, runs them.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import nox

ROOT = Path(__file__).parent
SHARED = ROOT / ".nox" / "shared"
PACKAGE_DIRS = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
PACKAGES = [
    nox.param(path.name, id=path.name.removeprefix("gem-"), tags=[path.name, "package"]) for path in PACKAGE_DIRS
]
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
SOURCES = os.pathsep.join(str(path / "src") for path in PACKAGE_DIRS)
MYPY_TARGETS = [str(path / "src") for path in PACKAGE_DIRS]
# Extras a package's own tests need; the others (cuda, te) need a GPU.
CPU_EXTRAS = ("cpu", "recipes")
CI_SESSIONS = ("lint", "typecheck", "imports", "tests", "compile", "integration", "tests_dist", "build")
INTERPRETED = {"TRITON_INTERPRET": "1"}
# Benchmarks that need what no other session installs; a session of the same name runs each.
OWN_ENVIRONMENT = ("bench_torchrec.py",)

nox.options.sessions = ["ci"]
nox.options.error_on_missing_interpreters = True

_timings: list[tuple[str, float, str]] = []


def gem_session(**options: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`nox.session` without an environment of its own, its wall time kept for the table of `ci`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def timed(session: nox.Session, *args: object, **kwargs: object) -> None:
            start, outcome = time.perf_counter(), "failed"
            try:
                function(session, *args, **kwargs)
                outcome = "ok"
            finally:
                _timings.append((session.name, time.perf_counter() - start, outcome))

        return nox.session(venv_backend="none", **options)(timed)

    return decorate


# ---------------------------------------------------------------- environments


def active(session: nox.Session) -> bool:
    return os.environ.get("GEM_NOX_ACTIVE", "0") not in ("", "0") or "--active" in session.posargs


def posargs(session: nox.Session) -> list[str]:
    return [argument for argument in session.posargs if argument != "--active"]


def extras(package_dir: Path) -> str:
    declared = tomllib.loads((package_dir / "pyproject.toml").read_text())["project"].get("optional-dependencies", {})
    names = [name for name in CPU_EXTRAS if name in declared]
    return f"[{','.join(names)}]" if names else ""


def new_environment(session: nox.Session, path: Path, requirements: list[str]) -> Path:
    """Create a virtual environment at `path`, install `requirements`, return its Python."""
    shutil.rmtree(path, ignore_errors=True)
    # virtualenv comes with nox and, unlike venv, does not need the system's ensurepip.
    session.run(sys.executable, "-m", "virtualenv", "-q", str(path), silent=True)
    python = path / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    session.run(str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements)
    return python


def shared_python(session: nox.Session) -> str:
    """The Python that runs the checks: the active one, or that of `.nox/shared`, built when its inputs have changed."""
    if active(session):
        return sys.executable
    requirements = [*GROUPS["cpu"], *GROUPS["tools"]]
    for path in PACKAGE_DIRS:
        requirements += ["-e", f"{path}{extras(path)}"]
    return kept_environment(session, SHARED, requirements)


def kept_environment(session: nox.Session, path: Path, requirements: list[str], bare: list[str] | None = None) -> str:
    """The Python of an environment at `path`, built when its inputs have changed; `bare` comes without dependencies."""
    bare = bare or []
    inputs = [sys.version, *requirements, *bare, *((each / "pyproject.toml").read_text() for each in PACKAGE_DIRS)]
    digest = hashlib.sha256("\n".join(inputs).encode()).hexdigest()
    stamp = path / "gem-stamp"
    if not stamp.exists() or stamp.read_text() != digest:
        start = time.perf_counter()
        python = new_environment(session, path, requirements)
        if bare:
            session.run(str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", *bare)
        stamp.write_text(digest)
        seconds = time.perf_counter() - start
        _timings.append(("(environment, in the next)", seconds, "ok"))
        session.log(f"built {path.relative_to(ROOT)} in {seconds:.0f} s")
    return str(path / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


def environment(session: nox.Session, **variables: str) -> dict[str, str]:
    """Variables for a child process. The lanes' plugins lie in .ci; with the active Python the sources join them."""
    paths = [str(ROOT / ".ci"), SOURCES if active(session) else "", os.environ.get("PYTHONPATH", "")]
    return {**variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def module(session: nox.Session, *command: str, **variables: str) -> None:
    """Run `python -m <command>` in the checks' environment."""
    session.run(shared_python(session), "-m", *command, env=environment(session, **variables))


def gem_command(session: nox.Session, *arguments: str) -> None:
    """Run the command line `gem`; after Ctrl-C it has the time that its last step and checkpoint take."""
    command = [shared_python(session), "-m", "gem_train.cli", *arguments]
    session.run(*command, env=environment(session), interrupt_timeout=300.0, terminate_timeout=60.0)


def pytest(
    session: nox.Session,
    *arguments: str,
    python: str | None = None,
    last: list[str] | None = None,
    may_be_none: bool = False,
    **variables: str,
) -> None:
    """Run pytest with one thread per process, unless the caller says otherwise: tests start processes themselves.

    The caller's arguments follow `arguments` and come before `last`. With `may_be_none`, finding no test is no error.
    """
    command = [python or shared_python(session), "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    env = environment(session, OMP_NUM_THREADS=threads, **variables)
    codes = [0, 5] if may_be_none else [0]
    options = [*arguments, *posargs(session), *(last or [])]
    session.run(*command, f"--rootdir={ROOT}", *options, env=env, success_codes=codes)


def share(session: nox.Session, processes: int) -> list[str]:
    """Arguments with which so many processes share the tests; none without pytest-xdist."""
    if subprocess.run([shared_python(session), "-c", "import xdist"], capture_output=True).returncode:
        return []
    # First, so that the caller's own -n wins. pytest-benchmark, where the environment has it, warns beside xdist.
    return ["-n", str(processes), "-p", "no:benchmark"]


def mentions(folder: Path, *needles: str) -> bool:
    """Whether a Python file below `folder` contains one of the `needles`."""
    return any(needle in path.read_text() for path in folder.rglob("*.py") for needle in needles)


# ---------------------------------------------------------------- static checks


@gem_session(tags=["cpu", "static"])
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    module(session, "ruff", "check", *posargs(session), ".")
    module(session, "ruff", "format", "--check", ".")


@gem_session(tags=["cpu", "static"])
def typecheck(session: nox.Session) -> None:
    """Mypy, strict, over the five source trees."""
    module(session, "mypy", *posargs(session), *MYPY_TARGETS, MYPYPATH=SOURCES)


@gem_session(tags=["cpu", "static"])
def imports(session: nox.Session) -> None:
    """Import contracts, declared dependencies, annotations of host functions, file sizes."""
    python = shared_python(session)
    session.run(
        python,
        "-c",
        "from importlinter.cli import lint_imports_command as run; run()",
        "--no-logo",
        env=environment(session),
    )
    session.run(python, str(ROOT / ".ci" / "source_rules.py"))


# ---------------------------------------------------------------- tests on the CPU


@gem_session(tags=["cpu"])
@nox.parametrize("package", PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """A package's tests on the CPU, Triton kernels through the interpreter."""
    folder = f"packages/{package}/tests"
    # Tests that start processes of their own have the cores to themselves.
    cores = [] if mentions(ROOT / folder, "mark.dist") else share(session, os.cpu_count() or 1)
    pytest(session, folder, "-m", "not gpu and not compile", *cores, **INTERPRETED)


@gem_session(tags=["cpu"])
@nox.parametrize("package", PACKAGES)
def compile(session: nox.Session, package: str) -> None:
    """Compile a package's Triton kernels for sm_90 and sm_100 without a GPU."""
    if not mentions(ROOT / "packages" / package / "src", "triton.jit"):
        session.log(f"{package} has no Triton kernel: nothing to compile")
        return
    # A package with kernels but without such tests ends here with pytest's "no tests collected", an error.
    pytest(session, f"packages/{package}/tests", "-m", "compile and not gpu")


@gem_session(tags=["cpu"])
def integration(session: nox.Session) -> None:
    """The packages together, in one process; READMEs; versions; public names."""
    pytest(session, "tests/integration", "tests/packaging", "-m", "not gpu", **INTERPRETED)


@gem_session(tags=["cpu"])
def tests_dist(session: nox.Session) -> None:
    """The packages together, in several gloo processes."""
    pytest(session, "tests/dist", "-m", "not gpu", **INTERPRETED)


# ---------------------------------------------------------------- GPU lane


def gpu_lane(session: nox.Session, *folders: str) -> None:
    """Pytest on the GPU tests of some folders, where a skip is an error unless the test is marked sm100.

    Most of their time compiles kernels on the CPU, so several processes share the GPUs, if pytest-xdist is there; after
    them, alone, what takes most of a GPU's memory or starts processes of its own.
    """
    count = "import sys, torch; print(torch.cuda.device_count() or sys.exit('the GPU lane: torch sees no CUDA device'))"
    found = session.run(shared_python(session), "-c", count, silent=True)
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    num_devices = int(str(found).split()[-1])
    devices = names[:num_devices] if names != [""] else [str(device) for device in range(num_devices)]
    if not any(mentions(ROOT / folder, "mark.gpu") for folder in folders):
        session.log(f"no GPU test in {', '.join(folders)}")
        return
    alone = "memory or dist"
    processes = share(session, gpu_workers(num_devices))
    if not processes:
        session.warn("pytest-xdist is not installed: one process compiles all kernels, which can take an hour")
    plugin = ("-p", "gpu_lane")
    together = (*plugin, *processes)
    pytest(session, *folders, "-m", f"gpu and not ({alone})", *together, GEM_GPU_LANE_DEVICES=",".join(devices))
    if any(mentions(ROOT / folder, "mark.memory", "mark.dist") for folder in folders):
        # After the caller's arguments, so that this is one process whatever -n they give.
        last = ["-n", "0", "-p", "no:benchmark"] if processes else ["-p", "no:benchmark"]
        # What has these marks may be no GPU test.
        pytest(session, *folders, "-m", f"gpu and ({alone})", *plugin, last=last, may_be_none=True)


def gpu_workers(num_devices: int) -> int:
    """Processes of the GPU lane: a core each, and few enough for the contexts and buffers of all on the GPUs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(14 * num_devices, cores - 1))


@gem_session(tags=["gpu"])
@nox.parametrize("package", PACKAGES)
def tests_gpu(session: nox.Session, package: str) -> None:
    """A package's GPU tests; an error without CUDA, and when a test is skipped that is not marked sm100."""
    gpu_lane(session, f"packages/{package}/tests")


@gem_session(tags=["gpu"])
def integration_gpu(session: nox.Session) -> None:
    """The packages together on a GPU, against the CPU."""
    gpu_lane(session, "tests/integration")


@gem_session(tags=["bench"])
@nox.parametrize("package", PACKAGES)
def bench(session: nox.Session, package: str) -> None:
    """A package's benchmarks, one process each; arguments after `--` reach every one."""
    folder = ROOT / "packages" / package / "benchmarks"
    scripts = sorted(path for path in folder.glob("bench_*.py") if path.name not in OWN_ENVIRONMENT)
    if not scripts:
        session.log(f"{package} has no benchmark")
    for script in scripts:
        session.run(shared_python(session), str(script), *posargs(session), env=environment(session))


@gem_session(tags=["bench"])
def bench_multi_gpu(session: nox.Session) -> None:
    """Correctness, collectives, scaling and prediction on all visible GPUs; `-- --device cpu` tries it without one."""
    script = str(ROOT / "benchmarks" / "bench_multi_gpu.py")
    session.run(shared_python(session), script, *posargs(session), env=environment(session))


@gem_session(tags=["bench"])
def torchrec(session: nox.Session) -> None:
    """Tables beside torchrec's on the CPU: the same results, then times; arguments after `--` reach the benchmark."""
    if active(session):
        python = sys.executable
    else:
        requirements = [*GROUPS["cpu"], *GROUPS["torchrec"], "-e", f"{ROOT / 'packages' / 'gem-parallel'}[cpu]"]
        # torchrec asks for the build of fbgemm for CUDA, and for metrics that its tables do not use.
        python = kept_environment(session, SHARED.with_name("torchrec"), requirements, GROUPS["torchrec-alone"])
    env = environment(session, OMP_NUM_THREADS="1")
    session.run(
        python, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}", "tests/torchrec", env=env
    )
    script = ROOT / "packages" / "gem-parallel" / "benchmarks" / "bench_torchrec.py"
    session.run(python, str(script), *posargs(session), env=env)


# ---------------------------------------------------------------- release checks


@gem_session(tags=["cpu", "release"])
@nox.parametrize("package", PACKAGES)
def lowest(session: nox.Session, package: str) -> None:
    """A package's tests with only what it declares, at the lowest versions it declares; on the lowest Python, 3.11."""
    if active(session):
        session.error("lowest builds an environment of its own; unset GEM_NOX_ACTIVE")
    resolved = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "lowest.py"), package], check=True, capture_output=True, text=True
    ).stdout.split()
    path = SHARED.with_name(f"lowest-{package}")
    python = new_environment(session, path, [*GROUPS["test"], *resolved])
    # The interpreter of the lowest Triton makes scalars from arrays in a way that numpy is giving up.
    lenience = "ignore:Conversion of an array with ndim:DeprecationWarning"
    selection = ("-m", "not gpu and not compile", "-W", lenience)
    pytest(session, f"packages/{package}/tests", *selection, python=str(python), **INTERPRETED)


@gem_session(tags=["cpu", "release"])
def build(session: nox.Session) -> None:
    """Build the wheels and sdists, install them outside the checkout, import every module, train three steps."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for path in PACKAGE_DIRS:
        with session.chdir(path):
            module(session, "hatchling", "build", "-d", str(dist))
    session.run(shared_python(session), str(ROOT / ".ci" / "wheels.py"), "contents", str(dist))
    if active(session):
        session.log("installing the wheels needs a package index: not done with the active environment")
        return
    with tempfile.TemporaryDirectory(prefix="gem-wheels-") as folder, session.chdir(folder):
        wheels = [
            f"{wheel}{extras(path)}"
            for path in PACKAGE_DIRS
            for wheel in dist.glob(f"{path.name.replace('-', '_')}-*.whl")
        ]
        python = new_environment(session, Path(folder) / "env", [*GROUPS["cpu"], *wheels])
        session.run(str(python), str(ROOT / ".ci" / "wheels.py"), "imports", str(dist))
        gem = str(python.with_name("gem"))
        session.run(gem, "doctor", env=environment(session))
        session.run(gem, "train", "synthetic", "--steps", "3", "--out", f"{folder}/run", env=environment(session))
        removed = ("gem-kernels", "gem-model", "gem-precision", "fbgemm-gpu-cpu")
        session.run(str(python), "-m", "pip", "uninstall", "-q", "-y", *removed)
        session.run(str(python), str(ROOT / ".ci" / "wheels.py"), "alone", str(dist))


# ---------------------------------------------------------------- whole


@gem_session()
def gem(session: nox.Session) -> None:
    """The command line `gem` in the checks' environment: `nox -s gem -- doctor`."""
    gem_command(session, *posargs(session))


@gem_session()
def demo(session: nox.Session) -> None:
    """Train the demo: `gem train ml-latest-small --out runs/demo`; arguments after `--` follow."""
    gem_command(session, "train", "ml-latest-small", "--out", "runs/demo", *posargs(session))


@gem_session()
def example(session: nox.Session) -> None:
    """Train on 1 and on 8 CPU processes to the same curve, on all five axes; arguments after `--` follow."""
    script = str(ROOT / "examples" / "same_curve.py")
    session.run(shared_python(session), script, *posargs(session), env=environment(session, OMP_NUM_THREADS="1"))


@nox.session(venv_backend="none")
def ci(session: nox.Session) -> None:
    """Everything a machine without a GPU can check, then a table of times."""
    for name in CI_SESSIONS:
        names = [f"{name}({param.id})" for param in PACKAGES] if name in ("tests", "compile") else [name]
        for each in names:
            session.notify(each)
    session.notify("timings")


@nox.session(venv_backend="none")
def timings(session: nox.Session) -> None:
    """Print the wall time of each session of this run."""
    lines = [f"{name:<28}{seconds:>8.1f} s  {outcome}" for name, seconds, outcome in _timings]
    total = sum(seconds for name, seconds, _ in _timings if not name.startswith("("))
    session.log("wall times\n" + "\n".join([*lines, f"{'all sessions':<28}{total:>8.1f} s"]))
