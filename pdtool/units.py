"""Read bytes, seconds and rates from options, and print them."""

from __future__ import annotations

import math
import re

from pdtool.errors import UsageError

_LETTERS = "kmgtp"
_FACTORS = {"": 1.0, **{letter: 1e3**power for power, letter in enumerate(_LETTERS, 1)}}
_FACTORS |= {f"{letter}i": 1024.0**power for power, letter in enumerate(_LETTERS, 1)}
_NUMBER, _PREFIX = r"((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*", "[kKmMgGtTpP]i?"
_RATE = re.compile(rf"{_NUMBER}({_PREFIX})?(bit|b|B)(?:/s|ps)")
_SIZE = re.compile(rf"{_NUMBER}(?:({_PREFIX})[bB]?|B)")
_TIME = re.compile(rf"{_NUMBER}(s|ms|us|ns)")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_PLAIN = (1e-3, 1e6)  # losses and metrics from here to there have digits before and after the point, as most have
TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))  # as they are printed
# Values outside of these must be slips; those of artifacts have limits too: (smallest, largest, both in words).
_RATES = (1e-3, 1e18, "0.001B/s to 1000PB/s")
_SIZES = (1, 1e18, "1B to 1000PB")
_TIMES = (1e-12, 30 * 86400.0, "0.001ns to 30 days")


def parse_bandwidth(text: str) -> float:
    """Read `10Gbit/s`, `10Gbps`, `12GB/s` or `12GBps` as bytes per second: `b` is a bit, `B` a byte.

    Raises:
        UsageError: it does not say whether bits or bytes (`10`, `10G`), or is out of range.
    """
    remedy = "write 10Gbit/s or 10Gbps for bits, 1.25GB/s for bytes"
    match = _matched(_RATE, "bandwidth", text, "a positive rate in bits or bytes", remedy)
    rate = _scaled_number(match) / (1 if match[3] == "B" else 8)
    return _within("bandwidth", text, rate, _RATES)


def parse_bytes(text: str) -> int:
    """Read `16GB`, `16G`, `16GiB` or `1.5TB` as a number of bytes; raises UsageError."""
    match = _matched(_SIZE, "size", text, "a positive number with a unit", "write 16GB, 16G or 16GiB")
    return round(_within("size", text, _scaled_number(match), _SIZES))


def parse_seconds(text: str) -> float:
    """Read `50us` or `1.5s` as seconds; raises UsageError."""
    match = _matched(_TIME, "time", text, "a number with a unit", "write 50us, 1ms or 1.5s")
    value = float(match[1]) * _SECONDS[match[2]]
    return _within("time", text, value, _TIMES) if value else 0.0


def _matched(pattern: re.Pattern[str], name: str, text: str, expected: str, remedy: str) -> re.Match[str]:
    match = pattern.fullmatch(text.strip())
    if not match:
        raise UsageError(f"{name} {_short(text)} is not {expected}", remedy)
    return match


def _scaled_number(match: re.Match[str]) -> float:
    """The number times its prefix, which may be written small or large."""
    return float(match[1]) * _FACTORS[(match[2] or "").lower()]


def _within(what: str, text: str, value: float, limits: tuple[float, float, str]) -> float:
    low, high, words = limits
    if not low <= value <= high:
        fault = "too large" if value > high else "too small"
        raise UsageError(f"{what} {_short(text)} is {fault}", f"pass a value from {words}")
    return value


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def bytes_option(count: float) -> str:
    """Write bytes for an option, `4.82GB`, rounded up to three significant figures, so that they hold `count` bytes."""
    step = max(1.0, 10.0 ** (math.floor(math.log10(max(count, 1.0))) - 2))
    return format_bytes(math.ceil(count / step) * step).replace(" ", "")


def format_bytes(count: float) -> str:
    """Write bytes as `1.21 GB`, with decimal prefixes and three significant figures."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_rate(bytes_per_s: float) -> str:
    """Write a rate as `1.25 GB/s`."""
    return format_bytes(bytes_per_s) + "/s"


def format_throughput(samples_per_s: float) -> str:
    """Write `6.906 samples/s` or `10,070 samples/s`."""
    return f"{format_number(samples_per_s)} samples/s"


def format_number(value: float) -> str:
    """Write `6.906` or `10,070`: four significant figures, or all before the point."""
    return f"{value:.4g}" if value < 9999.5 else f"{value:,.0f}"


def format_ratio(value: float) -> str:
    """Write `2.11` or `3,290`: three significant figures, or all before the point."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def format_speedup(value: float) -> str:
    """Write a ratio of two times as `2.11`; a large one is only `more than 1,000`."""
    return format_ratio(value) if value < 999.5 else "more than 1,000"


def format_metric(value: float) -> str:
    """Write a loss or a metric as `0.1234`; tiny and huge ones as `3.21e-05` and `6e+28`."""
    is_plain = not value or _PLAIN[0] <= abs(value) < _PLAIN[1]
    return f"{value:.4f}" if is_plain else f"{value:.4g}"


def format_bits_rate(bytes_per_s: float) -> str:
    """Write a rate as `10 Gbit/s`, as links between servers are sold."""
    return _scaled(bytes_per_s * 8, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def format_seconds(seconds: float) -> str:
    """Write seconds as `1,684 s`, `1.5 s`, `12.3 ms` or `45 µs`."""
    if seconds == 0:
        return "0"
    scale, unit = next((pair for pair in TIME_UNITS if abs(seconds) >= pair[0] * 0.9995), TIME_UNITS[-1])
    return f"{format_ratio(seconds / scale)} {unit}"


def counted(number: int, noun: str) -> str:
    """Return `1 worker` or `2 workers`, `1 minibatch` or `2 minibatches`."""
    plural = f"{noun}es" if noun.endswith("batch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1e3
    return f"{format_ratio(value)} {units[-1]}"
