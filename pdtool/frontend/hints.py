"""`HINTS` of the user's model.py: which modules must stay together, belong to a certain stage, or are called whole."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdtool.artifacts.fields import MAX_WORKERS
from pdtool.errors import FieldError


@dataclass(frozen=True)
class Hints:
    """What the user asks for.

    Attributes:
        no_split: paths of modules that stay in one stage.
        pin: path of a module -> index of its stage; a negative one counts from the end.
        opaque: paths of modules that are one operator each, called whole.
    """

    no_split: tuple[str, ...] = ()
    pin: dict[str, int] = field(default_factory=dict)
    opaque: tuple[str, ...] = ()

    @classmethod
    def of(cls, hints: object) -> Hints:
        """Check what the user wrote; raises FieldError, whose text ends with what to write."""
        if not isinstance(hints, dict):
            raise FieldError("HINTS", f'{hints!r:.80} is no dict; write {{"no_split": [...], "pin": {{...}}}}')
        if unknown := [key for key in hints if key not in ("no_split", "pin", "opaque")]:
            raise FieldError("HINTS", f"has unknown keys {unknown!r:.80}; use no_split, pin and opaque")
        no_split, opaque = (_paths(key, hints.get(key, ())) for key in ("no_split", "opaque"))
        pin = hints.get("pin", {})
        if not isinstance(pin, dict):
            raise FieldError('HINTS["pin"]', f'{pin!r:.80} is no dict of module paths and stages; write {{"head": -1}}')
        for path, stage in pin.items():
            _check_pin(path, stage)
        return cls(no_split, dict(pin), opaque)


def unknown_module_remedy(path: str, modules: Iterable[str]) -> str:
    """Say what to write instead of a path that none of the model's modules has."""
    paths = [module for module in modules if module]
    if close := difflib.get_close_matches(path, paths, n=1):
        return f"did you mean {close[0]}?"
    return f"name each module by its whole path, such as {', '.join(paths[:3])}; patterns are not read"


def _paths(key: str, paths: object) -> tuple[str, ...]:
    if not isinstance(paths, (list, tuple)) or not all(isinstance(path, str) for path in paths):
        raise FieldError(f'HINTS["{key}"]', f'{paths!r:.80} is no list of module paths; write ["block1"]')
    return tuple(paths)


def _check_pin(path: object, stage: object) -> None:
    if not isinstance(path, str):
        raise FieldError('HINTS["pin"]', f"{path!r:.80} is no path of a module; write it as text")
    if not isinstance(stage, int) or isinstance(stage, bool) or abs(stage) >= MAX_WORKERS:
        where = f'HINTS["pin"][{path!r:.80}]'
        raise FieldError(where, f"{stage!r:.80} is no stage; write 0 for the first or -1 for the last")
