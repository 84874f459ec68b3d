"""Units: what is read, what is refused as ambiguous, what is printed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtool.errors import UsageError
from pdtool.units import (
    bytes_option,
    counted,
    format_bits_rate,
    format_bytes,
    format_metric,
    format_number,
    format_rate,
    format_ratio,
    format_seconds,
    format_speedup,
    format_throughput,
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10Gbit/s", 1.25e9),
        ("1.25GB/s", 1.25e9),
        ("100 Mbit/s", 12.5e6),
        ("1GiB/s", 2**30),
        ("1e3B/s", 1e3),
        ("8kbit/s", 1e3),
        ("10Gbps", 1.25e9),
        ("10Gb/s", 1.25e9),
        ("10gbps", 1.25e9),
        ("1.25GBps", 1.25e9),
        ("1.6Tbit/s", 2e11),
        ("2 TiB/s", 2**41),
    ],
)
def test_bandwidths(text, value):
    assert parse_bandwidth(text) == value


@pytest.mark.parametrize(
    "text", ["10", "10G", "10GB", "10Gbit", "0Gbit/s", "-1GB/s", "1.2.3GB/s", "", "3ibit/s", "nanB/s", "1GBPS"]
)
def test_what_is_no_bandwidth_is_refused(text):
    with pytest.raises(UsageError, match=r"bandwidth|number"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16GB", 16 * 10**9),
        ("16G", 16 * 10**9),
        ("16GiB", 16 * 2**30),
        ("16Gi", 16 * 2**30),
        ("16 gb", 16 * 10**9),
        ("1.5TB", 1_500_000_000_000),
        ("1.5T", 1_500_000_000_000),
        ("2TiB", 2**41),
        ("512kiB", 2**19),
        ("12B", 12),
        ("4.35MB", 4_350_000),
    ],
)
def test_sizes(text, value):
    assert parse_bytes(text) == value


def test_what_has_no_unit_is_refused():
    for parse, text in ((parse_bytes, "16"), (parse_bytes, "16GB/s"), (parse_bytes, "16Gbit"), (parse_seconds, "5")):
        with pytest.raises(UsageError, match="write"):
            parse(text)
    assert parse_seconds("50us") == pytest.approx(50e-6)


@pytest.mark.parametrize("count", [1, 7, 999, 1000, 1001, 3_004_672, 4_812_582_400, 999_999_999, 10**15 + 1])
def test_a_size_for_an_option_is_readable_and_enough(count):
    text = bytes_option(count)
    assert len(text) <= 7
    assert count <= parse_bytes(text) <= max(count + 1, 1.011 * count)


def test_printing():
    assert format_bytes(1_210_000_000) == "1.21 GB"
    assert format_bytes(999.9) == "1 kB"
    assert format_rate(1.25e9) == "1.25 GB/s"
    throughputs = [format_throughput(each) for each in (6.90612, 9999.4, 9999.5, 10070.0)]
    assert throughputs == ["6.906 samples/s", "9999 samples/s", "10,000 samples/s", "10,070 samples/s"]
    assert [format_bits_rate(rate) for rate in (1.25e9, 12.5e6)] == ["10 Gbit/s", "100 Mbit/s"]
    assert [format_seconds(s) for s in (0, 1.5, 0.0123, 45e-6, 3e-9)] == ["0", "1.5 s", "12.3 ms", "45 µs", "3 ns"]
    assert [format_speedup(ratio) for ratio in (2.114, 999.4, 3.2e10)] == ["2.11", "999", "more than 1,000"]


@given(st.floats(1e-4, 1e15))
def test_a_figure_is_written_without_an_exponent_and_to_three_digits(value):
    for write in (format_ratio, format_seconds, format_bytes, format_bits_rate, format_number):
        assert "e" not in write(value)
    assert math.isclose(float(format_ratio(value).replace(",", "")), value, rel_tol=5e-3)
    if value > 1000:
        assert math.isclose(float(format_seconds(value).removesuffix(" s").replace(",", "")), value, rel_tol=5e-3)


@given(st.floats(-1e300, 1e300, allow_subnormal=False))
def test_a_metric_that_is_not_zero_is_not_written_as_zero(value):
    text = format_metric(value)
    assert len(text) <= 13
    assert math.isclose(float(text), value, rel_tol=0.05)


def test_nouns_are_counted():
    assert [counted(n, "minibatch") for n in (0, 1, 2)] == ["0 minibatches", "1 minibatch", "2 minibatches"]
    assert [counted(n, "worker") for n in (1, 2)] == ["1 worker", "2 workers"]


@pytest.mark.parametrize("text", ["1e400Gbit/s", "1e300GB/s", "1e-320B/s", "0B/s"])
def test_rates_that_nobody_means_are_refused(text):
    with pytest.raises(UsageError, match=r"too (large|small); pass a value from"):
        parse_bandwidth(text)


@pytest.mark.parametrize("text", ["1e400GB", "0.5B", "0GB"])
def test_sizes_that_nobody_means_are_refused(text):
    with pytest.raises(UsageError, match=r"too (large|small); pass a value from 1B to 1000PB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["1e400s", "1e18s", "31e6s"])
def test_a_time_without_end_is_refused(text):
    with pytest.raises(UsageError, match=r"time '.*' is too large; pass a value from 0\.001ns to 30 days"):
        parse_seconds(text)


def test_a_time_that_is_no_time_is_refused():
    assert parse_seconds("0s") == 0
    with pytest.raises(UsageError, match=r"time '1e-40s' is too small; pass a value from 0\.001ns"):
        parse_seconds("1e-40s")


def test_a_long_text_is_shortened():
    with pytest.raises(UsageError) as caught:
        parse_bytes("1" * 1_000_000)  # at once, too: a pattern that backtracks would take hours
    assert len(str(caught.value)) < 200
