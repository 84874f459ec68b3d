"""Network namespaces that live no longer than the processes in them, and iproute2's commands.

No namespace gets a name, and nothing is made in the network of the machine: what a process makes in a namespace of its
own, the kernel removes with that process, however it ends.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from pdtool.errors import PdtoolError

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # unshare(2)
_TIMEOUT_S = 60.0
INSTEAD = "without, `pdtool simulate` computes the same on a simulated clock"


def enter_own_network() -> None:
    """Leave the network of the machine: from here on this process and its children have interfaces of their own.

    Without root a user namespace is entered besides, where the kernel allows it and the process has one thread.

    Raises:
        PdtoolError: the system is not Linux, or allows neither.
    """
    if sys.platform != "linux":
        raise PdtoolError(f"a pretend cluster needs Linux, this is {sys.platform}", INSTEAD)
    user, group = os.geteuid(), os.getegid()
    if not _unshare(_CLONE_NEWNET):
        return
    error = _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    if error:
        raise _not_allowed(os.strerror(error))
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path(f"/proc/self/{name}").write_text(text, encoding="utf-8")
    except OSError as failure:
        raise _not_allowed(f"{failure.strerror}: {failure.filename}") from failure


def _not_allowed(reason: str) -> PdtoolError:
    what = f"a pretend cluster needs network namespaces, which this process may not make ({reason})"
    return PdtoolError(what, f"start it as root, in a container with CAP_SYS_ADMIN; {INSTEAD}")


def _unshare(flags: int) -> int:
    """Return 0, or the error's number."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        return errno.ENOSYS
    return ctypes.get_errno() if libc.unshare(flags) else 0


def check_tools() -> None:
    """Check that iproute2 is installed; raises PdtoolError."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        what = f"a pretend cluster needs {' and '.join(missing)} of iproute2, which PATH does not hold"
        raise PdtoolError(what, f"install iproute2; {INSTEAD}")


def configure(tool: str, commands: Iterable[str]) -> None:
    """Run commands of `ip` or `tc`, such as `link set lo up`, in the namespace of this process.

    Raises:
        PdtoolError: one of them failed, or they did not end.
    """
    lines = "".join(f"{command}\n" for command in commands)
    if not lines:
        return
    try:
        ended = subprocess.run(
            [tool, "-batch", "-"], input=lines, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise PdtoolError(f"`{tool} -batch` did not end within {_TIMEOUT_S:g} s", "see what holds it up") from error
    if ended.returncode:
        said = " ".join(ended.stderr.split())
        needs = "the kernel module sch_tbf" if tool == "tc" else "the kernel modules veth and bridge"
        raise PdtoolError(f"`{tool}` could not set up the links ({said})", f"it needs {needs}; {INSTEAD}")
