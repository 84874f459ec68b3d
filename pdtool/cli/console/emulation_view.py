"""Emulations as tables for people."""

from __future__ import annotations

from pdtool.artifacts.emulation import Emulation
from pdtool.cli.console.table import Lines, table
from pdtool.units import format_bits_rate, format_bytes, format_seconds


def emulation_view(emulation: Emulation) -> Lines:
    """Show each plan's time per minibatch, emulated beside simulated, and the gain of the first over each."""
    own = emulation.plans[0]
    rows = []
    for plan in emulation.plans:
        times = format_seconds(plan.bottleneck_s), format_seconds(plan.simulated_s), f"{plan.error:+.1%}"
        gain = "" if plan is own else f"{plan.bottleneck_s / own.bottleneck_s:.3g} ×"
        speed, sent = f"{plan.throughput_samples_per_s:.4g}", format_bytes(plan.sent_bytes)
        rows.append([plan.name, plan.config, *times, speed, gain, sent])
    columns = ("emulated", "plan", "per minibatch", "simulated", "error", "samples/s", "gain", "sent")
    levels = emulation.cluster.cluster()
    speeds = ", ".join(format_bits_rate(level.bandwidth_bytes_per_s) for level in levels.levels)
    yield table(columns, rows, names=2, title=f"{emulation.plan}: {levels.topology} at {speeds}")
    computing = {"sleep": "workers slept the times of the profile", "real": "workers trained the model"}
    scaled = f"; bytes and bandwidths / {emulation.scale:g}, times x {emulation.slowdown:g}"
    yield f"{computing[emulation.compute]} on {emulation.cores} core(s){scaled}"
