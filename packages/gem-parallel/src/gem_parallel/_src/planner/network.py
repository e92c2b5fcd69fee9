"""Collectives over a group of ranks: bytes and messages per tier, and their time.

Sizes are what one rank sends. A group of n = g * h * z ranks has g in a host, h hosts in a zone and z zones. All-gather
and reduce-scatter of V bytes run tier by tier, every rank carrying its part of what its host or zone exchanges:
V (z - 1) / (g h z) between zones, V (h - 1) / (g h) between hosts, V (g - 1) / g inside, which is V (n - 1) / n in all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gem_parallel._src.topology import TIERS, Tier, Topology

__all__ = ["Collective", "Group", "all_gather", "all_reduce", "all_to_all", "reduce_scatter"]

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """``degree`` ranks, ``stride`` apart."""

    axis: str
    degree: int
    stride: int = 1

    def split(self, topology: Topology) -> tuple[float, float, float]:
        """(ranks of the group in a host, its hosts in a zone, its zones); fractions where hosts hold unequal parts."""
        in_host = min(self.degree, max(1, topology.gpus_per_host // self.stride))
        in_zone = min(self.degree, max(in_host, topology.gpus_per_zone // self.stride))
        return float(in_host), in_zone / in_host, self.degree / in_zone


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective of a step, as one rank sees it."""

    name: str
    kind: Kind
    axis: str
    degree: int
    when: str
    """forward, backward or update."""
    payload: float
    """Bytes that a rank sends to the others."""
    tier_bytes: tuple[float, float, float]
    """The payload by the widest tier that it crosses, in order of ``TIERS``."""
    tier_messages: tuple[float, float, float]
    """Messages that a rank sends."""
    tier_rounds: tuple[float, float, float]
    """Messages that wait for one another."""

    @property
    def tier(self) -> Tier:
        """Widest tier."""
        used = [tier for tier, messages in zip(TIERS, self.tier_messages, strict=True) if messages]
        return used[-1] if used else "host"

    def busy(self, topology: Topology) -> tuple[float, float, float]:
        """Seconds that each tier's link is taken. What goes to another zone also passes the link to the zone."""
        _, zone, cluster = self.tier_bytes
        through = (self.tier_bytes[0], zone + cluster, cluster)
        host_s, zone_s, cluster_s = (
            amount / (topology.link(tier).bandwidth * 1e9) for amount, tier in zip(through, TIERS, strict=True)
        )
        return host_s, zone_s, cluster_s

    def latency(self, topology: Topology) -> float:
        """Seconds that do not depend on the size."""
        rounds = sum(count * topology.link(tier).latency for count, tier in zip(self.tier_rounds, TIERS, strict=True))
        if self.kind != "all_to_all":
            return rounds * 1e-6
        messages = sum(
            count * topology.link(tier).per_message for count, tier in zip(self.tier_messages, TIERS, strict=True)
        )
        return (rounds + messages) * 1e-6

    def seconds(self, topology: Topology) -> float:
        """Latency, then all tiers at once: large messages are cut and pass through the tiers in a pipeline."""
        return self.latency(topology) + max(self.busy(topology))


def _rounds(parts: tuple[float, float, float]) -> tuple[float, float, float]:
    """Rounds of a tree (or of NCCL's PAT) over each tier's part of the group."""
    host, zone, cluster = (float(math.ceil(math.log2(part))) if part > 1 else 0.0 for part in parts)
    return host, zone, cluster


def _gathering(
    kind: Kind, name: str, when: str, group: Group, total: float, topology: Topology, times: int
) -> Collective:
    g, h, z = group.split(topology)
    sent = (total * (g - 1) / g, total * (h - 1) / (g * h), total * (z - 1) / (g * h * z))
    rounds = _rounds((g, h, z))
    return Collective(
        name=name,
        kind=kind,
        axis=group.axis,
        degree=group.degree,
        when=when,
        payload=times * total * (group.degree - 1) / group.degree,
        tier_bytes=(times * sent[0], times * sent[1], times * sent[2]),
        tier_messages=(times * (g - 1), times * math.ceil(h - 1), times * math.ceil(z - 1)),
        tier_rounds=(times * rounds[0], times * rounds[1], times * rounds[2]),
    )


def all_gather(name: str, when: str, group: Group, total: float, topology: Topology) -> Collective:
    """Every rank ends with ``total`` bytes, a part from each."""
    return _gathering("all_gather", name, when, group, total, topology, 1)


def reduce_scatter(name: str, when: str, group: Group, total: float, topology: Topology) -> Collective:
    """Every rank starts with ``total`` bytes and ends with the sum of its part."""
    return _gathering("reduce_scatter", name, when, group, total, topology, 1)


def all_reduce(name: str, when: str, group: Group, total: float, topology: Topology) -> Collective:
    """Reduce-scatter and all-gather of ``total`` bytes."""
    return _gathering("all_reduce", name, when, group, total, topology, 2)


def all_to_all(
    name: str,
    when: str,
    group: Group,
    sent: float,
    topology: Topology,
    *,
    heaviest: float | None = None,
    times: int = 1,
) -> Collective:
    """Each rank sends ``sent`` bytes, its own part included, spread evenly over the ranks of the group.

    Args:
        name: Of the collective.
        when: Part of the step.
        group: The ranks.
        sent: Bytes of a rank's send buffer, mean over ranks.
        topology: The network.
        heaviest: Largest send or receive buffer of a rank; all wait for it.
        times: Calls that share the bytes.
    """
    g, h, _ = group.split(topology)
    n = group.degree
    amount = max(sent, heaviest or 0.0)
    share = ((g - 1) / n, (g * h - g) / n, (n - g * h) / n)
    rounds = tuple(float(times) if part > 0 else 0.0 for part in share)
    return Collective(
        name=name,
        kind="all_to_all",
        axis=group.axis,
        degree=n,
        when=when,
        payload=sent * (n - 1) / n,
        tier_bytes=(amount * share[0], amount * share[1], amount * share[2]),
        tier_messages=(times * (g - 1), times * (g * h - g), times * (n - g * h)),
        tier_rounds=(rounds[0], rounds[1], rounds[2]),
    )
