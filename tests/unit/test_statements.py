"""Statements of strategies: what is derived from their definitions agrees with what is read back.

The tests go over all flags, so that one that is added later is tested too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
import pytest

from stagec.driver.cli import cli
from stagec.driver.shell.options import take_options, takes_job
from stagec.driver.shell.sections import JobCommand, section_of
from stagec.ir.opdef import Registry
from stagec.ir_spec.builtin import BUILTIN
from stagec.ir_spec.strategy import STATEMENTS
from stagec.ir_spec.strategy.axes import EXPERTS
from stagec.ir_spec.strategy.bucket import BucketRule
from stagec.ir_spec.strategy.flag_values import SERVE, FlagValues
from stagec.ir_spec.strategy.mesh_flags import OF_MESH
from stagec.ir_spec.strategy.recompute import RecomputeRule
from stagec.ir_spec.strategy.shard_params import ShardParamsRule
from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, parameter
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.command_line import job_words
from stagec.jobs.request.flags import FLAGS, SHORTHANDS, PartText
from stagec.jobs.request.option import values_of
from stagec.jobs.request.options import JOB, JobOptions
from stagec.sharding.strategy import Strategy, read_strategy
from stagec.support.diagnostics import DiagnosticError
from stagec.support.source import Source
from stagec.text.build import parse_module
from tests.support import DISTINCT, LLAMA, parse, stagec

pytestmark = DISTINCT

ROOT = Path(__file__).resolve().parents[2]
#: Where what a strategy says is read.
ROOMS = (
    *("ir_spec", "passes", "stagec/sharding", "stagec/schedule"),
    *("stagec/serving", "stagec/time"),
)
#: The flags that write statements.
STATED = tuple(name for name in SHORTHANDS if name not in OF_MESH)
#: A mesh and values on which every flag has an effect.
AXES: dict[str, int | None] = {"pp": 2, "dp": 2, "ep": 2, "cp": 2, "tp": 2}
SIZES: dict[str, int | None] = dict.fromkeys((*"BSHGFMVEL", "F_shared"), 64)
BY_KIND: Mapping[str, object] = {
    "text": "silu",
    "ratio": "5/4",
    "layers": (1, 2),
    "loads": ((5, 1), (1, 3)),
    "order": "tp,dp",
    "parts": (PartText("encoder", "e", "tp=2"), PartText("tower", "t")),
}
BESIDE: Mapping[str, Mapping[str, object]] = {
    "grad_reduction": {"zero": 3},
    "grad_collective": {"zero": 1},
    "grad_flat": {"zero": 1},
    "grad_flat_buffers": {"zero": 1, "grad_flat": 1000},
    "fp8_scaling": {"fp8": "hybrid"},
    "fp8_weights": {"fp8": "hybrid"},
    "weight_block": {"weight_dtype": "int4"},
    "activation_dtype": {"weight_dtype": "nvfp4"},
    "weight_parts": {"weight_dtype": "nvfp4"},
    "fill_experts": {"weight_dtype": "mxfp4"},
    "reshard_after_forward": {"zero": 3},
    "shard_reuse": {"zero": 3},
    "fsdp_prefetch": {"zero": 3},
    "overlap_param_gather": {"zero": 1},
    "recompute_layers": {"recompute": "full"},
    "recompute_every": {"recompute": "full"},
    "recompute_keep": {"recompute": "full"},
    "recompute_products": {"recompute": "full", "recompute_keep": "einsum"},
    "autocast_attention": {"autocast": True},
    "recompute_blocks": {"recompute": "full", "saved_tensors": "node"},
    "all_reduce_below": {"all_reduce": "two-shot"},
    "all_reduce_norms": {"all_reduce": "two-shot"},
    "all_reduce_reads": {"all_reduce": "one-shot"},
    "memory_nodes": {"offload": "optimizer"},
    "offload_update": {"offload": "optimizer"},
    "part_batches": {"part": (PartText("ffn", "feed-forward", "tp=2"),)},
    "lora_rank": {"lora": "wq"},
    "max_loras": {"lora": "wq"},
    "lora_dtype": {"lora": "wq"},
    "loss_chunks": {"loss": "chunked"},
    "recompute_selective": {"recompute": "selective"},
    "recompute_modules": {"recompute": "selective"},
    "sgd_momentum": {"optimizer": "sgd"},
    "table_moments": {"optimizer": "adam8bit"},
    "etp": {"sp": True},
    "cp_inputs": {"cp": 2, "cp_mode": "all-gather"},
    "host_product_bits": {"serve": "decode", "host_product": "2 us"},
    **{flag.name: {"serve": "decode"} for flag in FLAGS.values() if SERVE in flag.needs},
}


def test_choices_may_be_spelled_as_in_texts() -> None:
    """With underscores, on the command line and in Python."""
    one, other = (
        stagec("compile", "llama3-8b", "--saved-tensors", name, "--print-strategy")
        for name in ("node", "last_use")
    )
    assert (one.code, other.code) == (0, 0)
    assert "until = node" in one.out
    assert "until" not in other.out
    values, _ = values_of(JOB, {"loss": "in_place"})
    assert values["loss"] == "in-place"


def another(flag: Flag) -> Any:
    """A value that is not the default."""
    match flag.kind:
        case "switch":
            return not flag.default
        case "choice":
            return next(c for c in flag.choices if c != flag.default)
        case "int":
            return flag.default + 1
        case "names" | "patterns":
            return flag.choices[-1] if flag.choices else "wq"
        case _:
            return "2 us" if flag.metavar == "TIME" else BY_KIND[flag.kind]


def text_of(**given: Any) -> str:
    """The statements that flags stand for, on a mesh with all axes."""
    request = FlagValues(vars(JobOptions("", **given)), AXES, SIZES)
    lines = [line for statement in STATEMENTS for line in statement.text(request)]
    return "stg.module @m {\n  stg.strategy @s {\n" + "\n".join(lines) + "\n  }\n}"


def read(text: str) -> Strategy:
    """The strategy of a text."""
    return read_strategy(parse(text))


@click.command(cls=JobCommand)
@takes_job
def given_options(**given: Any) -> JobOptions:
    """The options of a job, as the command line gives them."""
    return take_options(given)


def from_words(*words: str) -> JobOptions:
    """The options that words give."""
    with given_options.make_context("job", list(words)) as context:
        options: JobOptions = given_options.invoke(context)
        return options


# -- one definition --------------------------------------------------------------------------------


def test_no_flag_is_defined_twice() -> None:
    names = [flag.name for statement in STATEMENTS for flag in statement.flags]
    assert sorted(names) == sorted(STATED)


def test_options_of_the_command_line_are_the_flags() -> None:
    compile_command = cli.get_command(click.Context(cli), "compile")
    assert compile_command is not None
    names = [p.name for p in compile_command.params if p.name in FLAGS]
    assert names == list(FLAGS)
    assert {f.name for f in fields(JobOptions)} >= FLAGS.keys()


@pytest.mark.long
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_says_what_it_is(name: str) -> None:
    flag = FLAGS[name]
    assert flag.help.endswith(".")
    assert getattr(JobOptions(""), name) == flag.default
    assert f"  {flag.option}" in stagec("compile", "--help-all").out
    if flag.tries and flag.choices:
        assert set(flag.tries) <= set(flag.choices)
    needed = {
        n for need in flag.needs + flag.beside for n in ((need,) if isinstance(need, str) else need)
    }
    assert needed <= {*FLAGS, EXPERTS, SERVE}


@pytest.mark.parametrize(
    "name", ["compile", "analyze", "memory", "time", "serve", "search"], ids=str
)
def test_help_has_sections(name: str) -> None:
    """Each option once, a flag in the section that docs/reference/flags.md has it in too."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    expected = stagec(name, "--help-all").out
    assert all(len(line) <= 80 for line in expected.splitlines())
    parts = re.split(r"^(\S.*):$", expected, flags=re.MULTILINE)
    options = {
        title: re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    listed = [option for some in options.values() for option in some]
    params = [p for p in command.params if isinstance(p, click.Option)]
    assert sorted(listed) == sorted([*(p.opts[-1] for p in params), "--help"])
    for param in params:
        if (flag := FLAGS.get(str(param.name))) is not None:
            assert flag.option in options[section_of(flag).value]
    assert next(iter(options)) == "Model"
    own = [*options][-1]
    assert own == f"Options of {name}"
    job = click.command()(takes_job(lambda: None))
    of_all_jobs = {p.opts[-1] for p in job.params if isinstance(p, click.Option)}
    assert not of_all_jobs & {*options[own]}
    assert Section.OTHERS.value not in options


@pytest.mark.parametrize("name", ["compile", "analyze", "memory", "time", "serve", "search"])
def test_help_is_what_is_often_used(name: str) -> None:
    """At most 70 options; the others are counted, and work as those do."""
    short, whole = (
        re.findall(r"^  (?:-\w, )?(--[\w-]+)", stagec(name, option).out, re.MULTILINE)
        for option in ("--help", "--help-all")
    )
    assert len(short) <= 70
    assert set(short) < set(whole)
    more = len(whole) - len(short)
    assert f"--help-all shows {more} more options" in stagec(name, "--help").out


def test_something_reads_what_a_statement_says() -> None:
    """A pass, or a library that it asks, by the name of the field."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    read = re.findall(r"\.(\w+)", "".join(path.read_text(encoding="utf-8") for path in files))
    stated = {each.name for statement in STATEMENTS for each in statement.params}
    assert stated - set(read) == set()


@pytest.mark.long
@pytest.mark.parametrize("name", FLAGS)
def test_other_values_of_a_flag_are_values_that_it_takes(name: str) -> None:
    """All but the present one, each as the command line takes it; of a choice all."""
    flag = FLAGS[name]
    for now in (flag.default, *flag.others(flag.default)):
        others = flag.others(now)
        assert now not in others
        assert len({*others}) == len(others)
        for value in (v for v in others if v is not False or flag.default):
            words = job_words(JobOptions("llama3-8b", **{name: value}, explicit=frozenset({name})))
            assert getattr(from_words(*words), name) == value
        if flag.kind == "choice":
            assert {now, *others} == {*flag.choices}
        if flag.kind == "switch":
            assert others == (not now,)


# -- text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STATED)
def test_a_flag_changes_the_strategy_that_is_read_back(name: str) -> None:
    beside = BESIDE.get(name, {})
    before, after = read(text_of(**beside)), read(text_of(**beside, **{name: another(FLAGS[name])}))
    assert contents(before) != contents(after)


def contents(strategy: Strategy) -> list[tuple[object, ...]]:
    """What all records say, without where."""
    return [
        tuple(getattr(record, f.name) for f in fields(record) if f.name != "loc")
        for records in strategy.records.values()
        for record in records
    ]


def test_a_parameter_has_the_value_of_its_flag() -> None:
    actual = read(text_of(zero=3, fsdp_prefetch=0, reshard_after_forward="last"))
    assert actual.one(ShardParamsRule).over == ("dp", "ep", "cp")
    assert (actual.zero, actual.prefetch, actual.reshard) == (3, 0, "last")
    assert read(text_of(recompute="full-replay")).one(RecomputeRule).policy == "full_replay"


def test_what_a_text_leaves_out_has_the_default_of_the_flag() -> None:
    strategy = read("stg.module @m {\n  stg.strategy @s {\n    stg.recompute[full]\n  }\n}")
    recompute = strategy.one(RecomputeRule)
    assert (recompute.policy, recompute.layers, recompute.ops) == ("full", 0, ())
    assert strategy.one(ShardParamsRule) == ShardParamsRule()
    assert strategy.one(BucketRule).bytes == 0, "a text without the statement has no buckets"


# -- the command line ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLAGS)
def test_the_words_of_a_flag_give_its_value_back(name: str) -> None:
    flag = FLAGS[name]
    value = another(flag)
    words = list(job_words(JobOptions("llama3-8b", **{name: value})))
    assert getattr(from_words(*words), name) == (
        pytest.approx(1.25) if flag.kind == "ratio" else value
    )


BOUNDED = [f.name for f in FLAGS.values() if f.kind == "int" and f.least is not None]


@pytest.mark.parametrize("name", BOUNDED)
def test_a_value_out_of_bounds_is_a_usage_error(name: str) -> None:
    flag = FLAGS[name]
    assert flag.least is not None
    for value in (flag.least - 1, *([flag.most + 1] if flag.most is not None else [])):
        ran = stagec("analyze", LLAMA, flag.option, str(value))
        assert ran.code == 2
        assert f"'{flag.option}': {value} is not in the range" in ran.err


#: Kinds of flags that take other values than their choices.
OPEN = ("text", "patterns")


@pytest.mark.parametrize(
    "name", [f.name for f in FLAGS.values() if f.choices and f.kind not in OPEN]
)
def test_another_value_than_the_choices_is_a_usage_error(name: str) -> None:
    flag = FLAGS[name]
    ran = stagec("analyze", LLAMA, flag.option, f"{flag.choices[0]}s")
    assert ran.code == 2
    assert f"'{flag.choices[0]}s' is not one of" in ran.err


@pytest.mark.parametrize(
    "line", ["stg.shard_params[over = dp, zero = 4]", "stg.bucket[bytes = -1]"]
)
def test_a_value_out_of_bounds_in_a_text_is_an_error_there(line: str) -> None:
    parsed = parse(f"stg.module @m {{\n  stg.strategy @s {{\n    {line}\n  }}\n}}")
    (op,) = parsed.ops("stg.strategy")[0].body.ops
    assert any("to be a number" in message for message in op.definition.verify(op))


#: Flags of steps of serving, which are refused without --serve.
SERVING = ("dp_attention", "weight_dtype")
#: Flags of one way of what they need, whose rule speaks first.
OF_ONE_WAY = ("cp_inputs", "reshard_ranks")
NEEDING = [
    n
    for n in SHORTHANDS
    if FLAGS[n].needs and "E" not in FLAGS[n].needs and n not in SERVING + OF_ONE_WAY
]


@pytest.mark.parametrize("name", NEEDING)
def test_a_flag_without_what_it_needs_is_reported(name: str) -> None:
    flag = FLAGS[name]
    ran = stagec("analyze", LLAMA, *words_of(name), "--print-strategy")
    need = flag.needs[0] if isinstance(flag.needs[0], str) else flag.needs[0][0]
    option = FLAGS[need].option if need in FLAGS else f"--{need}"
    assert f" has no effect without {option}" in ran.err
    assert ran.code == 0
    plain = stagec("analyze", LLAMA, "--print-strategy")
    assert ran.out == plain.out, "and writes nothing"


def test_a_printed_strategy_says_what_it_assumes(tmp_path: Path) -> None:
    """Read and printed again, too: where heads are replicated, their number is assumed."""
    file, sizes = tmp_path / "s.stg", ("--set", "B=1")
    text = stagec("analyze", LLAMA, "--tp", "16", *sizes, "--print-strategy").out
    file.write_text(text)
    assert "stg.assume[G == tp]" in text
    assert stagec("analyze", LLAMA, file, *sizes, "--print-strategy").out == text


def words_of(name: str) -> list[str]:
    """The words that give a flag another value."""
    return list(job_words(JobOptions("", **{name: another(FLAGS[name])})))


@pytest.mark.parametrize("name", [n for n in SHORTHANDS if "E" in FLAGS[n].needs])
def test_a_flag_about_experts_needs_some(name: str) -> None:
    ran = stagec("analyze", LLAMA, *words_of(name))
    assert ran.code == 1
    assert f"{FLAGS[name].option}: the model has no experts" in ran.err


def test_a_wrong_name_of_a_flag_is_refused() -> None:
    with pytest.raises(TypeError, match="zerro"):
        JobOptions(LLAMA, zerro=1)


# -- statements of plug-ins ------------------------------------------------------------------------


@dataclass(frozen=True)
class Warmth(Record):
    """What a statement of a plug-in says."""

    degrees: int = parameter("int", "how warm", required=True, least=0, most=40)
    dims: tuple[str, ...] = parameter("names", "of which dimensions")


class WarmthOp(Statement):
    """A statement of a plug-in."""

    name, record = "my.warmth", Warmth


def with_warmth(line: str) -> Strategy:
    """The strategy of one line, with that statement known."""
    text = f"stg.module @m {{\n  stg.strategy @s {{\n    {line}\n  }}\n}}"
    return read_strategy(parse_module(Source("t.stg", text), Registry([*BUILTIN, WarmthOp()])))


def test_a_statement_of_a_plug_in_is_read() -> None:
    warmth = with_warmth("my.warmth[degrees = 20, dims = (S, B)]").one(Warmth)
    assert (warmth.degrees, warmth.dims) == (20, ("S", "B"))


def test_a_statement_stands_once_unless_it_repeats() -> None:
    with pytest.raises(DiagnosticError, match=r"has two my\.warmth statements"):
        with_warmth("my.warmth[degrees = 1]\n    my.warmth[degrees = 2]")


def test_another_op_is_no_statement() -> None:
    with pytest.raises(DiagnosticError, match=r"'stg\.symbols' is not a statement"):
        with_warmth("stg.symbols[B]")


def test_flags_of_a_job_are_written_in_its_strategy() -> None:
    options = JobOptions(LLAMA, dp=2, zero=1, recompute="full", recompute_every=2)
    strategy = read_strategy(JobBuilder(options).module)
    assert (strategy.zero, strategy.zero_axes) == (1, ("dp",))
    assert strategy.recompute.every == 2
