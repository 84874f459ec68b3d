"""The base of all artifacts: format tag, digests, checked reading and atomic writing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from pdtool import __version__
from pdtool.errors import ArtifactError, FieldError, PdtoolError, UsageError


def _as_integer(value: object) -> object:
    """Read 1.6e10, as people write bytes, as the integer that it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, BeforeValidator(_as_integer), Field(ge=0)]
Count = Annotated[int, BeforeValidator(_as_integer), Field(ge=1)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# Node, module and parameter names: dotted words, so that none can carry code into a generated file.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*(@[0-9]+)?$", max_length=500)]
ModulePath = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*)?$", max_length=500)]
# What an artifact calls itself: it stands in the docstring of generated files, so nothing in it may end a string.
Title = Annotated[str, StringConstraints(pattern=r"""^[^\x00-\x1f"'\\/]*$""", max_length=500)]
_EXPONENTIAL = r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"
Label = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f]*$", max_length=500)]
OPERATOR_GRAPH = "operator graph"  # in Artifact.digests, among paths: the model as it was traced


class FrozenModel(BaseModel):
    """Base of all parts of artifacts: frozen, without unknown fields, without silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


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

    def __str__(self) -> str:
        settings = "".join(f" --set {key}={value}" for key, value in self.settings.items())
        return f"{self.source}:{self.function}{settings}"


class Artifact(FrozenModel):
    """Base of all kinds of artifacts.

    Attributes:
        MAKER: the command that writes this kind.
        format: `pdtool/KIND/1`; set by each kind.
        tool_version: the pdtool that wrote it.
        digests: SHA-256 of every input it was made from, by path, and of the model's operator graph under
            OPERATOR_GRAPH. What is made from an artifact takes its digests over.
        sha256: of the artifact itself, in its file only, to detect alterations; plans and clusters, which people
            edit, have none.
    """

    KIND: ClassVar[str]
    MAKER: ClassVar[str]
    SEALED: ClassVar[bool] = True

    format: str
    tool_version: str = __version__
    digests: dict[str, Digest] = Field(default_factory=dict)
    sha256: Digest | None = None

    def dump(self) -> str:
        """Write the artifact as JSON, or as YAML if people edit its kind; equal content gives equal bytes."""
        content = self.model_dump(mode="json", exclude={"sha256"})
        if self.SEALED:
            content["sha256"] = _seal(content)
        return self._encode(content)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read and check a file (`-` is stdin).

        Raises:
            ArtifactError: missing, truncated, altered, of another format, or with fields out of range.
        """
        text = read_text(path, f"write it with `{cls.MAKER}`")
        return cls.parse(text, "stdin" if str(path) == "-" else path)

    @classmethod
    def parse(cls, text: str, path: Path | str = "<text>") -> Self:
        """Check a text that was read already; `path` is named in errors."""
        content = cls._decode(text, path)
        tag = content.get("format") if isinstance(content, dict) else None
        expected = f"pdtool/{cls.KIND}/1"
        if not tag:
            raise ArtifactError(path, f"is not a {cls.KIND} (no format field)", f"write it with `{cls.MAKER}`")
        if tag != expected:
            raise cls._rewritable(path, f"has format {tag!r}, this pdtool reads {expected!r}", field="format")
        if cls.SEALED and content.pop("sha256", None) != _seal(content):
            raise cls._rewritable(path, "was altered or damaged after it was written", field="sha256")
        try:
            artifact = cls.model_validate_json(json.dumps(content))
            artifact.check()
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise ArtifactError(path, f"{first['msg']} (got {repr(first.get('input'))[:80]})", field=field) from error
        except FieldError as fault:
            raise ArtifactError(path, str(fault), field=fault.field) from fault
        return artifact

    def check(self) -> None:
        """Check what field types cannot express; raises FieldError."""

    def save(self, path: Path | str) -> None:
        """Write atomically (`-` is stdout): a reader sees the old file or the new one, never half of one."""
        if str(path) == "-":
            sys.stdout.write(self.dump())
        else:
            write_atomically(Path(path), self.dump())

    @property
    def content_sha256(self) -> str:
        """Digest of the content, as other artifacts record it.

        Neither fields with their default value nor the version of pdtool change it: what an earlier one wrote holds.
        """
        return _seal(self.model_dump(mode="json", exclude={"sha256", "tool_version"}, exclude_defaults=True))

    @property
    def graph_sha256(self) -> str | None:
        """Digest of the operator graph that it was made for (frontend/graph_digest.py); None where none was recorded:
        then the model's file must have the bytes that it had."""
        return self.digests.get(OPERATOR_GRAPH)

    def with_graph(self, sha256: str | None) -> Self:
        """Record the digest of the operator graph that it was made for; None leaves the artifact as it is."""
        digests = {**self.digests, OPERATOR_GRAPH: sha256} if sha256 else self.digests
        return self.model_copy(update={"digests": digests})

    @classmethod
    def _encode(cls, content: dict[str, Any]) -> str:
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def _decode(cls, text: str, path: Path | str) -> Any:
        try:
            return _json_compatible(json.loads(text, parse_constant=_refuse_constant))
        except (ValueError, RecursionError) as error:
            raise cls._rewritable(path, f"is not whole JSON ({error})") from error

    @classmethod
    def _rewritable(cls, path: Path | str, what: str, *, or_else: str = "", field: str = "") -> ArtifactError:
        """Make the error of a file that its command can write again."""
        return ArtifactError(path, what, f"write it again with `{cls.MAKER}`{or_else}", field=field)


class YamlArtifact(Artifact):
    """Base of artifacts kept as YAML, which is read with the safe loader only; their JSON is read, too."""

    @classmethod
    def _encode(cls, content: dict[str, Any]) -> str:
        return yaml.dump(
            content,
            None,
            _Dumper,
            sort_keys=False,
            allow_unicode=True,
            width=120,
            default_flow_style=None,
            explicit_end=True,
        )

    @classmethod
    def _decode(cls, text: str, path: Path | str) -> Any:
        if text.startswith("{"):  # what --json printed
            return super()._decode(text, path)
        try:
            content = _json_compatible(yaml.load(text, Loader=_StrictLoader))
        except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
            raise cls._rewritable(path, f"is not whole YAML ({' '.join(str(error).split())})") from error
        if isinstance(content, dict) and not text.rstrip().endswith("\n..."):  # cut off at a line, YAML is whole again
            raise cls._rewritable(path, "is cut off: its last line is not `...`", or_else=", or add that line")
        return content


class _Dumper(yaml.SafeDumper):
    """A SafeDumper that quotes texts which `_StrictLoader` would read as a number."""


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that refuses aliases (no billion laughs) and repeated keys, and reads 1e9 as a number.

    So does YAML 1.2; to PyYAML, which reads YAML 1.1, only 1.0e+9 is a number.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not used in artifacts")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"key {key!r} stands twice (line {node.start_mark.line + 1})")
        return super().construct_mapping(node, deep)


def _exponential(loader: _StrictLoader, node: yaml.ScalarNode) -> float:
    return float(node.value)


for _class in (_Dumper, _StrictLoader):
    _class.add_implicit_resolver("!exponential", re.compile(_EXPONENTIAL), list("+-.0123456789"))
_StrictLoader.add_constructor("!exponential", _exponential)


def _json_compatible(content: Any) -> Any:
    """Refuse values that JSON cannot hold (dates, sets, NaN, 1e999, half a character): pdtool never writes them."""
    json.dumps(content, sort_keys=True, allow_nan=False, ensure_ascii=False).encode()
    return content


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _seal(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def title(text: str) -> str:
    """Return the text if it can be the name of an artifact; raises UsageError otherwise."""
    try:
        return TypeAdapter[str](Title).validate_python(text)
    except ValidationError:
        what = f"name {text!r} holds a quote, a slash or a control character"
        raise UsageError(what, "give another with --name") from None


def read_text(path: Path | str, remedy: str = "") -> str:
    """Read a UTF-8 file (`-` is stdin); raises ArtifactError with the remedy when it cannot be read."""
    try:
        return sys.stdin.read() if str(path) == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ArtifactError(path, f"cannot be read ({reason})", remedy) from error


def file_sha256(path: Path | str) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write a text to a file in the way of `replacing`."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside the target that is synced and renamed over it at the end: a full disk keeps the old file.

    A link is followed; a pipe or a device is written to, not replaced.

    Raises:
        PdtoolError: the file could not be written; nothing is left behind.
    """
    temporary = None
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            with path.open("wb") as file:
                yield file
            return
        target = path.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        remedy = "free some space or name another place"
        raise PdtoolError(f"{path} could not be written ({error.strerror})", remedy) from error
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
