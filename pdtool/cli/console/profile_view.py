"""Profiles as a table of operators, and the devices that a profile can be estimated for."""

from __future__ import annotations

from collections.abc import Collection

from rich.table import Table

from pdtool.artifacts.device import Devices
from pdtool.artifacts.profile import Node, Profile
from pdtool.cli.console.table import Lines, table
from pdtool.units import format_bytes, format_rate, format_seconds


def profile_table(profile: Profile, *, largest: int | None = None) -> Table:
    """List the operators, or only the `largest` by time, with the totals."""
    ranked = sorted(profile.nodes, key=_total_s, reverse=True)
    shown = ranked[:largest] if largest else profile.nodes
    rows = [[node.name, node.op, *_costs([node]), format_bytes(node.output_bytes)] for node in shown]
    if len(shown) < len(profile.nodes):
        rest = ranked[len(shown) :]
        rows.append([f"({len(rest)} more)", "", *_costs(rest), ""])
    parameters = format_bytes(profile.parameter_bytes(set(profile.by_name)))
    rows.append(["total", "", *_costs(profile.nodes)[:-1], parameters, ""])
    title = f"{profile.name}: minibatch of {profile.batch_size}, {profile.device.kind} for {profile.device.name}"
    if profile.precision and profile.device.kind == "measured":  # the name of an estimate says it
        title += f", in {profile.precision}"
    if profile.compiled:
        title += f"\ntimes are shares of those of {len(profile.segments)} compiled segment(s)"
    if profile.step_s:
        title += f"\nwhole step {format_seconds(profile.step_s)}, coverage {profile.coverage:.2f}"
    if profile.loading_s is not None:
        title += f"\nloading {format_seconds(profile.loading_s)} a minibatch"
    columns = ("operator", "kind", "forward", "backward", "update", "parameters", "output")
    return table(columns, rows, names=2, title=title, drop=("output", "kind", "update", "parameters"))


def _total_s(node: Node) -> float:
    return node.forward_s + node.backward_s + node.update_s


def _costs(nodes: Collection[Node]) -> list[str]:
    """Sum forward, backward and update times and parameter bytes, as text."""
    seconds = [format_seconds(sum(getattr(n, f) for n in nodes)) for f in ("forward_s", "backward_s", "update_s")]
    return [*seconds, format_bytes(sum(n.parameter_bytes for n in nodes))]


def devices_view(devices: Devices) -> Lines:
    """List each device's figures, and the data sheets that they come from."""
    rows = []
    for key, device in devices.devices.items():
        peaks = ", ".join(f"{precision} {peak / 1e12:g}" for precision, peak in device.peak_flops_per_s.items())
        bandwidth, memory = format_rate(device.bandwidth_bytes_per_s), format_bytes(device.memory_bytes)
        rows.append([key, device.name, peaks, bandwidth, memory])
    yield table(("--device", "device", "Tflop/s", "bandwidth", "memory"), rows, names=3)
    yield from dict.fromkeys(f"source: {d.source}" for d in devices.devices.values())
