"""run.json, the record of a run in its folder: what it was asked for, and how it ended.

`pdtool show` reads it to say where a run stands that has not finished.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pdtool.artifacts.run_dir import _UNWRITABLE, RUN_FILE, RunState, _put_report_aside, update_record
from pdtool.errors import PdtoolError, describe_error
from pdtool.run.config import RunConfig

_MAX_REASON = 2000  # characters


@contextmanager
def recorded(config: RunConfig, epochs_done: int) -> Iterator[None]:
    """Record that the run goes on, and at the end how it ended; an older report is put aside first.

    Args:
        epochs_done: those of the run that it resumes.
    """
    _put_report_aside(config.out, epochs_done)
    plan = config.plan
    state = RunState(
        plan=plan.name, config=plan.config, schedule=plan.schedule, epochs=config.epochs, epochs_done=epochs_done
    )
    with suppress(*_UNWRITABLE):
        state.save(config.out / RUN_FILE)
    try:
        yield
    except KeyboardInterrupt:  # whoever was stopped has said so
        raise
    except BaseException as error:
        text = str(error) if isinstance(error, PdtoolError) else describe_error(error)
        reason = text[:_MAX_REASON].encode(errors="backslashreplace").decode()  # a user's text may be no Unicode
        update_record(config.out, end="failed", reason=reason)
        raise
    update_record(config.out, end="done")
