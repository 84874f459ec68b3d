"""What is made with other options has a name of its own, and who makes files in a folder is alone there."""

from __future__ import annotations

import threading
from pathlib import Path

from pdtool.api.reuse import one_at_a_time, own_path
from pdtool.artifacts.profile import Profile


def test_each_set_of_options_has_a_file_of_its_own_which_it_finds_again(tmp_path: Path) -> None:
    taken = tmp_path / "model.json"
    taken.write_text((Path(__file__).parents[2] / "profiles" / "mnist.json").read_text())

    def path_for(*options: object) -> str:
        path, why = own_path(str(taken), Profile, lambda _: "it was made with other options", *options)
        assert why == f"keeping {taken}: it was made with other options"
        return path

    asked = [({"batch_size": size}, cluster) for size in (1, 2) for cluster in ("2", "4")]
    paths = [path_for(*options) for options in asked]
    assert len({*paths, str(taken)}) == len(asked) + 1
    assert paths == [path_for(*options) for options in asked]
    assert own_path(str(taken), Profile, lambda _: "", 1) == (str(taken), "")


def test_one_at_a_time_makes_files_in_a_folder(tmp_path: Path) -> None:
    done: list[str] = []

    def second() -> None:
        with one_at_a_time(tmp_path):
            done.append("second")

    with one_at_a_time(tmp_path):
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        done.append("first")
    waiting.join(30)
    assert done == ["first", "second"]
