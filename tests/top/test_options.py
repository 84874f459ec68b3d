"""Options are declared once: what the API, `pdtool train`, pdtool.toml and the machines of a run make of them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdtool
from pdtool.artifacts.plan import Plan
from pdtool.cli.click_options import CommandOption, option_of, options_of
from pdtool.cli.commands.app import main
from pdtool.errors import UsageError
from pdtool.options.declaration import declared, option, read_options
from pdtool.options.plan_options import PartitionOptions, ProfileOptions
from pdtool.options.run_options import RunOptions, WorkerOptions
from pdtool.options.simulate_options import EmulateOptions
from pdtool.options.target import Target
from pdtool.options.values import Count, Flag, Text, share
from pdtool.runtime.config import RunConfig

OPTIONS = {"profile": ProfileOptions, "partition": PartitionOptions, "run": RunOptions, "emulate": EmulateOptions}


@dataclass(frozen=True, kw_only=True)
class Baking:
    """Options of a command that is none of pdtool's."""

    loaf_count: int = option("-n, --loaves N", Count(1, 9, default=2), "Loaves.", section="Plan", keyword="loaves")
    salt: float = option("--salt SHARE", Text(share, default="2%"), "Salt.", section="Plan")
    is_round: bool = option("--round/--long", Flag(default=True), "Their form.", section="Plan", in_file=False)


def test_a_command_takes_its_options_as_one_instance(capsys):
    baked = []
    command = click.command()(options_of(Baking)(lambda asked: baked.append(asked)))
    command.main(["-n", "3", "--salt", "0.5%", "--long"], standalone_mode=False)
    command.main([], standalone_mode=False)
    assert baked == [Baking(loaf_count=3, salt=0.005, is_round=False), Baking()]
    assert Baking() == Baking(loaf_count=2, salt=0.02, is_round=True), "a default is read as a user writes it"
    command.main(["--help"], standalone_mode=False)
    assert "-n, --loaves N" in (text := capsys.readouterr().out)
    assert "[default: 2; 1 to 9]" in text
    assert "[default: 2%]" in text


def test_one_option_of_several_can_be_required():
    command = click.command()(option_of(PartitionOptions, "topology", required=True)(lambda topology: topology))
    assert command.main(["--topology", "2"], standalone_mode=False) == "2"
    with pytest.raises(click.MissingParameter, match="topology"):
        command.main([], standalone_mode=False)


def test_the_api_takes_them_by_keyword_and_its_errors_name_the_keyword():
    assert read_options("bake", Baking, {"loaves": 4, "salt": None}) == Baking(loaf_count=4)
    with pytest.raises(UsageError, match=r"loaves=12: 12 is not in the range 1<=x<=9"):
        read_options("bake", Baking, {"loaves": 12})
    with pytest.raises(UsageError, match=r"^salt '200%' is not a percentage below 100%"):
        read_options("bake", Baking, {"salt": "200%"})
    with pytest.raises(TypeError, match=r"bake\(\) has no option 'loaf_count'; choose from loaves, salt, is_round"):
        read_options("bake", Baking, {"loaf_count": 4})
    with pytest.raises(TypeError, match=r"run\(\) has no option 'set'; did you mean settings\?"):
        read_options("run", RunOptions, {"set": "lr=1"})


@pytest.mark.parametrize("name", OPTIONS)
def test_functions_of_the_api_have_the_defaults_that_are_declared(name):
    keywords = {option.keyword or field: field for field, option in declared(OPTIONS[name]).items()}
    default = {field.name: field.default for field in fields(OPTIONS[name])}
    for keyword, parameter in inspect.signature(getattr(pdtool, name)).parameters.items():
        if keyword in keywords and parameter.default is not None:
            assert parameter.default == default[keywords[keyword]], keyword


def test_train_has_the_options_of_its_steps():
    names = {name for step in ("profile", "partition", "run") for name in declared(OPTIONS[step])}
    params = {param.name: param for param in main.commands["train"].params}
    assert names <= params.keys()
    of_step = {name: {param.name: param for param in main.commands[name].params} for name in ("partition", "run")}
    assert params["schedule"] is of_step["partition"]["schedule"], "of the plan that is made, not in place of it"
    assert params["precision"] is of_step["run"]["precision"]
    assert params["device"] is not of_step["run"]["device"], "profile takes more devices"
    assert {"if_stale", "fresh"}.isdisjoint(params)


def test_a_file_of_defaults_trusts_writes_and_connects_to_nothing():
    kept_out = {
        param.name
        for command in main.commands.values()
        for param in command.params
        if isinstance(param, CommandOption) and not param.in_file
    }
    connecting, reading = {"rdzv_endpoint"}, {"trust", "model", "resume", "fresh"}
    assert kept_out == {"force", "update", "output", "trace", "svg"} | connecting | reading


@given(st.sampled_from(["=", "<=", ">"]), st.floats(allow_nan=False, allow_infinity=False))
def test_a_target_is_written_with_all_its_digits(relation, value):
    """Of `accuracy>=0.9999999`, the report said `target accuracy>=1: reached`."""
    target = Target("accuracy", relation, value)
    assert Target.parse(str(target)) == target
    assert [str(Target("accuracy", ">=", value)) for value in (0.98, 4.0)] == ["accuracy>=0.98", "accuracy>=4"]


def test_what_machines_must_agree_on_is_in_the_configuration_of_a_run_or_in_its_plan():
    agreed = {name: option for name, option in declared(RunOptions).items() if option.same}
    of_config, of_plan = {field.name for field in fields(RunConfig)}, set(Plan.model_fields)
    for name, one in agreed.items():
        assert name in (of_plan if one.of_plan else of_config), name
    assert {"epochs", "seed", "trust", "weights", "microbatches", "wire_dtype"} <= agreed.keys()
    assert {field.name for field in fields(WorkerOptions)} <= of_config
