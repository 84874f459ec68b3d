"""Files that an artifact names are regular and of a size that can be read; the user may name a pipe."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from pathlib import Path

import pytest
import samples
from conftest import NET

from pdtool import files
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.errors import ArtifactError
from pdtool.files import file_sha256, read_text


@pytest.mark.parametrize("profile", ["/dev/zero", "fifo", "/dev/tty", "huge"])
def test_a_plan_that_names_no_regular_file_is_refused_at_once(profile, folder):
    """Today: 2.7 GB for /dev/zero, and for ever for a FIFO."""
    os.mkfifo("fifo")
    with open("huge", "wb") as file:
        file.truncate(10**12)
    samples.plan().model_copy(update={"profile": profile}).save("plan.yaml")
    for command in (["check"], ["simulate"], ["codegen"], ["show", "--graph"], ["check", "--fresh"]):
        result = folder.pdtool(command[0], "plan.yaml", *command[1:], code=3)
        assert profile in result.stderr
        assert "not a regular file" in result.stderr or "larger than 256 MB" in result.stderr


@pytest.mark.parametrize("source", ["/dev/zero", "fifo.py", "huge.py"])
def test_a_model_that_is_no_regular_file_is_refused_at_once(source, folder):
    os.mkfifo("fifo.py")
    with open("huge.py", "wb") as file:
        file.truncate(10**12)
    model = samples.MODEL.model_copy(update={"source": source})
    profile = samples.profile().model_copy(update={"model": model, "digests": {source: "0" * 64}})
    profile.save("net.json")
    folder.pdtool("partition", "net.json", "--topology", "2", "-o", "plan.yaml")
    assert source in folder.pdtool("codegen", "plan.yaml", code=3).stderr


def test_stage_files_of_a_bundle_are_regular_files(tmp_path):
    os.mkfifo(tmp_path / "stage_0.py")
    with pytest.raises(ArtifactError, match=r"stage_0\.py: is missing"):
        samples.bundle().check_files(tmp_path)


def test_the_user_may_name_a_pipe(folder):
    """As in `pdtool show <(zcat plan.yaml.gz)`."""
    os.mkfifo("pipe")
    writer = threading.Thread(target=lambda: folder.write("pipe", samples.plan().dump()))
    writer.start()
    assert "net-2x2" in folder.pdtool("show", "pipe").output
    writer.join()


def test_what_comes_through_a_pipe_has_a_limit(folder, monkeypatch):
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1000)
    os.mkfifo("pipe")

    def write():
        with contextlib.suppress(BrokenPipeError):
            folder.write("pipe", samples.profile().dump())

    writer = threading.Thread(target=write)
    writer.start()
    with pytest.raises(ArtifactError, match=r"pipe: cannot be read \(it is larger than 1 kB\)"):
        Profile.load("pipe", may_be_pipe=True)
    writer.join()
    monkeypatch.setattr("sys.stdin", io.StringIO(samples.profile().dump()))
    with pytest.raises(ArtifactError, match="larger than 1 kB"):
        Profile.load("-")


def test_a_device_is_no_artifact():
    with pytest.raises(ArtifactError, match="not a regular file"):
        read_text("/dev/zero", may_be_pipe=True)
    with pytest.raises(ArtifactError, match="not a regular file"):
        file_sha256("/dev/zero")


def test_a_large_file_is_refused_unread(tmp_path):
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(ArtifactError, match=r"huge: cannot be read \(it is larger than 256 MB\)"):
        Plan.load(tmp_path / "huge")
    with pytest.raises(ArtifactError, match="larger than 256 MB"):
        file_sha256(tmp_path / "huge")


@pytest.mark.parametrize("path", ["x" * 5000, "", ".", "a/" * 3000, "\udcff", "net.json/x"])
def test_paths_that_no_file_can_have_are_refused(path, folder):
    samples.profile().save("net.json")
    with pytest.raises(ArtifactError, match=r"cannot be read|is a folder"):
        Profile.load(path)


def test_only_a_full_disk_wants_space_freed(folder):
    folder.write("file", "")
    samples.plan().save("plan.yaml")
    samples.profile().save("net.json")
    result = folder.pdtool("partition", "net.json", "--topology", "2", "-o", "file/plan.yaml", code=1)
    place = Path("file").absolute()
    remedy = f"{place} is a file where a folder should be: move it, or name another place"
    assert result.stderr.endswith(f"could not be written (File exists); {remedy}\n")
    assert "free some space" not in result.stderr
    folder.write("model.py", NET)
    folder.write("profiles", "")
    stderr = folder.pdtool("train", "model.py", "--topology", "2", code=1).stderr
    assert "error: profiles/ could not be made (File exists); profiles is a file where a folder should be" in stderr


@pytest.mark.parametrize("output", ["plans", "plans/", "plans/new/"])
def test_a_folder_is_not_taken_for_the_file_to_write(folder, output):
    """`plans/` became a file `plans`, in which no plan had a place any more."""
    samples.profile().save("net.json")
    Path("plans").mkdir()
    result = folder.pdtool("partition", "net.json", "--topology", "2", "-o", output, code=2)
    assert f"-o {output} is a folder; name a file in it" in result.stderr
    assert [*Path("plans").iterdir()] == []
