"""Formats of jobs of several pods: what each pod has is what it has alone, and messages meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import stagec
from tests.unit.test_llmservingsim import trace as rows_of
from tests.unit.test_pytorch_et import check_agreement, read
from tests.unit.test_scale_sim import counts
from tests.unit.test_simai import read as read_simai

FORMATS = ("simai", "scale-sim", "pytorch-et", "llmservingsim")
SMALL = (
    *("llama3-8b", "--set", "L=2,D=64,F=128,V=256,H=4,G=2,K=16"),
    *("--machine", "h100-sxm", "--quiet", "--graph-gap", "9us", "--sampling", "none"),
)
PODS = ("--serve", "disaggregated", "--prefill", "tp=2", "--decode", "tp=2,dp=2")
#: The steps of the pods as jobs of their own.
ALONE = {
    "prefill": ("--serve", "prefill", "--prompt", "16", "--tp", "2"),
    "decode": ("--serve", "decode", "--context", "16", "--tp", "2", "--dp", "2"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job of pods, and each pod as a job, in all formats."""
    folder = tmp_path_factory.mktemp("pods")
    jobs = {"both": (*PODS, "--prompt", "16"), **ALONE}
    for name, words in jobs.items():
        how = ("--batch", "4", "--format", ",".join(FORMATS), "-o", folder / name)
        ran = stagec("compile", *SMALL, *words, *how)
        assert ran.code == 0, ran.err
    return folder


@pytest.mark.parametrize("pod", ALONE)
def test_a_workload_of_simai_is_that_of_the_pod_alone(pod: str, folders: Path) -> None:
    mine = read_simai(folders / "both" / "simai" / f"llama3-8b.{pod}.stage0.txt")
    assert mine == read_simai(folders / pod / "simai" / "llama3-8b.stage0.txt")
    assert mine.pairs["all_gpus:"] == {"prefill": 2, "decode": 4}[pod]


@pytest.mark.parametrize("pod", ALONE)
def test_products_of_scale_sim_are_those_of_the_pod_alone(pod: str, folders: Path) -> None:
    both = counts(folders / "both" / "scale-sim" / "llama3-8b.counts.csv")
    assert {*both[0]} == {"Layer", "M", "N", "K", "prefill/stage0", "decode/stage0"}
    alone = counts(folders / pod / "scale-sim" / "llama3-8b.counts.csv")
    sizes = ("M", "N", "K")
    runs = {tuple(r[n] for n in sizes): r[f"{pod}/stage0"] for r in both}
    expected = {tuple(r[n] for n in sizes): r["stage0"] for r in alone}
    assert {product: count for product, count in runs.items() if count != "0"} == expected


@pytest.mark.parametrize("pod", ALONE)
def test_rows_of_llmservingsim_are_those_of_the_pod_alone(pod: str, folders: Path) -> None:
    mine = rows_of(folders / "both" / "llmservingsim" / f"llama3-8b.{pod}.txt")
    assert mine == rows_of(folders / pod / "llmservingsim" / "llama3-8b.txt")
    manifest = (folders / "both" / "llmservingsim" / "manifest.json").read_text()
    assert "messages between pods: the simulator makes those between instances" in manifest


def test_messages_between_pods_meet(folders: Path) -> None:
    """In PyTorch's traces each rank sends to the rank of the other pod that receives from it."""
    made = folders / "both" / "pytorch-et"
    traces = {rank: read(made / f"rank-{rank}.json", rank, 6) for rank in range(6)}
    check_agreement(traces)
    crossed = {
        (rank, call.peer)
        for rank, trace in traces.items()
        for call in trace.calls
        if call.kind == "send"
    }
    assert {rank for rank, _ in crossed} == {0, 1}
    assert {peer for _, peer in crossed} == {2, 3, 4, 5}
