"""What the command line says of itself: help in sections, `help`, -q and -v, devices, project defaults."""

from __future__ import annotations

import json
import logging
import os

import click
import pytest
import samples

from pdtool.artifacts.device import Devices
from pdtool.artifacts.plan import Plan
from pdtool.cli.commands.app import main
from pdtool.options.declaration import SECTIONS


@pytest.fixture
def profiled(folder):
    """profiles/net.json of samples."""
    samples.profile().save("profiles/net.json")
    yield folder
    logging.getLogger("pdtool").handlers.clear()


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["profile", "partition", "run", "emulate", "train"])
def test_many_options_stand_in_sections_each_once(folder, name):
    text = folder.pdtool(name, "--help").output
    sections = [line.rstrip(":") for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert sections[-1] == "Output"
    assert "Options" not in sections
    for option in main.commands[name].params:
        if isinstance(option, click.Option):
            assert option.section in SECTIONS, option.name
            rows = [line for line in text.splitlines() if line.lstrip().startswith(", ".join(option.opts))]
            assert len(rows) >= 1, option.opts


def test_help_is_the_help_of_a_command(folder):
    assert folder.pdtool("help", "partition").output == folder.pdtool("partition", "--help").output
    assert folder.pdtool("help").output == folder.pdtool("--help").output
    assert "did you mean partition?" in folder.pdtool("help", "partitoin", code=2).stderr


def test_version_has_a_short_name(folder):
    assert folder.pdtool("-V").output == folder.pdtool("--version").output


# --- -q and -v --------------------------------------------------------------------------------------------------------


def test_quiet_shows_nothing_of_what_is_written_to_a_file_that_was_named(profiled):
    assert profiled.pdtool("-q", "partition", "--topology", "2", "-o", "named.yaml").stderr == ""
    assert (profiled.path / "named.yaml").exists()


@pytest.mark.parametrize("arguments", [["-q", "partition", "--topology", "2"], ["partition", "--topology", "2", "-q"]])
def test_quiet_prints_results_and_errors_only(profiled, arguments):
    stderr = profiled.pdtool(*arguments).stderr
    assert "wrote" not in stderr
    assert "assuming" not in stderr
    assert "net-2: " in stderr
    assert "wrote plans/net-2.yaml" in profiled.pdtool("partition", "--topology", "2").stderr, (
        "only where it is asked for"
    )
    assert "error: topology" in profiled.pdtool("-q", "partition", "--topology", "x", code=2).stderr


def test_verbose_says_what_is_read_and_searched_and_where_an_error_comes_from(profiled):
    stderr = profiled.pdtool("partition", "--topology", "2", "-v").stderr
    assert "read profiles/net.json, a profile that pdtool" in stderr
    assert "by the formulas" in stderr
    stderr = profiled.pdtool("-v", "partition", "--topology", "x", code=2).stderr
    assert stderr.startswith("Traceback")
    assert "\nerror: topology" in stderr
    assert "Traceback" not in profiled.pdtool("partition", "--topology", "x", code=2).stderr


# --- devices ----------------------------------------------------------------------------------------------------------


def test_devices_lists_the_table_from_anywhere(folder):
    text = folder.pdtool("devices").stdout
    for word in ("v100", "NVIDIA H100 SXM 80 GB", "bf16 989.5", "3.35 TB/s", "80 GB", "source: NVIDIA V100"):
        assert word in text
    table = json.loads(folder.pdtool("devices", "--json").stdout)
    assert table["devices"]["t4"]["memory_bytes"] == 16_000_000_000
    one = Devices.parse(folder.pdtool("devices", "h100", "--json").stdout)
    assert list(one.devices) == ["h100"]
    assert "is not known; measure on cpu or cuda" in folder.pdtool("devices", "abacus", code=2).stderr


def test_devices_lists_a_users_own_file(folder):
    folder.write("lab.yaml", folder.pdtool("devices", "t4", "--json").stdout)
    assert "NVIDIA T4" in folder.pdtool("devices", "lab.yaml").stdout


# --- a project's defaults ---------------------------------------------------------------------------------------------


def plan_of(folder, *arguments):
    folder.pdtool(*arguments, "partition", "-o", "out.yaml")
    return Plan.load("out.yaml")


@pytest.mark.parametrize(("file", "table"), [("pdtool.toml", "partition"), ("pyproject.toml", "tool.pdtool.partition")])
def test_a_projects_defaults_hold_unless_the_command_line_says_otherwise(profiled, file, table):
    text = 'topology = "2x2"\nbandwidth = "8Gbit/s,8GB/s"\nrecompute = false\nreplicas = "3-1"\n'
    profiled.write(file, f"[{table}]\n{text}")
    plan = plan_of(profiled)
    assert plan.config == "3-1"
    assert [(level.size, level.bandwidth_bytes_per_s) for level in plan.cluster.levels] == [(2, 1e9), (2, 8e9)]
    profiled.pdtool("partition", "--topology", "4", "--bandwidth", "1GB/s", "-o", "out.yaml")
    assert Plan.load("out.yaml").cluster.topology == "4"
    assert "default: 8Gbit/s,8GB/s" in " ".join(profiled.pdtool("partition", "--help").stdout.split())


def test_a_file_of_defaults_can_be_named(profiled):
    profiled.write("pdtool.toml", "[partition]\ntopology = 3\n")
    profiled.write("other.toml", '[partition]\ntopology = "2x2"\n')
    assert plan_of(profiled, "--config", "other.toml").cluster.topology == "2x2"
    assert plan_of(profiled).cluster.topology == "3"


@pytest.mark.parametrize(
    "text", ['[tool . pdtool . partition]\ntopology = "3"\n', '[tool]\npdtool = {partition = {topology = "3"}}\n']
)
def test_the_table_may_be_written_in_any_way(profiled, text):
    profiled.write("pyproject.toml", text)
    assert plan_of(profiled).cluster.topology == "3"


def test_a_pyproject_of_others_gives_no_defaults(profiled):
    for text in ("[tool.ruff]\nline-length = 100\n", "tool = 3  # not tool.pdtool", "[project]\nname = 'tool.pdtool'"):
        profiled.write("pyproject.toml", text)
        assert "no cluster is given" in profiled.pdtool("partition", code=2).stderr
    refused = profiled.pdtool("--config", "pyproject.toml", "partition", code=3).stderr
    assert "pyproject.toml: has no [tool.pdtool]; add it, or name another file with --config" in refused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[partition]\nbandwith = '1GB/s'", "partition.bandwith: there is no such option; did you mean bandwidth?"),
        ("[partitoin]\ntopology = 2", "partitoin: there is no such command; did you mean partition?"),
        ("[partition]\nstraight = 1", "partition.straight: is 1; write true or false"),
        ("[partition]\ntopology = true", "partition.topology: is True; write a string or a number"),
        ("[partition]\ntopology = []", "partition.topology: is []; write a string or a number"),
        ("[run]\nhelp = true", "run.help: there is no such option; choose from nnodes, node-rank, epochs, "),
        ("[run]\ntrust = true", "run.trust: is for the command line only; leave it out here"),
        ("[check]\nupdate = true", "check.update: is for the command line only"),
        ("[export]\noutput = '/etc/passwd'", "export.output: is for the command line only"),
        ("partition = 3", "partition: is 3, not a table of options; write a line [partition]"),
        ("[partition", "is not TOML"),
        ("a = " + "[" * 100_000, "is not TOML"),
    ],
)
def test_what_defaults_cannot_mean_is_refused_with_a_suggestion(profiled, text, words):
    profiled.write("pdtool.toml", text)
    stderr = profiled.pdtool("partition", "--topology", "2", code=3).stderr
    assert words in stderr
    assert "pdtool.toml" in stderr
    assert "cannot be read" in profiled.pdtool("--config", "nowhere.toml", "devices", code=3).stderr
    profiled.pdtool("--config", os.devnull, "devices")


def test_a_refused_command_line_names_the_options_that_the_file_gave(profiled):
    profiled.write("pdtool.toml", "[partition]\nbandwidth = 10\n")
    stderr = profiled.pdtool("partition", "--topology", "2", code=2).stderr
    assert "error: bandwidth '10'" in stderr
    assert "pdtool.toml gives partition these options: bandwidth = '10'" in stderr
    typed = profiled.pdtool("partition", "--topology", "2", "--bandwidth=11", code=2).stderr
    assert "error: bandwidth '11'" in typed
    assert "pdtool.toml" not in typed


def test_settings_of_the_model_are_a_table(folder):
    from conftest import NET

    folder.write("model.py", NET)
    folder.write("pdtool.toml", "[profile]\nset = { width = 6 }\nbatch-size = 4\n")
    stdout = folder.pdtool("profile", "model.py", "--json").stdout
    assert json.loads(stdout)["model"]["settings"] == {"width": 6}
    assert json.loads(stdout)["batch_size"] == 4
