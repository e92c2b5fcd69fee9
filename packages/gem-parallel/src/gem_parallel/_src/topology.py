"""The network that the ranks stand on: hosts, zones, and what a link of each tier carries."""

from __future__ import annotations

import json
import math
import os
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

__all__ = ["TIERS", "Link", "Tier", "Topology"]

Tier = Literal["host", "zone", "cluster"]
"""Narrowest part of the network that holds a group of ranks: one host, one zone, or several zones."""
TIERS: tuple[Tier, ...] = get_args(Tier)
_COUNTS = ("gpus_per_host", "hosts_per_zone", "zones")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What one GPU's connection to a tier carries."""

    bandwidth: float
    """GB/s (1e9 bytes per second) per GPU and direction, while all GPUs send."""
    latency: float
    """us that one message costs whatever its size, start of the collective included."""
    source: str = "stated"
    """Where the numbers are from."""
    per_message: float = 0.0
    """us that each message of an all-to-all adds, as a rank sends one to every other rank."""

    def __post_init__(self) -> None:
        for name, least in (("bandwidth", "above 0"), ("latency", "at least 0"), ("per_message", "at least 0")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"Link: `{name}` must be a number, got {type(value).__name__}; pass a float")
            if not math.isfinite(value) or value < 0 or (name == "bandwidth" and value == 0):
                raise ValueError(f"Link: `{name}` must be finite and {least}, got {value}; pass GB/s and us")
        if not isinstance(self.source, str):
            raise TypeError(
                f"Link: `source` must be a str, got {type(self.source).__name__}; write where the numbers are from"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """GPUs in hosts, hosts in zones. Ranks are numbered host by host and zone by zone, as torchrun does.

    The three tiers are those of Meta's post on GEM training of 2026-08-03: NVLink in a host, RoCE between the hosts of
    a zone, oversubscribed RoCE between zones.
    """

    gpus_per_host: int = 8
    hosts_per_zone: int = 1
    zones: int = 1
    host: Link = Link(
        bandwidth=250.0,
        latency=30.0,
        per_message=0.2,
        source="NCCL 2.28 without multicast over NVLink 4 between two H200s: all-gather 235, reduce-scatter 249, "
        "all-to-all 306 GB/s between 64 and 512 MiB; docs/measured/multi-gpu-h200-2026-11-30.md; per_message assumed",
    )
    zone: Link = Link(
        bandwidth=50.0,
        latency=20.0,
        per_message=1.0,
        source="RoCE of 400 Gbit/s per GPU (line rate); latencies assumed",
    )
    cluster: Link = Link(
        bandwidth=12.5, latency=40.0, per_message=1.0, source="RoCE oversubscribed 4:1 between zones; all assumed"
    )

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"Topology: `{name}` must be an int, got {type(value).__name__}; pass int(x)")
            if value < 1:
                raise ValueError(f"Topology: `{name}` must be at least 1, got {value}; pass a number of them")
        for tier in TIERS:
            if not isinstance(getattr(self, tier), Link):
                raise TypeError(
                    f"Topology: `{tier}` must be a Link, got {type(getattr(self, tier)).__name__}; pass "
                    "Link(bandwidth=, latency=)"
                )
        bandwidths = [self.link(tier).bandwidth for tier in TIERS]
        if bandwidths != sorted(bandwidths, reverse=True):
            raise ValueError(
                "Topology: bandwidth must not grow from host to zone to cluster, as a message to a wider tier also "
                f"crosses the narrower ones, got {bandwidths} GB/s; check the order and the units"
            )

    @property
    def gpus_per_zone(self) -> int:
        """GPUs of one zone."""
        return self.gpus_per_host * self.hosts_per_zone

    @property
    def num_gpus(self) -> int:
        """GPUs of all zones."""
        return self.gpus_per_zone * self.zones

    def link(self, tier: Tier) -> Link:
        """The link of a tier."""
        found: Link = getattr(self, tier)
        return found

    def tier_of(self, span: int) -> Tier:
        """Narrowest tier that holds every block of ``span`` consecutive ranks that starts at a multiple of ``span``."""
        if self.gpus_per_host % span == 0 or self.num_gpus == self.gpus_per_host:
            return "host"
        return "zone" if self.gpus_per_zone % span == 0 or self.zones == 1 else "cluster"

    def resized(self, num_ranks: int) -> Topology:
        """The same links and hosts, with as many hosts and zones as ``num_ranks`` fill.

        Raises:
            ValueError: ``num_ranks`` does not fill whole hosts, or whole zones.
        """
        if num_ranks < 1:
            raise ValueError(
                f"Topology.resized: `num_ranks` must be at least 1, got {num_ranks}; pass a number of GPUs"
            )
        gpus = min(self.gpus_per_host, num_ranks)
        hosts, rest = divmod(num_ranks, gpus)
        in_zone = min(self.hosts_per_zone, hosts)
        if rest or hosts % in_zone:
            unit = gpus if num_ranks < self.gpus_per_zone else self.gpus_per_zone
            below = num_ranks // unit * unit
            raise ValueError(
                f"Topology.resized: `num_ranks` must fill hosts of {self.gpus_per_host} GPUs and, above "
                f"{self.gpus_per_zone}, zones of {self.gpus_per_zone}, got {num_ranks}; "
                f"nearest: {below}, {below + unit}"
            )
        return Topology(
            gpus_per_host=gpus,
            hosts_per_zone=in_zone,
            zones=hosts // in_zone,
            host=self.host,
            zone=self.zone,
            cluster=self.cluster,
        )

    @classmethod
    def load(cls, path: str | Path) -> Topology:
        """Read a ``.json`` or ``.toml`` file with this class' fields; links are tables with theirs.

        Raises:
            ValueError: another suffix, a file that does not parse, an unknown field, or a bad value.
            TypeError: a value of a wrong type.
            OSError: the file cannot be read.
        """
        path = Path(path)
        if path.suffix not in (".json", ".toml"):
            raise ValueError(f"Topology.load: `path` must end with .json or .toml, got {path.name!r}; rename it")
        try:
            text = path.read_text(encoding="utf-8")
            values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except ValueError as error:
            raise ValueError(
                f"Topology.load: {path} must be valid {path.suffix[1:].upper()}, got {error}; correct it"
            ) from error
        if not isinstance(values, dict):
            raise ValueError(
                f"Topology.load: {path} must hold one object, got {type(values).__name__}; write the fields of a "
                "Topology"
            )
        _refuse_unknown(values, cls, str(path))
        for tier in TIERS:
            if isinstance(values.get(tier), dict):
                _refuse_unknown(values[tier], Link, f"{path}, `{tier}`")
                if not {"bandwidth", "latency"} <= set(values[tier]):
                    raise ValueError(
                        f"Topology.load: {path}, `{tier}` must hold bandwidth and latency, got {sorted(values[tier])}; "
                        "add what is missing"
                    )
                values[tier] = Link(**values[tier])
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write a ``.json`` or ``.toml`` file that ``load`` reads back equal.

        Raises:
            ValueError: another suffix.
        """
        path = Path(path)
        if path.suffix not in (".json", ".toml"):
            raise ValueError(f"Topology.save: `path` must end with .json or .toml, got {path.name!r}; rename it")
        values = asdict(self)
        if path.suffix == ".json":
            path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            return
        # A JSON string is also a TOML string.
        lines = [f"{name} = {values[name]}" for name in _COUNTS]
        for tier in TIERS:
            lines += ["", f"[{tier}]", *(f"{name} = {json.dumps(value)}" for name, value in values[tier].items())]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    @classmethod
    def detect(cls) -> Topology:
        """Hosts and GPUs of the running job; links are this class' assumptions, which nothing here measures.

        Within ``torch.distributed`` or torchrun: its ranks, in hosts of LOCAL_WORLD_SIZE. Else: the CUDA devices of
        this machine, or one rank without any. Zones cannot be seen from inside, so there is one.

        Raises:
            ValueError: LOCAL_WORLD_SIZE does not divide the number of ranks: the hosts are not alike.
        """
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
        world = world or int(os.environ.get("WORLD_SIZE", "0"))
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or min(world, devices) or world or devices or 1
        world = world or local
        if world % local:
            raise ValueError(
                f"Topology.detect: LOCAL_WORLD_SIZE must divide the number of ranks, as hosts are alike, got {local} "
                f"and {world} ranks; write the topology to a file and load it"
            )
        return cls(gpus_per_host=local, hosts_per_zone=world // local)


def _refuse_unknown(values: dict[str, Any], owner: type[Any], where: str) -> None:
    known = [field.name for field in fields(owner)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(
            f"Topology.load: {where} must hold fields of {owner.__name__} only ({', '.join(known)}), got {unknown}; "
            "correct or drop them"
        )
