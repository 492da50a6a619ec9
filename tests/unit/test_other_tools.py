"""Flags of other tools lead to flags of this one."""

from __future__ import annotations

import re

import click
import pytest

from stagec.driver.cli import COMMANDS, cli
from stagec.jobs.request.other_tools import FLAGS_HERE, flag_here
from tests.support import stagec


def _options() -> set[str]:
    context = click.Context(cli)
    commands = [cli.get_command(context, name) for name in COMMANDS]
    return {o for c in commands if c is not None for p in c.params for o in p.opts}


def test_flags_of_other_tools_are_none_here_and_lead_to_flags_that_are() -> None:
    options = _options()
    named = {flag for here in FLAGS_HERE.values() for flag in re.findall(r"--[a-z-]+", here)}
    assert not [name for name in FLAGS_HERE if f"--{name}" in options]
    assert not [flag for flag in named if flag not in options]


@pytest.mark.parametrize(
    ("flag", "here"),
    [("--num-gpus", "here it is --ranks N"), ("num_gpus", "here it is --ranks N"), ("x", None)],
)
def test_what_an_option_is_here(flag: str, here: str | None) -> None:
    assert flag_here(flag) == here


def test_a_device_of_memory_is_a_limit() -> None:
    ran = stagec("memory", "gpt2", "--machine", "h100")
    assert "an option of: compile" in ran.err
    assert "--limit h100-sxm says whether a job fits" in ran.err
    for command in (("check", "x"), ("diff", "x", "y"), ("show", "x")):
        assert "--limit" not in stagec(*command, "--machine", "h100").err


def test_a_name_of_several_letters_has_two_dashes() -> None:
    ran = stagec("time", "llama3-8b", "-tp", "8")
    assert (ran.code, "No such option '-t'; names of several letters" in ran.err) == (2, True)
