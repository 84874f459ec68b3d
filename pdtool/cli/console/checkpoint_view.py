"""Checkpoints: what was trained, and the files that hold it."""

from __future__ import annotations

from pdtool.artifacts.checkpoint_manifest import CheckpointManifest
from pdtool.cli.console.table import Lines, table
from pdtool.units import format_bytes


def checkpoint_view(manifest: CheckpointManifest) -> Lines:
    """List the metrics of the epoch, and the files."""
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items())
    title = f"epoch {manifest.epoch}, seed {manifest.seed}: {metrics}"
    rows = [[name, format_bytes(file.bytes), file.sha256] for name, file in manifest.files.items()]
    yield table(("file", "bytes", "sha256"), rows, title=title)
