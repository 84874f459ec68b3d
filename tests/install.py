"""Install packages into the environment of this Python: by uv, in seconds, where it is or can be had; else by pip.

    .venv/bin/python tests/install.py torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu

uv takes the same arguments, and is told what pip's configuration says of indexes and constraints.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
# A setting of pip -> uv's variable for it, and what stands between several values there.
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "cert": ("SSL_CERT_FILE", " "),
}


def main() -> None:
    """Install what the arguments say; the exit code is that of the installer."""
    requirements = sys.argv[1:]
    if uv := find_uv():
        command = [uv, "pip", "install", "--quiet", "--index-strategy", "unsafe-best-match", "--python", sys.executable]
        if not subprocess.run([*command, *requirements], env=os.environ | variables(), check=False).returncode:
            return
        sys.stderr.write("uv could not install that; pip tries\n")
    sys.exit(subprocess.run([*PIP, "install", "--quiet", *requirements], check=False).returncode)


def find_uv() -> str | None:
    """Return the path of uv, which is installed from the index if it is not there; None where that has none."""
    own = Path(sys.executable).parent / "uv"
    if not (found := shutil.which("uv")) and not own.exists():
        subprocess.run([*PIP, "install", "--quiet", "uv"], stderr=subprocess.DEVNULL, check=False)
    return found or (str(own) if own.exists() else None)


def variables() -> dict[str, str]:
    """Return the variables that tell uv what pip's configuration says, without those that are set already."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False).stdout
    settings = (line.partition("=") for line in listed.splitlines())
    values = {name.rpartition(".")[2]: ast.literal_eval(value).split() for name, _, value in settings if value}
    told = {variable: between.join(values[name]) for name, (variable, between) in VARIABLES.items() if name in values}
    return {variable: value for variable, value in told.items() if variable not in os.environ}


if __name__ == "__main__":
    main()
