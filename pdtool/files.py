"""Read files within limits, and replace them atomically.

Files named by an artifact must be regular files of bounded size, because reading others might never end. A new file is
synced and renamed over the old one, so that a reader sees one of the two whole. `check_replaceable` protects files of
another sort from being overwritten. `open_in_place` follows no link out of a folder that may be a stranger's.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shlex
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from pdtool.errors import ArtifactError, PdtoolError, UsageError
from pdtool.units import format_bytes

MAX_FILE_BYTES = 256 * 10**6  # limit for artifacts and the source files that they name; a large artifact has a few MB
_OTHER_FOLDER = "remove it, or name another folder with -o"
_HEAD_BYTES = 4096  # first bytes of an artifact, which contain its format
_PART_BYTES = 2**20  # that are read at a time
PROCESS_REMEDY = "raise the limit on processes and threads: `ulimit -u 4096`, or pids.max of the container"
_FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk or quota


def read_text(path: Path | str, remedy: str = "", *, may_be_pipe: bool = False) -> str:
    """Read a UTF-8 file of at most MAX_FILE_BYTES (`-` is stdin), without a byte order mark; raises ArtifactError.

    Args:
        may_be_pipe: whether the user named it, as `<(...)` or /dev/stdin. Files named by an artifact must be regular,
            because reading others might never end.
    """
    try:
        if str(path) == "-":  # which a caller may have replaced by an object with text only
            content = bytearray(sys.stdin.read(MAX_FILE_BYTES + 1).encode())
        else:
            with _opened(Path(path), may_be_pipe) as file:
                content = bytearray()
                while len(content) <= MAX_FILE_BYTES and (part := file.read(_PART_BYTES)):
                    content += part
        if len(content) > MAX_FILE_BYTES:
            raise _too_large(path)
        return content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ArtifactError(path, f"cannot be read ({reason})", remedy) from error


def quoted(path: Path | str) -> str:
    """Return a path as an argument in a shell, which no command takes for an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def file_sha256(path: Path | str) -> str:
    """Return the SHA-256 of a regular file's bytes, in hex; raises ArtifactError for another or larger one."""
    with _opened(Path(path), may_be_pipe=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _opened(path: Path, may_be_pipe: bool) -> BufferedReader:
    """Open a file to read; raises ArtifactError for endless files, and for those above MAX_FILE_BYTES."""
    status = path.stat()
    is_file = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)  # open() says that it is a folder
    if not is_file and not (may_be_pipe and (stat.S_ISFIFO(status.st_mode) or str(path) == os.devnull)):
        raise ArtifactError(path, "cannot be read (it is not a regular file)")
    if status.st_size > MAX_FILE_BYTES:
        raise _too_large(path)
    return path.open("rb")


def _too_large(path: Path | str) -> ArtifactError:
    return ArtifactError(path, f"cannot be read (it is larger than {format_bytes(MAX_FILE_BYTES)})")


def check_replaceable(path: Path, what: str, is_what: Callable[[bytes], bool]) -> None:
    """Check that nothing but an earlier file of the same sort would be overwritten.

    Args:
        what: the sort, as `a plan`.
        is_what: whether a file with these first bytes is of that sort; an empty file may always be overwritten.

    Raises:
        UsageError: another file is there, or one that cannot be read.
    """
    try:
        if not path.is_file():
            return
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror}) and would be overwritten"
        raise UsageError(problem, "name another file") from error
    if head and not is_what(head):
        raise UsageError(f"{path} is not {what} and would be overwritten", "name another file")


def open_in_place(path: Path) -> BinaryIO:
    """Open a file to read and change it in place; make it if it does not exist.

    Raises:
        ArtifactError: it is a link, of either kind, a FIFO or a device, so that writes would go elsewhere.
    """
    check_no_link(path)  # before opening it, which alone can make a device act
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
    if os.fstat(file.fileno()).st_nlink > 1:
        file.close()
        raise ArtifactError(path, "is a hard link to another file", _OTHER_FOLDER)
    return file


def check_no_link(path: Path, *, is_folder: bool = False) -> None:
    """Check that a path is a regular file (or a folder), or does not exist; links are refused.

    Raises:
        ArtifactError: it is something else, which could redirect writes to another file.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(status.st_mode):
        what = "is a link, and links are not followed"
    elif not (stat.S_ISDIR if is_folder else stat.S_ISREG)(status.st_mode):
        what = f"is not a {'folder' if is_folder else 'regular file'}"
    else:
        return
    raise ArtifactError(path, what, _OTHER_FOLDER)


def check_folder_of(path: Path) -> None:
    """Check that a file could be written, as far as the permissions of its folder tell; raises PdtoolError."""
    if path.name == "-" or (path.exists() and not path.is_file()):
        return
    folder = next(folder for folder in path.resolve().parents if folder.exists())
    if not os.access(folder, os.W_OK):
        raise PdtoolError(f"{path} could not be written: nothing can be written to {folder}", "name another place")


def write_atomically(path: Path, text: str) -> None:
    """Write a text to a file with `replacing`."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside the target, and sync and rename it over the target at the end, so a full disk keeps the old
    file.

    It follows links, and writes to a pipe or a device instead of replacing it. A replaced file keeps its permissions.

    Raises:
        PdtoolError: the file could not be written; nothing is left behind.
    """
    try:
        target = path.resolve()
    except (RuntimeError, ValueError) as error:  # a loop of links, a NUL
        raise PdtoolError(f"{path} could not be written ({error})", "name another place") from error
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        if target.is_symlink():  # a loop of links, for which Python before 3.13 raises RuntimeError
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if path.exists() and not path.is_file() and not path.is_dir():
            with path.open("wb") as file:
                yield file
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            if target.is_file():
                shutil.copymode(target, temporary)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise PdtoolError(f"{path} could not be written ({error.strerror})", write_remedy(error)) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_remedy(error: OSError) -> str:
    """Return the remedy for a file that could not be written, or a process that could not be started."""
    if error.errno == errno.EAGAIN:
        return PROCESS_REMEDY
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the limit on open files, for example with `ulimit -n 4096`"
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of files: `ulimit -f unlimited`"
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"{error.filename} is a file where a folder should be: move it, or name another place"
    return "free some space or use another folder" if error.errno in _FULL else "name another place"
