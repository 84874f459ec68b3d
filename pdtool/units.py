"""Read bytes, seconds and rates from options, and print them."""

from __future__ import annotations

import re

from pdtool.errors import UsageError

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
_MIN_RATE, _MAX_RATE, _MAX_BYTES = 1e-3, 1e18, 1e18  # values outside are slips, and those of artifacts have limits too
_MIN_SECONDS, _MAX_SECONDS = 1e-12, 30 * 86400.0
_RATE = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kKMGT]?i?)(bit|B)/s")
_SIZE = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kKMGT]?i?)B")
_TIME = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*(s|ms|us|ns)")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def parse_bandwidth(text: str) -> float:
    """Read `10Gbit/s` or `12GB/s` as bytes per second.

    Raises:
        UsageError: no unit, or one that is read both as bits and as bytes (`10G`, `10Gb/s`, `10Gbps`); or a slip.
    """
    match = _RATE.fullmatch(text.strip())
    if not match:
        raise UsageError(
            f"bandwidth {_short(text)} is not a positive rate in bits or bytes", "write 10Gbit/s or 1.25GB/s"
        )
    rate = _number(match, text) * _PREFIX[match[2]] / (8 if match[3] == "bit" else 1)
    return _within("bandwidth", text, rate, _MIN_RATE, _MAX_RATE, "bytes per second")


def parse_bytes(text: str) -> int:
    """Read `16GB` or `16GiB` as a number of bytes; raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise UsageError(f"size {_short(text)} is not a positive number of bytes", "write 16GB or 16GiB")
    return int(_within("size", text, _number(match, text) * _PREFIX[match[2]], 1, _MAX_BYTES, "bytes"))


def parse_seconds(text: str) -> float:
    """Read `50us` or `1.5s` as seconds; raises UsageError."""
    match = _TIME.fullmatch(text.strip())
    if not match:
        raise UsageError(f"time {_short(text)} is not a number with a unit", "write 50us, 1ms or 1.5s")
    value = _number(match, text) * _SECONDS[match[2]]
    return _within("time", text, value, _MIN_SECONDS if value else 0.0, _MAX_SECONDS, "seconds")


def _number(match: re.Match[str], text: str) -> float:
    try:
        value = float(match[1])
    except ValueError:
        what = f"{match[1]!r:.40} in {_short(text)} is not a number"
        raise UsageError(what, "write digits with at most one point") from None
    if match.re is not _TIME and match[2] not in _PREFIX:
        raise UsageError(f"unknown prefix {match[2]!r} in {_short(text)}", "use k, M, G, T, Ki, Mi or Gi")
    return value


def _within(what: str, text: str, value: float, low: float, high: float, unit: str) -> float:
    if not low <= value <= high:
        fault = "too large" if value > high else "too small"
        raise UsageError(f"{what} {_short(text)} is {fault}", f"give one from {low:g} to {high:g} {unit}")
    return value


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def format_bytes(count: float) -> str:
    """Write bytes as `1.21 GB`, with decimal prefixes and three significant figures."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"), 1e3)


def format_rate(bytes_per_s: float) -> str:
    """Write a rate as `1.25 GB/s`."""
    return format_bytes(bytes_per_s) + "/s"


def format_bits_rate(bytes_per_s: float) -> str:
    """Write a rate as `10 Gbit/s`, as links between servers are sold."""
    return _scaled(bytes_per_s * 8, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"), 1e3)


def format_seconds(seconds: float) -> str:
    """Write seconds as `1.5 s`, `12.3 ms` or `45 µs`."""
    if seconds == 0:
        return "0"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale * 0.9995:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _scaled(value: float, units: tuple[str, ...], step: float) -> str:
    for unit in units[:-1]:
        if abs(value) < step * 0.9995:
            return f"{value:.3g} {unit}"
        value /= step
    return f"{value:.3g} {units[-1]}"
