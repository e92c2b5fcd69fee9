from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gem_train import rng
from gem_train.checkpoint import Checkpointer
from gem_train.errors import CheckpointError, ConfigError


def make_tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(4, 3, generator=generator),
        "model.empty": torch.zeros(0, 3),
        "model.scalar": torch.randn((), generator=generator),
        "tables.item": torch.randn(5, 2, generator=generator).bfloat16(),
        "window.count": torch.arange(6),
    }


def zeros_like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def test_round_trip_is_bitwise(tmp_path: Path) -> None:
    tensors, out = make_tensors(), zeros_like(make_tensors())
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints")
    assert checkpointer.latest() is None
    path = checkpointer.save(12, tensors, {"step": 12, "source": {"epoch": 1}})
    assert checkpointer.latest() == 12
    assert checkpointer.load(12, out) == {"step": 12, "source": {"epoch": 1}}
    for name, tensor in tensors.items():
        assert torch.equal(out[name], tensor), name
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(manifest["files"]) == {p.name for p in path.iterdir()} - {"manifest.json"}
    assert manifest["tensors"]["tables.item"] == {"shape": [5, 2], "dtype": "torch.bfloat16"}


def test_save_is_a_copy(tmp_path: Path) -> None:
    tensors, checkpointer = make_tensors(), Checkpointer(tmp_path)
    checkpointer.save(1, tensors, {})
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    checkpointer.load(1, tensors)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_retention_keeps_the_last_and_the_protected(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep_last=2)
    for step in (3, 20, 100, 1000):
        checkpointer.save(step, make_tensors(), {}, protect=[3])
    assert checkpointer.steps() == (3, 100, 1000)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000100", "step-00001000"]


def test_a_published_step_is_not_overwritten(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, make_tensors(0), {})
    with pytest.raises(CheckpointError, match="exists already"):
        checkpointer.save(1, make_tensors(1), {})
    out = zeros_like(make_tensors())
    checkpointer.load(1, out)
    assert torch.equal(out["model.weight"], make_tensors(0)["model.weight"])


@pytest.mark.parametrize("cut", ["tensors", "manifest", "rename"])
def test_a_killed_save_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str) -> None:
    """The process ends in the middle of the second save; a new one sees the first checkpoint and can save again."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, make_tensors(), {})

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    if cut == "rename":
        real = Path.rename
        monkeypatch.setattr(Path, "rename", lambda a, b: die() if Path(b).name == "step-00000002" else real(a, b))
    else:
        monkeypatch.setattr(Checkpointer, {"tensors": "_write_tensors", "manifest": "_write_manifest"}[cut], die)
    with pytest.raises(Killed):
        checkpointer.save(2, make_tensors(1), {})
    monkeypatch.undo()
    again = Checkpointer(tmp_path)
    assert again.steps() == (1,)
    again.save(2, make_tensors(1), {})
    assert again.steps() == (1, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_directory_without_manifest_is_not_published(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, make_tensors(), {})
    (tmp_path / "step-00000009").mkdir()
    assert checkpointer.steps() == (1,)
    with pytest.raises(CheckpointError, match=r"no published checkpoint of step 9; published are \[1\]"):
        checkpointer.load(9, make_tensors())


@dataclass(frozen=True)
class Damage:
    id: str
    apply: Callable[[Path], object]
    message: str


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _data_file(path: Path) -> Path:
    return next(path.glob("*.distcp"))


DAMAGES = [
    Damage("truncated", lambda p: os.truncate(_data_file(p), 100), "has 100 bytes instead of"),
    Damage("one bit", lambda p: _flip(_data_file(p)), "has another SHA-256"),
    Damage("missing file", lambda p: _data_file(p).unlink(), "is missing"),
    Damage("metadata", lambda p: _flip(p / ".metadata"), "has another SHA-256"),
    Damage("state", lambda p: (p / "state.json").write_text("{}"), "bytes instead of"),
    Damage("manifest", lambda p: os.truncate(p / "manifest.json", 50), r"manifest\.json is damaged"),
    Damage("manifest keys", lambda p: (p / "manifest.json").write_text("{}"), r"manifest\.json is damaged"),
    Damage("version", lambda p: _edit(p, version=99), "version 99, this program reads version 1"),
]


def _edit(path: Path, **values: object) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | values))


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.id)
def test_a_damaged_checkpoint_is_refused_before_anything_is_read(tmp_path: Path, damage: Damage) -> None:
    checkpointer = Checkpointer(tmp_path)
    damage.apply(checkpointer.save(5, make_tensors(), {"step": 5}))
    out = zeros_like(make_tensors())
    with pytest.raises(CheckpointError, match=damage.message):
        checkpointer.load(5, out)
    assert all(not tensor.any() for tensor in out.values())


@dataclass(frozen=True)
class Other:
    id: str
    change: Callable[[dict[str, Tensor]], object]
    message: str


OTHERS = [
    Other(
        "shape",
        lambda t: t.update({"model.weight": torch.zeros(4, 4)}),
        r"model\.weight: checkpoint \(4, 3\) float32, this run \(4, 4\) float32",
    ),
    Other(
        "dtype",
        lambda t: t.update({"tables.item": torch.zeros(5, 2)}),
        r"tables\.item: checkpoint \(5, 2\) bfloat16, this run \(5, 2\) float32",
    ),
    Other(
        "missing here", lambda t: t.pop("model.scalar"), r"model\.scalar: checkpoint \(\) float32, this run has none"
    ),
    Other(
        "new here",
        lambda t: t.update({"model.new": torch.zeros(2)}),
        r"model\.new: checkpoint has none, this run \(2,\) float32",
    ),
    Other("many", lambda t: t.update({f"x{k:02d}": torch.zeros(1) for k in range(20)}), "and 12 more"),
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda o: o.id)
def test_a_checkpoint_of_another_model_is_refused_with_the_difference(tmp_path: Path, other: Other) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(5, make_tensors(), {})
    out = zeros_like(make_tensors())
    other.change(out)
    with pytest.raises(CheckpointError, match=other.message):
        checkpointer.load(5, out)
    assert all(not tensor.any() for tensor in out.values())


def test_a_part_can_be_loaded_and_is_strict_within(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(5, make_tensors(), {})
    part = {name: tensor for name, tensor in zeros_like(make_tensors()).items() if name.startswith("model.")}
    checkpointer.load(5, part, only=("model.",))
    assert torch.equal(part["model.weight"], make_tensors()["model.weight"])
    del part["model.scalar"]
    with pytest.raises(CheckpointError, match=r"model\.scalar"):
        checkpointer.load(5, part, only=("model.",))


def test_optional_names_may_be_on_one_side(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(5, make_tensors() | {"rng.rank_1": torch.ones(2)}, {})
    out = zeros_like(make_tensors()) | {"rng.rank_7": torch.zeros(3)}
    checkpointer.load(5, out, optional=("rng.",))
    assert torch.equal(out["model.weight"], make_tensors()["model.weight"])
    assert not out["rng.rank_7"].any()


@pytest.mark.parametrize("failing", ["save_tensors", "_describe_file"])
def test_a_save_on_a_full_disk_leaves_nothing_and_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, make_tensors(), {})

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"gem_train.checkpoint.{failing}", full)
        with pytest.raises(
            CheckpointError,
            match=r"must take the checkpoint of step 2 \(0 MB of tensors\), got '.*No space left on device', with .* M"
            r"B free; nothing of it was kept and --resume goes on from step 1\.",
        ):
            checkpointer.save(2, make_tensors(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    checkpointer.save(2, make_tensors(), {})
    assert checkpointer.latest() == 2


def test_a_run_does_not_go_on_past_a_checkpoint_without_a_manifest(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, make_tensors(), {})
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"is missing; .* remove .*step-00000002 to go on from step 1$"):
        checkpointer.latest()
    (tmp_path / "step-00000002").rename(tmp_path / "elsewhere")
    assert checkpointer.latest() == 1


def test_whole_numbers_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`keep_last` must be >= 1, got 0"):
        Checkpointer(tmp_path, keep_last=0)
    with pytest.raises(TypeError, match=r"`keep_last` must be a whole number, got 1\.5"):
        Checkpointer(tmp_path, keep_last=1.5)  # type: ignore[arg-type]
    for step in (None, "8"):
        with pytest.raises(TypeError, match=rf"`step` must be a whole number, got {step!r}; there are"):
            Checkpointer(tmp_path).verify(step)  # type: ignore[arg-type]


def test_a_directory_is_made_ready_or_refused(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "deep" / "checkpoints")
    checkpointer.prepare(after=None)
    assert list(checkpointer.directory.iterdir()) == []
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with pytest.raises(ConfigError, match=rf"`directory` must be one to write in, got {place} \("):
            Checkpointer(place).prepare(after=None)
    for step in (2, 4):
        checkpointer.save(step, make_tensors(), {})
    (checkpointer.path(4) / "manifest.json").unlink()
    checkpointer.prepare(after=4)
    with pytest.raises(ConfigError, match=r"no checkpoints of another run, got .* with those of steps \[2, 4\]; go on"):
        checkpointer.prepare(after=None)
    with pytest.raises(ConfigError, match=r"no checkpoints later than step 2, .* with those of steps \[4\]; resume"):
        checkpointer.prepare(after=2)


def test_random_state_survives_a_checkpoint(tmp_path: Path) -> None:
    device = torch.device("cpu")
    rng.seed_all(5)
    random.gauss(0.0, 1.0)
    np.random.standard_normal(3)
    state = rng.capture(device)
    Checkpointer(tmp_path).save(1, state, {})

    def draw() -> tuple[object, ...]:
        return (torch.rand(3).tolist(), np.random.standard_normal(5).tolist(), random.gauss(0.0, 1.0), random.random())

    expected = draw()
    loaded = zeros_like(state)
    Checkpointer(tmp_path).load(1, loaded)
    rng.restore(loaded, device)
    assert draw() == expected
