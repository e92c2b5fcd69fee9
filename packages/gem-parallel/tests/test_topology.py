"""Topologies: files, detection, tiers, and what is refused."""

import json

import pytest

from gem_parallel import Link, Topology

SMALL = Topology(
    gpus_per_host=4,
    hosts_per_zone=2,
    zones=3,
    host=Link(bandwidth=150.0, latency=8, source='say "NVLink"'),
    zone=Link(bandwidth=25, latency=15.5),
)


@pytest.mark.parametrize("name", ["pod.json", "pod.toml"])
def test_files_round_trip(tmp_path, name):
    SMALL.save(tmp_path / name)
    assert Topology.load(tmp_path / name) == SMALL


def test_a_file_may_leave_fields_out(tmp_path):
    path = tmp_path / "pod.toml"
    path.write_text("zones = 2\n[host]\nbandwidth = 900.0\nlatency = 5\n")
    found = Topology.load(path)
    assert (found.num_gpus, found.host.bandwidth, found.zone) == (16, 900.0, Topology().zone)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("pod.yaml", "", r"must end with .json or .toml, got 'pod.yaml'"),
        ("pod.json", "{", "must be valid JSON"),
        ("pod.toml", "zones =", "must be valid TOML"),
        ("pod.json", "[]", "must hold one object, got list"),
        ("pod.json", '{"hosts": 2}', r"must hold fields of Topology only .* got \['hosts'\]"),
        ("pod.toml", "[host]\nGBs = 3", r"must hold fields of Link only .* got \['GBs'\]"),
    ],
)
def test_bad_files(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Topology.load(path)


def test_a_link_needs_both_numbers(tmp_path):
    path = tmp_path / "pod.json"
    path.write_text(json.dumps({"host": {"bandwidth": 900}}))
    with pytest.raises(ValueError, match=r"`host` must hold bandwidth and latency, got \['bandwidth'\]"):
        Topology.load(path)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Topology(zones=0), ValueError, "`zones` must be at least 1, got 0"),
        (lambda: Topology(zones=2.0), TypeError, "`zones` must be an int, got float"),
        (lambda: Topology(host=5), TypeError, "`host` must be a Link, got int"),
        (lambda: Topology(host=Link(bandwidth=10, latency=1)), ValueError, "must not grow from host to zone"),
        (lambda: Link(bandwidth=0, latency=1), ValueError, "`bandwidth` must be finite and above 0, got 0"),
        (lambda: Link(bandwidth=float("inf"), latency=1), ValueError, "`bandwidth` must be finite"),
        (lambda: Link(bandwidth=1, latency=-1), ValueError, "`latency` must be finite and at least 0, got -1"),
        (lambda: Link(bandwidth="1", latency=1), TypeError, "`bandwidth` must be a number, got str"),
        (lambda: Link(bandwidth=1, latency=1, source=3), TypeError, "`source` must be a str, got int"),
    ],
)
def test_refusals(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("span", "tier"),
    [
        (1, "host"),
        (2, "host"),
        (4, "host"),
        (8, "zone"),
        (3, "cluster"),
        (6, "cluster"),
        (12, "cluster"),
        (24, "cluster"),
    ],
)
def test_tiers(span, tier):
    assert SMALL.tier_of(span) == tier


def test_one_zone_and_one_host():
    assert Topology(gpus_per_host=4, hosts_per_zone=3).tier_of(6) == "zone"
    assert Topology(gpus_per_host=6).tier_of(4) == "host"


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [(1, (1, 1, 1)), (2, (2, 1, 1)), (4, (4, 1, 1)), (8, (4, 2, 1)), (16, (4, 2, 2)), (80, (4, 2, 10))],
)
def test_resized(ranks, shape):
    found = SMALL.resized(ranks)
    assert (found.gpus_per_host, found.hosts_per_zone, found.zones) == shape
    assert found.host == SMALL.host


@pytest.mark.parametrize(("ranks", "nearest"), [(6, "4, 8"), (12, "8, 16"), (9, "8, 16")])
def test_ranks_fill_hosts_and_zones(ranks, nearest):
    with pytest.raises(ValueError, match=f"got {ranks}; nearest: {nearest}"):
        SMALL.resized(ranks)


def test_detect(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    found = Topology.detect()
    assert (found.gpus_per_host, found.hosts_per_zone, found.zones) == (8, 2, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE must divide the number of ranks, as hosts are alike, got 6"):
        Topology.detect()


def test_detect_alone(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert Topology.detect().num_gpus == 4
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert Topology.detect().num_gpus == 1
