"""The base of all artifacts, the files that the parts of pdtool exchange.

It hides the format tag and its versions, the seal that shows whether a file was altered, the digests of an artifact's
inputs, and the strict reading of JSON and YAML. Its errors name the file, the field, and the command that writes it
again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from pdtool import __version__
from pdtool.artifacts.fields import Digest, Label, Title, first_fault
from pdtool.artifacts.text_formats import FormatError, read_json, read_yaml, write_json, write_yaml
from pdtool.errors import ArtifactError, FieldError, PdtoolError, UsageError, with_article
from pdtool.files import check_replaceable, read_text, write_atomically

_DECLARED = re.compile(r"""^\W{0,4}format["']?:\s*["']?pdtool/([a-z]+)/""", re.MULTILINE)
_ENDS = re.compile(r"[\n\r]\.\.\.[ \t\r]*(#.*)?(\n[ \t\r]*(#.*)?)*\Z")  # comments may follow
_IDENTIFY = ("name", "plan", "config", "schedule", "epoch", "batch_size")  # those that an artifact has
_LOG = logging.getLogger(__name__)
OPERATOR_GRAPH = "operator graph"  # in Artifact.digests, among paths: the model as it was traced


class FrozenModel(BaseModel):
    """Base of all parts of artifacts: frozen, without unknown fields, without silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


# The same for a dataclass that others compute with: it is checked only as a part of an artifact.
STRICT = ConfigDict(extra="forbid", strict=True, revalidate_instances="always")


class ModelRef(FrozenModel):
    """Where the user's model comes from.

    Attributes:
        source: `model.py` (a path, relative to where pdtool runs) or `package.module`.
        function: name of the function in it that builds the model.
        settings: its keyword arguments.
    """

    source: Label
    function: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = "model"
    settings: dict[str, str | int | float | bool] = Field(default_factory=dict)

    @property
    def typed_settings(self) -> dict[str, tuple[type, str | int | float | bool]]:
        """The settings with their types. Python finds 1, 1.0 and True equal, but a model may not."""
        return {name: (type(value), value) for name, value in self.settings.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelRef) and super().__eq__(other) and self.typed_settings == other.typed_settings

    def __str__(self) -> str:
        settings = "".join(f" --set {key}={value}" for key, value in self.settings.items())
        return f"{self.source}:{self.function}{settings}"


class Artifact(FrozenModel):
    """Base of all kinds of artifacts.

    Attributes:
        MAKER: the command that writes this kind.
        VERSION: version of this kind's format.
        format: `pdtool/KIND/VERSION`.
        tool_version: the pdtool that wrote it.
        digests: SHA-256 of every input, by path, and of the model's operator graph under OPERATOR_GRAPH. An artifact
            made from this one copies its digests.
        sha256: digest of the artifact itself, only in its file, to detect alterations; plans and clusters, which people
            edit, have none.
    """

    KIND: ClassVar[str]
    MAKER: ClassVar[str]
    SEALED: ClassVar[bool] = True
    VERSION: ClassVar[int] = 1
    _encode = staticmethod(write_json)

    format: str = ""
    tool_version: str = __version__
    digests: dict[str, Digest] = Field(default_factory=dict)
    sha256: Digest | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "KIND"):  # pydantic reads both afterwards
            cls.format = cls._tag(cls.VERSION)
            cls.__annotations__["format"] = Literal[cls.format]

    def __repr__(self) -> str:
        """Name the artifact in one line; `pdtool.show` and notebooks show the rest."""
        named = {key: getattr(self, key, None) for key in _IDENTIFY}
        fields = (f"{key}={value!r}" for key, value in named.items() if value is not None)
        return f"{type(self).__name__}({', '.join(fields)})"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Return the output of `pdtool show`, for notebooks."""
        from pdtool import as_html  # only the package itself may know how to show artifacts

        return as_html(self)

    def dump(self) -> str:
        """Write the artifact as JSON, or as YAML if people edit its kind; equal content gives equal bytes."""
        content = self.model_dump(mode="json", exclude={"sha256"})
        if self.SEALED:
            content["sha256"] = _seal(content)
        return self._encode(content)

    @classmethod
    def load(cls, path: Path | str, *, may_be_pipe: bool = False) -> Self:
        """Read and check a file (`-` is stdin).

        Args:
            may_be_pipe: whether the user named it, and not an artifact.

        Raises:
            ArtifactError: it is missing, truncated, altered, of another format, or has fields out of range.
        """
        if os.path.isdir(path):
            inside = os.path.join(path, f"{cls.KIND}.yaml")  # of a run or a bundle
            remedy = f"name {inside}" if os.path.isfile(inside) else f"name a file written by `{cls.MAKER}`"
            raise ArtifactError(path, f"is a folder, not {with_article(cls.KIND)}", remedy)
        text = read_text(path, f"write it with `{cls.MAKER}`", may_be_pipe=may_be_pipe)
        return cls.parse(text, "stdin" if str(path) == "-" else path)

    @classmethod
    def parse(cls, text: str, path: Path | str = "<text>") -> Self:
        """Check a text that was read already; `path` is named in errors."""
        if other := cls._of_another_kind(text, path):
            raise other
        try:
            content = cls._decode(text, path)
        except FieldError as fault:
            raise ArtifactError(path, str(fault), field=fault.field) from fault
        tag = content.get("format") if isinstance(content, dict) else None
        version = next((n for n in range(1, cls.VERSION + 1) if cls._tag(n) == tag), None)
        if not tag:
            what = f"is not {with_article(cls.KIND)} (no format field)"
            raise ArtifactError(path, what, f"write it with `{cls.MAKER}`")
        if version is None:
            what = f"has format {tag!r:.80}, but this pdtool reads {cls._tag(cls.VERSION)!r}"
            raise cls._rewritable(path, what, field="format")
        if cls.SEALED and content.pop("sha256", None) != _seal(content):
            raise cls._rewritable(path, "was altered or damaged after it was written", field="sha256")
        content = cls.upgraded(content, version) | {"format": cls._tag(cls.VERSION)}
        artifact = cls._checked(lambda: cls.model_validate_json(json.dumps(content)), path)
        _LOG.debug("read %s, a %s that pdtool %s wrote", path, cls.KIND, artifact.tool_version)
        return artifact

    def check_again(self, path: Path | str) -> None:
        """Check changes by model_copy(), as if the artifact were read from `path`; raises ArtifactError."""
        cached = {name for name in vars(self) if isinstance(getattr(type(self), name, None), cached_property)}
        content = {name: value for name, value in vars(self).items() if name not in cached | self.__class_vars__}
        self._checked(lambda: self.model_validate(content), path)

    @classmethod
    def _checked(cls, make: Callable[[], Self], path: Path | str) -> Self:
        try:
            artifact = make()
            artifact.check()
        except ValidationError as error:
            field, what = first_fault(error, cls)
            raise ArtifactError(path, what, field=field) from error
        except FieldError as fault:
            raise ArtifactError(path, str(fault), field=fault.field) from fault
        return artifact

    @classmethod
    def upgraded(cls, content: dict[str, Any], version: int) -> dict[str, Any]:
        """Convert the content of a file of some version to today's fields.

        An earlier pdtool may have written different fields, under an earlier version or this one.
        """
        return content

    def check(self) -> None:
        """Check what field types cannot express; raises FieldError."""

    def save(self, path: Path | str) -> None:
        """Write atomically (`-` is stdout): a reader sees the old file or the new one, never half of one.

        Raises:
            UsageError: a file that is not an artifact of this kind is there.
            PdtoolError: the file could not be written.
        """
        if str(path) == "-":
            sys.stdout.write(self.dump())
        else:
            self.check_target(Path(path))
            write_atomically(Path(path), self.dump())

    @classmethod
    def check_target(cls, path: Path) -> None:
        """Check that only an artifact of this kind would be overwritten; raises UsageError.

        An unreadable file passes, because its folder alone decides whether it can be replaced.
        """
        if path.name != "-":
            check_replaceable(path, with_article(cls.KIND), lambda head: f"pdtool/{cls.KIND}/".encode() in head)

    @property
    def content_sha256(self) -> str:
        """Digest of the content, which other artifacts record.

        Default values and the version of pdtool do not change it, so digests of earlier versions stay valid.
        """
        return _seal(self.model_dump(mode="json", exclude={"sha256", "tool_version"}, exclude_defaults=True))

    @property
    def graph_sha256(self) -> str | None:
        """Digest of the operator graph that it was made for (frontend/graph_digest.py). None if none was recorded; then
        the model's file must be unchanged, byte for byte."""
        return self.digests.get(OPERATOR_GRAPH)

    def with_graph(self, sha256: str | None) -> Self:
        """Record the digest of the operator graph that it was made for; None changes nothing."""
        digests = {**self.digests, OPERATOR_GRAPH: sha256} if sha256 else self.digests
        return self.model_copy(update={"digests": digests})

    @classmethod
    def _tag(cls, version: int) -> str:
        return f"pdtool/{cls.KIND}/{version}"

    @classmethod
    def _decode(cls, text: str, path: Path | str) -> Any:
        try:
            return read_json(text)
        except FormatError as error:
            raise cls._rewritable(path, f"is not valid JSON ({error})") from error

    @classmethod
    def _of_another_kind(cls, text: str, path: Path | str) -> ArtifactError | None:
        """Make the error of a file that is an artifact of another kind, or Python; None for any other file."""
        kind = declared_kind(text)
        if kind in ("", cls.KIND) and not str(path).endswith(".py"):
            return None
        found = "Python file" if kind in ("", cls.KIND) else kind
        own = with_article(cls.KIND)
        return ArtifactError(path, f"is {with_article(found)}, not {own}", f"name {own}, written by `{cls.MAKER}`")

    @classmethod
    def _rewritable(cls, path: Path | str, what: str, *, or_else: str = "", field: str = "") -> ArtifactError:
        """Make the error of a file that its command can write again."""
        return ArtifactError(path, what, f"write it again with `{cls.MAKER}`{or_else}", field=field)


class YamlArtifact(Artifact):
    """Base of artifacts kept as YAML, read only with the safe loader; they can also be read as JSON."""

    _encode = staticmethod(write_yaml)

    @classmethod
    def _decode(cls, text: str, path: Path | str) -> Any:
        if text.startswith("{"):  # what --json printed
            return super()._decode(text, path)
        try:
            content = read_yaml(text)
        except FormatError as error:
            raise cls._rewritable(path, f"is not valid YAML ({error})", or_else=", or fix it there") from error
        if isinstance(content, dict) and not _ENDS.search(text):  # cut off at a line, YAML is whole again
            raise cls._rewritable(path, "is cut off: its last line is not `...`", or_else=", or add that line")
        return content


def _seal(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def declared_kind(text: str) -> str:
    """Return the kind that the text of an artifact declares, as `plan`, without reading the rest; "" for none."""
    declared = _DECLARED.search(text)
    return declared[1] if declared else ""


@contextmanager
def fields_checked(error_of: Callable[[str], PdtoolError]) -> Iterator[None]:
    """Raise the error from `error_of("field: what is wrong")` if the body makes an unreadable artifact."""
    try:
        yield
    except ValidationError as error:
        field, what = first_fault(error)
        raise error_of(f"{field}: {what}") from error


def title(text: str) -> str:
    """Return the text if it can be the name of an artifact; raises UsageError otherwise."""
    try:
        return TypeAdapter[str](Title).validate_python(text)
    except ValidationError:
        what = f"name {text!r} holds a quote, a slash or a control character"
        raise UsageError(what, "pass another with --name") from None
