"""The order of layers of several kinds: what it says, how it is written short, and that a compile
costs as much as its kinds.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.analysis.report import analysis
from stagec.ir.module import Module
from stagec.ir.order import LayerOrder, compact
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.pipeline.passes import Pass
from tests.layer_kinds import SIZES, kinds_job, order_of, separate_text
from tests.support import EXHAUSTIVE, examples, only_program

LAYERS = st.lists(st.sampled_from("abc"), min_size=1, max_size=60)


@examples(100)
@given(LAYERS)
def test_compact_says_the_same(layers: list[str]) -> None:
    order = compact(layers)
    assert list(order.layers) == layers
    assert order_of(str(order)) == order


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ("a", "a"),
        ("aaa", "3*a"),
        ("ab", "a, b"),
        ("aabaabc", "(2*a, b)*2, c"),
        ("cabababa", "c, (a, b)*3, a"),
        ("aaaaab" * 10 + "aa", "(5*a, b)*10, 2*a"),
    ],
)
def test_what_follows_itself_is_written_once(layers: str, text: str) -> None:
    assert str(compact(list(layers))) == text


@examples(50)
@given(LAYERS, st.data())
def test_parts_and_numbers(layers: list[str], data: st.DataObject) -> None:
    order = compact(layers)
    assert order.counts == Counter(layers)
    for place, (kind, number) in enumerate(order.numbered):
        assert kind == layers[place]
        assert (
            order.places[kind][number]
            == place
            == [i for i, other in enumerate(layers) if other == kind][number]
        )


class _Sizes:
    """An instrument: how many operations the module has after each pass."""

    def __init__(self) -> None:
        self.after: list[tuple[str, int]] = []

    def before_pass(self, pass_: Pass, module: Module) -> None:
        """Nothing."""

    def after_pass(self, pass_: Pass, module: Module) -> None:
        self.after.append((pass_.name, sum(1 for _ in module.walk())))


def _sizes(path: Path, order: str, **options: Any) -> list[tuple[str, int]]:
    actual = _Sizes()
    kinds_job(path, order, **options).lower(watching=[actual])
    return actual.after


#: Irregular: 118 layers of three kinds.
LONG = str(compact(Random(3).choices(("attn", "ffn", "mix"), k=118)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dp": 2, "zero": 3, "tp": 2, "sp": True},
        pytest.param({"dp": 2, "zero": 1, "ddp_bucket": 1000}, marks=EXHAUSTIVE),
        pytest.param({"recompute": "full", "microbatches": 2}, marks=EXHAUSTIVE),
    ],
    ids=str,
)
def test_many_layers_are_as_much_work_as_few(options: dict[str, Any], tmp_path: Path) -> None:
    """After every pass the module has as many operations, whatever the order of the layers."""
    assert len(order_of(LONG).layers) == 118
    few = _sizes(tmp_path / "few.stg", "attn, ffn, mix, attn, ffn, mix", **options)
    assert _sizes(tmp_path / "many.stg", LONG, **options) == few
    assert few[-1][0] == "lower-to-trace"


ORDER = "mix, 2*attn, ffn, mix, attn, 2*ffn"
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fsdp": {"dp": 2, "zero": 3, "reshard_after_forward": "last", "fsdp_prefetch": 2},
    "recompute": {"recompute": "full", "recompute_every": 3},
    "buckets": {"dp": 2, "zero": 1, "ddp_bucket": 700},
}


def test_counts_are_those_of_separate_layers(tmp_path: Path) -> None:
    """FLOPs and parameters of a stack are the sums over its layers."""
    stack = analysis(kinds_job(tmp_path / "stack.stg", ORDER).lower(), "m")
    other = tmp_path / "separate.stg"
    other.write_text(separate_text(ORDER))
    options = JobOptions(str(other), sizes=SIZES)
    separate = analysis(JobBuilder(options).lower(), "m")
    assert stack["parameters"] == separate["parameters"]
    for key in ("flops", "matmul_flops"):
        for phase in ("forward", "backward"):
            assert stack["classes"][0][key][phase] == separate["classes"][0][key][phase], key
    for key in ("peak", "stash"):
        assert stack["classes"][0]["memory"][key] == separate["classes"][0]["memory"][key], key


@pytest.mark.parametrize("step", STEPS)
def test_nodes_are_as_many_as_counted(step: str, tmp_path: Path) -> None:
    actual = kinds_job(tmp_path / "kinds.stg", ORDER, **STEPS[step]).lower()
    nodes = Counter(n.kind for n in only_program(actual).nodes)
    counted = analysis(actual, "m")["classes"][0]
    assert sum(nodes.values()) == sum(counted["nodes"].values())
    for each in counted["collectives"]:
        assert nodes[each["op"]] >= each["count"] > 0


def test_an_order_may_be_nested() -> None:
    actual = order_of("((a, 2*b)*2, c)*2")
    assert isinstance(actual, LayerOrder)
    assert "".join(actual.layers) == "abbabbcabbabbc"
