"""The ranks as axes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gem_parallel._src.topology import Tier, Topology

__all__ = ["AxisPlacement", "ParallelDims", "ParallelMesh"]

DENSE_AXES = ("dp_replicate", "dp_shard", "ep")
SPARSE_AXES = ("sparse_replicate", "sparse_shard")
_IDEAL: dict[str, Tier] = {
    "dp_replicate": "cluster",
    "dp_shard": "zone",
    "ep": "host",
    "sparse_replicate": "host",
    "sparse_shard": "cluster",
}
"""Widest tier that an axis should use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisPlacement:
    """Where the groups of one axis lie."""

    axis: str
    degree: int
    """Ranks of a group."""
    stride: int
    """Distance between neighbouring ranks of a group."""
    tier: Tier
    """Narrowest tier that holds every group."""
    fits: bool
    """The tier is one that the axis should use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelMesh:
    """The process' place in the dense and in the sparse mesh."""

    dims: ParallelDims
    dense: DeviceMesh
    """Axes ("dp_replicate", "dp_shard", "ep"), ep over consecutive ranks."""
    sparse: DeviceMesh
    """Axes ("sparse_replicate", "sparse_shard") over the same ranks, the replicas of a shard on consecutive ranks. No
    group of theirs is one of the dense axes'."""
    shared: DeviceMesh = field(repr=False)
    """Axes ("dp_replicate", "dp_shard_ep"): parameters that are no expert's are data-parallel over ep, too. With ep 1
    it is the slice ("dp_replicate", "dp_shard") of ``dense``."""

    @property
    def fsdp(self) -> DeviceMesh:
        """For ``fully_shard`` of parameters that are no expert's: one axis for FSDP, two for HSDP."""
        return self.shared if self.dims.dp_replicate > 1 else self.shared[(self.shared.mesh_dim_names or ())[1]]

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """For ``fully_shard`` of an expert's parameters, which only ranks of equal ep coordinate hold."""
        return self.dense["dp_replicate", "dp_shard"] if self.dims.dp_replicate > 1 else self.dense["dp_shard"]

    @property
    def ep_group(self) -> dist.ProcessGroup:
        """The ranks that hold the other experts of this rank's layers."""
        return self.dense["ep"].get_group()


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDims:
    """Degrees of the axes. Dense and sparse axes cut the same ranks in two ways.

    Rank = (dp_replicate index * dp_shard + dp_shard index) * ep + ep index, and
    rank = sparse_shard index * sparse_replicate + sparse_replicate index. So expert parallelism and the exchange of
    table replicas run between neighbours in a host, FSDP between the hosts of a zone and replicas across zones, as in
    Meta's post on GEM training of 2026-08-03 and in TorchRec's 2D parallelism.
    """

    dp_replicate: int = 1
    """Ranks that hold equal copies of a dense shard (HSDP's outer axis; may cross zones)."""
    dp_shard: int = 1
    """Ranks that share the parameters, gradients and optimizer state of an expert; with ep, of everything dense."""
    ep: int = 1
    """Ranks that hold different experts and exchange activations."""
    sparse_replicate: int = 1
    """Copies of each table."""
    sparse_shard: int = 1
    """Ranks that share one copy of the tables."""

    def __post_init__(self) -> None:
        for axis in (*DENSE_AXES, *SPARSE_AXES):
            degree = getattr(self, axis)
            if not isinstance(degree, int) or isinstance(degree, bool):
                raise TypeError(
                    f"ParallelDims: `{axis}` must be an int, got {type(degree).__name__}; pass a number of ranks"
                )
            if degree < 1:
                raise ValueError(f"ParallelDims: `{axis}` must be at least 1, got {degree}; 1 leaves it out")
        world, sparse = self.world_size, self.sparse_replicate * self.sparse_shard
        if sparse != world:
            remedy = (
                f"pass sparse_shard={world // self.sparse_replicate}"
                if world % self.sparse_replicate == 0
                else "nearest: " + _shown(_nearest((self.sparse_replicate, self.sparse_shard), world), SPARSE_AXES)
            )
            raise ValueError(
                "ParallelDims: `sparse_shard` must equal dp_replicate * dp_shard * ep / sparse_replicate, as dense and "
                f"sparse axes cut the same ranks ({self.dp_replicate} * {self.dp_shard} * {self.ep} = {world} ranks, "
                f"{self.sparse_replicate} copies), got {self.sparse_shard}; {remedy}, or use ParallelDims.for_world"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp_replicate * self.dp_shard * self.ep

    @classmethod
    def for_world(
        cls,
        world_size: int,
        *,
        dp_replicate: int = 1,
        ep: int = 1,
        sparse_replicate: int = 1,
        dp_shard: int | None = None,
        sparse_shard: int | None = None,
    ) -> ParallelDims:
        """Shard everything over ``world_size`` ranks, as far as the other degrees leave ranks for it.

        ``dp_shard`` and ``sparse_shard`` follow from the others; one that is given is checked.

        Raises:
            TypeError: a number is no int.
            ValueError: a number is below 1. Or ``world_size`` is not a multiple of dp_replicate * ep and of
                sparse_replicate; names the nearest degrees that fit. Or a shard degree is not the one that follows.
        """
        numbers = {
            "world_size": world_size,
            "dp_replicate": dp_replicate,
            "ep": ep,
            "sparse_replicate": sparse_replicate,
            "dp_shard": dp_shard,
            "sparse_shard": sparse_shard,
        }
        for argument, number in numbers.items():
            if number is None and argument.endswith("_shard"):
                continue
            if not isinstance(number, int) or isinstance(number, bool):
                raise TypeError(
                    f"ParallelDims.for_world: `{argument}` must be an int, got {type(number).__name__} {number!r}; "
                    "pass a number of ranks"
                )
            if number < 1:
                raise ValueError(
                    f"ParallelDims.for_world: `{argument}` must be >= 1, got {number}; pass a number of ranks"
                )
        for wanted in ({"dp_replicate": dp_replicate, "ep": ep}, {"sparse_replicate": sparse_replicate}):
            axes = tuple(axis for axis in wanted if axis != "ep" or ep > 1)
            factor = math.prod(wanted.values())
            if world_size % factor != 0:
                # The last degree is what the others leave; a model may have no more experts than were asked for.
                rest = max(1, world_size // factor)
                found = _nearest((*(wanted[axis] for axis in axes), rest), world_size, limit=None)
                found = [each for each in found if len(axes) == 1 or each[1] <= ep][:3]
                raise ValueError(
                    f"ParallelDims.for_world: `world_size` must be a positive multiple of {' * '.join(axes)} "
                    f"({factor}), got {world_size}; nearest: {_shown([each[:-1] for each in found], axes)}"
                )
        follows = {
            "dp_shard": (dp_shard, world_size // (dp_replicate * ep), "dp_replicate or ep"),
            "sparse_shard": (sparse_shard, world_size // sparse_replicate, "sparse_replicate"),
        }
        for axis, (given, rest, others) in follows.items():
            if given is not None and given != rest:
                raise ValueError(
                    f"ParallelDims.for_world: `{axis}` must be {rest}, what the other degrees leave of {world_size} "
                    f"ranks, got {given}; leave it out and set {others}, or give every degree to ParallelDims"
                )
        return cls(
            dp_replicate=dp_replicate,
            dp_shard=world_size // (dp_replicate * ep),
            ep=ep,
            sparse_replicate=sparse_replicate,
            sparse_shard=world_size // sparse_replicate,
        )

    def placement(self, topology: Topology) -> dict[str, AxisPlacement]:
        """Axis -> stride and tier of its groups, for ranks numbered host by host and zone by zone.

        Beside the five axes: "dp_shard_ep", which shards what is no expert's.

        Raises:
            TypeError: ``topology`` is no ``Topology``.
        """
        _check_topology("placement", topology)
        order = {"host": 0, "zone": 1, "cluster": 2}
        strides = {"ep": 1, "dp_shard": self.ep, "dp_replicate": self.dp_shard * self.ep, "dp_shard_ep": 1}
        strides |= {"sparse_replicate": 1, "sparse_shard": self.sparse_replicate}
        found = {}
        for axis, stride in strides.items():
            degree = self.dp_shard * self.ep if axis == "dp_shard_ep" else getattr(self, axis)
            tier = topology.tier_of(stride * degree) if degree > 1 else "host"
            fits = order[tier] <= order[_IDEAL.get(axis, "zone")]
            found[axis] = AxisPlacement(axis=axis, degree=degree, stride=stride, tier=tier, fits=fits)
        return found

    def check(self, topology: Topology) -> None:
        """Refuse a layout that does not fit a topology.

        Raises:
            TypeError: ``topology`` is no ``Topology``.
            ValueError: the ranks are not the topology's GPUs, expert parallelism or the replicas of a table leave a
                host, or FSDP leaves a zone; names the nearest layouts that fit.
        """
        _check_topology("check", topology)
        if self.world_size != topology.num_gpus:
            raise ValueError(
                f"ParallelDims.check: dp_replicate * dp_shard * ep = {self.world_size} must equal the GPUs of "
                f"`topology`, got {topology.num_gpus}; nearest: {self._alternatives(topology.num_gpus, topology)}"
            )
        where = {"host": "a host", "zone": "a zone"}
        for place in self.placement(topology).values():
            if not place.fits and place.axis != "dp_shard_ep":
                tier = _IDEAL[place.axis]
                size = topology.gpus_per_host if tier == "host" else topology.gpus_per_zone
                factor = "dp_shard * ep" if place.axis == "dp_shard" else place.axis
                raise ValueError(
                    f"ParallelDims.check: `{place.axis}` must stay inside {where[tier]}, so {factor} must divide its "
                    f"{size} GPUs, got {place.degree * place.stride}; "
                    f"nearest: {self._alternatives(self.world_size, topology)}"
                )

    def _alternatives(self, world_size: int, topology: Topology | None) -> str:
        dense = [
            degrees
            for degrees in _nearest((self.dp_replicate, self.dp_shard, self.ep), world_size, limit=None)
            # A model may have no more experts than were asked for.
            if degrees[2] <= self.ep
            and (
                topology is None
                or (
                    topology.tier_of(degrees[2]) == "host"
                    and topology.tier_of(degrees[1] * degrees[2]) in ("host", "zone")
                )
            )
        ]
        sparse = [
            degrees
            for degrees in _nearest((self.sparse_replicate, self.sparse_shard), world_size, limit=None)
            if topology is None or topology.tier_of(degrees[0]) == "host"
        ]
        return f"{_shown(dense[:3], DENSE_AXES)} with {_shown(sparse[:1], SPARSE_AXES)}"

    def describe(self, topology: Topology | None = None) -> str:
        """One line per axis: its ranks, the first group, and the tier it runs on.

        Args:
            topology: Default: hosts of 8 GPUs in one zone.

        Raises:
            TypeError: ``topology`` is no ``Topology``.
        """
        if topology is not None:
            _check_topology("describe", topology)
        if topology is None:
            whole = self.world_size % 8 == 0
            hosts = self.world_size // 8 if whole else 1
            topology = Topology(gpus_per_host=8 if whole else self.world_size, hosts_per_zone=hosts)
        text = {
            "host": "inside a host",
            "zone": "between the hosts of a zone",
            "cluster": "across zones",
        }
        lines = [
            f"{self.world_size} ranks, {topology.gpus_per_host} per host, {topology.gpus_per_zone} per zone",
        ]
        places = self.placement(topology)
        for axis in (*DENSE_AXES, *SPARSE_AXES):
            place = places[axis]
            if place.degree == 1:
                lines.append(f"{axis} 1")
                continue
            ranks = [str(place.stride * index) for index in range(place.degree)]
            group = ", ".join(ranks if len(ranks) <= 4 else [*ranks[:3], "...", ranks[-1]])
            wide = "" if place.fits else f"; should stay inside a {_IDEAL[axis]}"
            lines.append(f"{axis} {place.degree}: ranks {group}; {text[place.tier]}{wide}")
        return "\n".join(lines)

    def build_mesh(self, device_type: str, *, topology: Topology | None = None) -> ParallelMesh:
        """Make the process groups; every rank calls this once, after ``torch.distributed.init_process_group``.

        Args:
            device_type: "cpu" or "cuda".
            topology: If given, a layout that does not fit it is refused, as by ``check``.

        Raises:
            TypeError: ``topology`` is no ``Topology``.
            RuntimeError: torch.distributed is not initialised.
            ValueError: the degrees do not multiply to the number of ranks, an unknown device type, or as ``check``.
        """
        if topology is not None:
            _check_topology("build_mesh", topology)
        if device_type not in ("cpu", "cuda"):
            raise ValueError(
                f"build_mesh: `device_type` must be 'cpu' or 'cuda', got {device_type!r}; name one of them"
            )
        if device_type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                "build_mesh: `device_type` must be 'cpu' where torch sees no CUDA device, got 'cuda'; use 'cpu', or "
                "gem_parallel.engine_report() for what is missing"
            )
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "build_mesh: torch.distributed must be initialised; call init_process_group, or start with torchrun"
            )
        ranks = dist.get_world_size()
        if ranks != self.world_size:
            raise ValueError(
                f"build_mesh: dp_replicate * dp_shard * ep = {self.dp_replicate} * {self.dp_shard} * {self.ep} must "
                f"equal the number of ranks, got {ranks} ranks; ParallelDims.for_world({ranks}) fits; "
                f"nearest: {self._alternatives(ranks, topology)}"
            )
        if topology is not None:
            self.check(topology)
        dense = init_device_mesh(device_type, (self.dp_replicate, self.dp_shard, self.ep), mesh_dim_names=DENSE_AXES)
        if self.ep == 1:
            shared = dense["dp_replicate", "dp_shard"]
        else:
            shared = init_device_mesh(
                device_type,
                (self.dp_replicate, self.dp_shard * self.ep),
                mesh_dim_names=("dp_replicate", "dp_shard_ep"),
            )
        # Replicas are neighbours, yet the outer axis: the table of ranks is the transpose of counting.
        table = torch.arange(ranks).view(self.sparse_shard, self.sparse_replicate).t().contiguous()
        sparse = with_own_groups(DeviceMesh(device_type, table, mesh_dim_names=SPARSE_AXES))
        if self.ep > 1:
            # Where the experts' rows would wait for the parameters of ``shared``.
            dense = with_own_groups(dense)
        return ParallelMesh(dims=self, dense=dense, sparse=sparse, shared=shared)


def with_own_groups(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh with a process group of its own for an axis over all ranks, which torch gives the default group.

    NCCL runs the collectives of a group in the order in which they were enqueued. In one group for all, the numbers of
    a batch's ids would wait for every all-gather of parameters that is enqueued before them, and the host for the
    numbers: the device would wait in every step until the host has begun to enqueue the backward pass.

    All ranks of the mesh call it: it makes process groups.
    """
    groups = mesh.get_all_groups()
    if dist.get_world_size() == 1 or dist.group.WORLD not in groups:
        return mesh
    # No second group over all ranks: at most one axis has more than one of them.
    groups = [dist.new_group() if group is dist.group.WORLD else group for group in groups]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def _check_topology(function: str, topology: object) -> None:
    if not isinstance(topology, Topology):
        raise TypeError(
            f"ParallelDims.{function}: `topology` must be a Topology, got {type(topology).__name__} {topology!r}; pass "
            "Topology.load(path), Topology.detect() or its numbers"
        )


def _nearest(degrees: tuple[int, ...], world_size: int, limit: int | None = 3) -> list[tuple[int, ...]]:
    """Tuples of divisors with product ``world_size``, by the sum of the ratios' logarithms to ``degrees``."""
    small = [number for number in range(1, math.isqrt(world_size) + 1) if world_size % number == 0]
    divisors = sorted({*small, *(world_size // number for number in small)})
    found = []
    for head in product(divisors, repeat=len(degrees) - 1):
        rest, over = divmod(world_size, math.prod(head))
        if not over and rest:
            found.append((*head, rest))
    found.sort(key=lambda each: (sum(abs(math.log(a / b)) for a, b in zip(each, degrees, strict=True)), each))
    return found[:limit]


def _shown(layouts: list[tuple[int, ...]], axes: tuple[str, ...]) -> str:
    return " or ".join(
        "(" + ", ".join(f"{axis}={degree}" for axis, degree in zip(axes, layout, strict=True)) + ")"
        for layout in layouts
    )
