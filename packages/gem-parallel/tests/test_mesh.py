"""Degrees, where their groups lie, and what is refused; nothing here starts a process."""

import re
from dataclasses import dataclass

import pytest

from gem_parallel import Link, ParallelDims, Topology

POD = Topology(gpus_per_host=8, hosts_per_zone=4, zones=2)


@dataclass(frozen=True)
class PlacementCase:
    id: str
    dims: ParallelDims
    tiers: dict[str, str]
    unfit: tuple[str, ...] = ()


PLACEMENTS = [
    PlacementCase(
        "three tiers",
        ParallelDims(dp_replicate=2, dp_shard=16, ep=2, sparse_replicate=4, sparse_shard=16),
        {"ep": "host", "dp_shard": "zone", "dp_replicate": "cluster", "sparse_replicate": "host"},
    ),
    PlacementCase(
        "hosts only",
        ParallelDims(dp_replicate=8, dp_shard=4, ep=2, sparse_replicate=8, sparse_shard=8),
        {"ep": "host", "dp_shard": "host", "dp_replicate": "cluster", "sparse_shard": "cluster"},
    ),
    PlacementCase(
        "experts over hosts",
        ParallelDims(dp_replicate=2, dp_shard=2, ep=16, sparse_shard=64),
        {"ep": "zone", "dp_shard": "zone"},
        ("ep",),
    ),
    PlacementCase(
        "shards over zones",
        ParallelDims(dp_shard=64, sparse_replicate=16, sparse_shard=4),
        {"dp_shard": "cluster", "sparse_replicate": "zone"},
        ("dp_shard", "dp_shard_ep", "sparse_replicate"),
    ),
]


@pytest.mark.parametrize("case", PLACEMENTS, ids=lambda case: case.id)
def test_placement(case):
    places = case.dims.placement(POD)
    assert {axis: places[axis].tier for axis in case.tiers} == case.tiers
    assert {axis for axis, place in places.items() if not place.fits} == set(case.unfit)
    # The stride and degree say which ranks meet: check the tier by looking at every group.
    for place in places.values():
        for start in range(case.dims.world_size):
            if start // place.stride % place.degree == 0:
                group = range(start, start + place.stride * place.degree, place.stride)
                size = {"host": 8, "zone": 32, "cluster": 64}[place.tier]
                assert len({rank // size for rank in group}) == 1


@pytest.mark.parametrize("case", PLACEMENTS, ids=lambda case: case.id)
def test_check(case):
    if not case.unfit:
        case.dims.check(POD)
        return
    with pytest.raises(ValueError, match=rf"`{case.unfit[0]}` must stay inside .* nearest: \(dp_replicate="):
        case.dims.check(POD)


def test_the_nearest_layouts_fit():
    with pytest.raises(ValueError) as info:
        ParallelDims(dp_replicate=2, dp_shard=2, ep=16, sparse_shard=64).check(POD)
    assert "(dp_replicate=2, dp_shard=4, ep=8)" in str(info.value)
    assert "(sparse_replicate=1, sparse_shard=64)" in str(info.value)
    with pytest.raises(ValueError) as info:
        ParallelDims(dp_shard=64, sparse_shard=64).check(POD)
    found = re.findall(r"dp_replicate=\d+, dp_shard=\d+, ep=(\d+)", str(info.value))
    assert set(found) == {"1"}


def test_another_number_of_gpus_is_refused():
    with pytest.raises(ValueError, match=r"= 8 must equal the GPUs of `topology`, got 64"):
        ParallelDims.for_world(8).check(POD)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dp_shard": 8, "ep": 2, "sparse_replicate": 2, "sparse_shard": 4}, r"got 4; pass sparse_shard=8, or"),
        ({"dp_shard": 8, "sparse_replicate": 3, "sparse_shard": 3}, r"nearest: .*sparse_replicate=2, sparse_shard=4"),
        ({"dp_shard": 8, "sparse_shard": 8, "ep": 0}, "`ep` must be at least 1, got 0"),
    ],
)
def test_dims_refuse(arguments, text):
    with pytest.raises(ValueError, match=text):
        ParallelDims(**arguments)


def test_for_world():
    dims = ParallelDims.for_world(16, dp_replicate=2, ep=4, sparse_replicate=2)
    assert dims == ParallelDims(dp_replicate=2, dp_shard=2, ep=4, sparse_replicate=2, sparse_shard=8)
    with pytest.raises(ValueError, match=r"positive multiple of dp_replicate \* ep \(6\), got 16; nearest: ") as info:
        ParallelDims.for_world(16, dp_replicate=2, ep=3)
    assert str(info.value).endswith(
        "nearest: (dp_replicate=2, ep=2) or (dp_replicate=4, ep=2) or (dp_replicate=1, ep=2)"
    )
    # No experts are asked of a model whose layout had none.
    with pytest.raises(
        ValueError, match=r"got 16; nearest: \(dp_replicate=4\) or \(dp_replicate=2\) or \(dp_replicate=8\)$"
    ):
        ParallelDims.for_world(16, dp_replicate=3)
    with pytest.raises(ValueError, match=r"sparse_replicate \(3\), got 16; nearest: \(sparse_replicate=4\) or \(spar"):
        ParallelDims.for_world(16, sparse_replicate=3)
    for bad in ("world_size", "dp_replicate", "ep", "sparse_replicate"):
        with pytest.raises(ValueError, match=f"`{bad}` must be >= 1, got 0; pass a number of ranks"):
            ParallelDims.for_world(**({"world_size": 16} | {bad: 0}))


def test_for_world_checks_the_degrees_that_follow():
    dims = ParallelDims.for_world(16, dp_replicate=2, sparse_replicate=4)
    assert ParallelDims.for_world(16, dp_replicate=2, sparse_replicate=4, dp_shard=8, sparse_shard=4) == dims
    with pytest.raises(
        ValueError, match=r"`dp_shard` must be 8, .* leave of 16 ranks, got 4; .* set dp_replicate or ep"
    ):
        ParallelDims.for_world(16, dp_replicate=2, dp_shard=4)
    with pytest.raises(ValueError, match=r"`sparse_shard` must be 16, .* got 8; leave it out and set sparse_replicate"):
        ParallelDims.for_world(16, sparse_shard=8)
    with pytest.raises(TypeError, match="`dp_shard` must be an int, got str"):
        ParallelDims.for_world(16, dp_shard="8")


def test_describe():
    text = PLACEMENTS[0].dims.describe(POD)
    assert "64 ranks, 8 per host, 32 per zone" in text
    assert "ep 2: ranks 0, 1; inside a host" in text
    assert "dp_shard 16: ranks 0, 2, 4, ..., 30; between the hosts of a zone" in text
    assert "dp_replicate 2: ranks 0, 32; across zones" in text
    assert "sparse_replicate 4: ranks 0, 1, 2, 3; inside a host" in text
    assert "should stay inside a host" in PLACEMENTS[2].dims.describe(POD)
    assert ParallelDims().describe().splitlines()[0] == "1 ranks, 1 per host, 1 per zone"


def test_links_do_not_matter_to_the_placement():
    fast = Topology(gpus_per_host=8, hosts_per_zone=4, zones=2, host=Link(bandwidth=900, latency=1))
    assert PLACEMENTS[0].dims.placement(fast) == PLACEMENTS[0].dims.placement(POD)


REFUSED = {
    "str": (lambda: ParallelDims.for_world("8"), "ParallelDims.for_world: `world_size` must be an int, got str '8'"),
    "float": (lambda: ParallelDims.for_world(8.0), "`world_size` must be an int, got float 8.0"),
    "bool": (lambda: ParallelDims.for_world(True), "`world_size` must be an int, got bool"),
    "ep": (lambda: ParallelDims.for_world(8, ep="2"), "`ep` must be an int, got str '2'"),
    "copies": (
        lambda: ParallelDims.for_world(8, sparse_replicate=None),
        "`sparse_replicate` must be an int, got NoneType",
    ),
    "describe": (
        lambda: ParallelDims().describe("pod"),
        "ParallelDims.describe: `topology` must be a Topology, got str",
    ),
    "check": (lambda: ParallelDims().check(8), "ParallelDims.check: `topology` must be a Topology, got int 8; pass"),
    "placement": (
        lambda: ParallelDims().placement(None),
        "ParallelDims.placement: `topology` must be a Topology, got No",
    ),
    "mesh": (lambda: ParallelDims().build_mesh("cpu", topology="pod"), "build_mesh: `topology` must be a Topology"),
}


@pytest.mark.parametrize(("call", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses_other_kinds(call, text):
    with pytest.raises(TypeError, match=text):
        call()
