"""Depth: what more stages, and more minibatches in flight, give and cost (the paper's section 5.5)."""

from __future__ import annotations
