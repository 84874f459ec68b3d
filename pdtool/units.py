"""Read bytes, seconds and rates from options, and print them."""

from __future__ import annotations

import re

from pdtool.errors import UsageError

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
_MIN, _MAX = 1e-3, 1e18  # values outside are slips
_RATE = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kKMGT]?i?)(bit|B)/s")
_SIZE = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kKMGT]?i?)B")
_TIME = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*(s|ms|us|ns)")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def parse_bandwidth(text: str) -> float:
    """Read `10Gbit/s` or `12GB/s` as bytes per second.

    Raises:
        UsageError: no unit, or one that is read both as bits and as bytes (`10G`, `10Gb/s`, `10Gbps`).
    """
    match = _RATE.fullmatch(text.strip())
    value = _number(match, text) if match else 0.0
    if not match or not _MIN <= value * _PREFIX[match[2]] <= _MAX:
        raise UsageError(f"bandwidth {text!r} is not a positive rate in bits or bytes", "write 10Gbit/s or 1.25GB/s")
    return value * _PREFIX[match[2]] / (8 if match[3] == "bit" else 1)


def parse_bytes(text: str) -> int:
    """Read `16GB` or `16GiB` as a number of bytes; raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    value = _number(match, text) if match else 0.0
    if not match or not 1 <= value * _PREFIX[match[2]] <= _MAX:
        raise UsageError(f"size {text!r} is not a positive number of bytes", "write 16GB or 16GiB")
    return int(value * _PREFIX[match[2]])


def parse_seconds(text: str) -> float:
    """Read `50us` or `1.5s` as seconds; raises UsageError."""
    match = _TIME.fullmatch(text.strip())
    if not match or _number(match, text) > _MAX:
        raise UsageError(f"time {text!r} is not a number with a unit", "write 50us, 1ms or 1.5s")
    return _number(match, text) * _SECONDS[match[2]]


def _number(match: re.Match[str], text: str) -> float:
    try:
        value = float(match[1])
    except ValueError:
        raise UsageError(f"{match[1]!r} in {text!r} is not a number", "write digits with at most one point") from None
    if match.re is not _TIME and match[2] not in _PREFIX:
        raise UsageError(f"unknown prefix {match[2]!r} in {text!r}", "use k, M, G, T, Ki, Mi or Gi")
    return value


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
