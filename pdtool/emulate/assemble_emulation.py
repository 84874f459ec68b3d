"""Assemble the artifact of an emulation from the reports of its plans."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.report import EmulatedPlan, Emulation, Report
from pdtool.emulate.emulate_plans import EmulationSettings
from pdtool.emulate.sleeping_model import Scaling


def assemble_emulation(
    plans: Mapping[str, Plan],
    reports: Mapping[str, Report],
    scalings: Mapping[str, Scaling],
    settings: EmulationSettings,
    compute: Literal["sleep", "real"],
) -> Emulation:
    """Return the artifact, with times and bytes as they would be on the cluster itself.

    Args:
        plans: the plan, then its rivals, by their names.
        reports, scalings: of each plan; the reports have the times and bytes of the emulation.
    """
    name, chosen = next(iter(plans.items()))
    return Emulation(
        plan=chosen.name,
        batch_size=chosen.batch_size,
        cluster=chosen.cluster,
        compute=compute,
        scale=scalings[name].scale,
        slowdown=scalings[name].slowdown,
        cores=os.cpu_count() or 1,
        target=str(settings.target) if settings.target else None,
        plans=tuple(_emulated(name, plan, reports[name], scalings[name]) for name, plan in plans.items()),
        digests=dict(chosen.digests),
    )


def _emulated(name: str, plan: Plan, report: Report, scaling: Scaling) -> EmulatedPlan:
    predicted = plan.predicted
    time_s = report.measured.bottleneck_s / scaling.slowdown
    trained_s = report.epochs * report.minibatches * report.batch_size / (report.throughput_samples_per_s or 1.0)
    return EmulatedPlan(
        name=name,
        config=plan.config,
        schedule=plan.schedule,
        workers=plan.workers,
        minibatches=report.minibatches,
        bottleneck_s=time_s,
        is_steady=report.measured.is_steady,
        throughput_samples_per_s=plan.batch_size / time_s if time_s else 0.0,
        simulated_s=(predicted.simulated_s or predicted.bottleneck_s) if predicted else 0.0,
        sent_bytes=round(sum(stage.sent_bytes * stage.replicas for stage in report.stages) * scaling.scale),
        epochs=report.epochs,
        training_s=trained_s / scaling.slowdown,
        target_reached=report.target_reached,
        scale=scaling.scale,
        slowdown=scaling.slowdown,
    )
