"""Hosts, zones and the links of each tier."""

from gem_parallel._src.topology import TIERS, Link, Tier, Topology

__all__ = ["TIERS", "Link", "Tier", "Topology"]
