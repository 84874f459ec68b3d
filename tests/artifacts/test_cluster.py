"""Topologies, and which link two workers share."""

import numpy as np
import pytest
import samples
from pydantic import ValidationError

from pdtool.artifacts.cluster import Level, make_cluster, parse_topology
from pdtool.artifacts.plan import Plan
from pdtool.errors import UsageError

SERVERS = make_cluster((2, 2, 2), (1e9, 5e9, 50e9))


@pytest.mark.parametrize(("a", "b", "bandwidth"), [(0, 1, 50e9), (1, 2, 5e9), (0, 3, 5e9), (3, 4, 1e9), (0, 7, 1e9)])
def test_link_is_the_slowest_on_the_way(a, b, bandwidth):
    assert SERVERS.link(a, b).bandwidth_bytes_per_s == bandwidth
    assert SERVERS.link(b, a) == SERVERS.link(a, b)


def test_a_worker_needs_no_link_to_itself():
    assert SERVERS.link(3, 3) is None


def test_a_level_gives_the_time_of_bytes_and_messages():
    level = Level(size=2, bandwidth_bytes_per_s=100.0, latency_s=0.5)
    assert (level.time_s(200), level.time_s(200, messages=3), level.time_s(200, 0)) == (2.5, 3.5, 2.0)
    assert level.time_s(np.array([0, 100]), np.array([0, 2])).tolist() == [0.0, 2.0]


def test_a_cluster_is_checked_where_it_becomes_a_part_of_a_plan():
    """Planning computes with any figures, as when it tries other bandwidths."""
    beyond = make_cluster((2,), (1e30,))
    with pytest.raises(ValidationError, match="bandwidth_bytes_per_s"):
        Plan.model_validate({**dict(samples.plan()), "cluster": beyond})


def test_a_slow_inner_level_bounds_the_way_out():
    slow_inside = make_cluster((2, 2), (10e9, 1e9))
    assert slow_inside.link(0, 3).bandwidth_bytes_per_s == 1e9


def test_topology_is_read_outermost_first():
    assert parse_topology("4x8") == (4, 8)
    assert make_cluster((4, 8), (1, 2)).topology == "4x8"
    assert SERVERS.workers == 8


@pytest.mark.parametrize("text", ["", "4x", "x4", "4*4", "-1", "0x4", "4x0", "1e3", "99999x99999", "4 x 4"])
def test_impossible_topologies_are_refused(text):
    with pytest.raises(UsageError, match="topology"):
        parse_topology(text)


def test_one_bandwidth_per_level():
    with pytest.raises(UsageError, match="--bandwidth has 1 value, but topology 4x4 has 2 levels"):
        make_cluster((4, 4), (1e9,))
