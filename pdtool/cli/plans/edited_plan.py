"""A plan that was edited by hand, with the figures of what it says now."""

from __future__ import annotations

from pdtool.artifacts.artifact import Artifact
from pdtool.artifacts.plan import Plan
from pdtool.cli.inputs import checked
from pdtool.cli.inputs import profile_of
from pdtool.errors import ArtifactError


def as_it_is(artifact: Artifact, file: str) -> tuple[Artifact, ArtifactError | None]:
    """Return (an artifact, a plan edited by hand with figures of what it says now; why there are none).

    Args:
        file: where it stands, for errors.

    Raises:
        ArtifactError, ScheduleError: the edited plan cannot be executed.
    """
    if not isinstance(artifact, Plan) or not artifact.edited:
        return artifact, None
    artifact.check_schedule()
    try:
        profile = profile_of(artifact, file)
    except ArtifactError as error:
        return artifact, error
    return checked(artifact, profile), None
