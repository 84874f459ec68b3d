"""`HINTS` of the user's model.py: which modules must stay together, and which belong to a certain stage."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdtool.cluster import MAX_WORKERS
from pdtool.errors import FieldError


@dataclass(frozen=True)
class Hints:
    """What the user asks for.

    Attributes:
        no_split: paths of modules that stay in one stage.
        pin: path of a module -> index of its stage; a negative one counts from the end.
    """

    no_split: tuple[str, ...] = ()
    pin: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, hints: object) -> Hints:
        """Check what the user wrote; raises FieldError, whose text ends with what to write."""
        if not isinstance(hints, dict):
            raise FieldError("HINTS", f'{hints!r:.80} is no dict; write {{"no_split": [...], "pin": {{...}}}}')
        if unknown := [key for key in hints if key not in ("no_split", "pin")]:
            raise FieldError("HINTS", f"has unknown keys {unknown!r:.80}; use no_split and pin")
        no_split, pin = hints.get("no_split", ()), hints.get("pin", {})
        if not isinstance(no_split, (list, tuple)) or not all(isinstance(path, str) for path in no_split):
            raise FieldError('HINTS["no_split"]', f'{no_split!r:.80} is no list of module paths; write ["block1"]')
        if not isinstance(pin, dict):
            raise FieldError('HINTS["pin"]', f'{pin!r:.80} is no dict of module paths and stages; write {{"head": -1}}')
        for path, stage in pin.items():
            _check_pin(path, stage)
        return cls(tuple(no_split), dict(pin))


def _check_pin(path: object, stage: object) -> None:
    if not isinstance(path, str):
        raise FieldError('HINTS["pin"]', f"{path!r:.80} is no path of a module; write it as text")
    if not isinstance(stage, int) or isinstance(stage, bool) or abs(stage) >= MAX_WORKERS:
        where = f'HINTS["pin"][{path!r:.80}]'
        raise FieldError(where, f"{stage!r:.80} is no stage; write 0 for the first or -1 for the last")
