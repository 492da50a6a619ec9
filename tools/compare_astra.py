"""Compares `stagec time` with ASTRA-sim on the same traces.

`python tools/compare_astra.py BINARY` takes the program of ASTRA-sim's analytical network without
congestion, compiles each job of `JOBS`, runs ASTRA-sim on the traces and prints the two times of a
step. Both read one machine text (docs/examples/astra-sim.toml): `--format astra-sim` writes
ASTRA-sim's files from such a text, here with all ranks in one dimension. docs/simulators.md
describes the text and the differences.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from stagec.driver.commands.simulate import simulated
from stagec.formats.astra_sim import system_files
from stagec.formats.astra_sim.topology import dimensions, network_text
from stagec.machines import Machine, load_machine

ROOT = Path(__file__).parents[1]
MACHINE = ROOT / "docs" / "examples" / "astra-sim.toml"

_LLAMA = ["llama3-8b", "--set", "L=4,S=2048"]
_STAGES = ["llama3-8b", "--set", "L=16,S=2048", "--pp", "4", "--microbatches", "8", "--schedule"]
_EXPERTS = ["mixtral-8x7b", "--set", "L=4,S=2048"]
_TINY = ["llama3-8b", "--set", "L=4,D=256,H=8,G=4,K=32,F=512,V=512,S=128,B=16"]
_DECODE = ["llama3-8b", "--set", "L=8", "--serve", "decode", "--batch", "32", "--context", "1024"]
#: Jobs by name: the arguments of `stagec compile`.
JOBS: Mapping[str, Sequence[str]] = {
    "one device": _LLAMA,
    "one device, tiny": _TINY,
    "DDP": ["gpt-1.7b", "--set", "L=8", "--dp", "8"],
    "DDP, tiny": [*_TINY, "--dp", "8"],
    "FSDP": [*_LLAMA, "--dp", "8", "--zero", "3"],
    "FSDP, tiny": [*_TINY, "--dp", "8", "--zero", "3"],
    "TP": [*_LLAMA, "--tp", "8"],
    "TP, SP": [*_LLAMA, "--tp", "8", "--sp"],
    "TP, SP, ZeRO-1": [*_LLAMA, "--tp", "4", "--dp", "4", "--sp", "--zero", "1"],
    "TP, SP, FSDP": [*_LLAMA, "--tp", "8", "--dp", "8", "--sp", "--zero", "3"],
    "experts": [*_EXPERTS, "--dp", "8", "--ep", "8"],
    "context, ring": [*_LLAMA, "--cp", "8"],
    "context, ring, 32K": [*_LLAMA, "--set", "S=32768,B=8", "--cp", "8"],
    "context, Ulysses": [*_LLAMA, "--cp", "8", "--cp-mode", "ulysses"],
    "1F1B": [*_STAGES, "1f1b"],
    "interleaved": [*_STAGES, "interleaved"],
    "ZB-H1": [*_STAGES, "zb-h1"],
    "ZBV": [*_STAGES, "zbv"],
    "DualPipe": [*_STAGES, "dualpipe"],
    "1F1B, tiny": [*_TINY, "--pp", "4", "--microbatches", "8"],
    "1F1B, DDP": [*_STAGES, "1f1b", "--dp", "4"],
    "1F1B, FSDP": [*_STAGES, "1f1b", "--dp", "4", "--zero", "3"],
    "interleaved, TP, SP": [*_STAGES, "interleaved", "--tp", "4", "--sp"],
    "ZB-H1, TP, SP": [*_STAGES, "zb-h1", "--tp", "4", "--sp"],
    "DualPipe, experts": [
        *_EXPERTS,
        "--set",
        "L=8",
        "--pp",
        "4",
        "--dp",
        "4",
        "--ep",
        "4",
        "--microbatches",
        "8",
        "--schedule",
        "dualpipe",
    ],
    "1F1B, tied": ["gpt-1.7b", "--set", "L=8,S=1024", "--pp", "8", "--microbatches", "16"],
    "parts, ZeRO-1 and ZeRO-3": [
        *["whisper-large-v3", "--set", "B=32,L=4,L_dec=4", "--dp", "4", "--zero", "1"],
        *["--part", "encoder=e: dp=4,zero=3"],
    ],
    "FSDP, offload": [
        *[*_LLAMA, "--dp", "8", "--zero", "3"],
        *["--offload", "activations,optimizer", "--memory-nodes"],
    ],
    "1F1B, TP, SP, DDP": [*_STAGES, "1f1b", "--tp", "4", "--dp", "4", "--sp"],
    "decode, TP": [*_DECODE, "--tp", "8"],
    "decode, 4 stages, TP": [*_DECODE, "--pp", "4", "--tp", "2", "--microbatches", "4"],
}


class Compared(NamedTuple):
    """The time of a step of a job, in nanoseconds: ASTRA-sim's, and ours."""

    job: str
    ranks: int
    theirs: int
    ours: float

    @property
    def difference(self) -> float:
        """The relative difference of our time from theirs."""
        return self.ours / self.theirs - 1


def compared(
    binary: Path, machine: Path, jobs: Mapping[str, Sequence[str]], folder: Path
) -> Iterator[Compared]:
    """Compare jobs, each in a separate folder."""
    read = load_machine(str(machine))
    for i, (name, arguments) in enumerate(jobs.items()):
        where = folder / str(i)
        _stagec("compile", *arguments, "-o", str(where), "--name", "job", "--quiet")
        ranks = json.loads((where / "manifest.json").read_text())["ranks"]
        answer = _stagec("time", *arguments, "--machine", str(machine), "--json", "--no-levers")
        theirs = simulated_ns(binary, where, ranks, read)
        yield Compared(name, ranks, theirs, json.loads(answer)["step_seconds"] * 1e9)


def _stagec(*arguments: str) -> str:
    command = [sys.executable, "-m", "stagec", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def simulated_ns(binary: Path, folder: Path, ranks: int, machine: Machine) -> int:
    """The nanoseconds at which the last rank ends in ASTRA-sim, with all ranks in one dimension.
    Raises `DiagnosticError` if one does not end."""
    if ranks == 1:  # its network has at least two: add an independent copy
        shutil.copy(folder / "job.0.et", folder / "job.1.et")
        ranks = 2
    dims = dimensions({"ranks": ranks}, machine)
    peak, memory = machine.compute.matrix["bf16"].value, machine.memory.bandwidth.value
    waits = machine.efficiency.rendezvous is not None
    about: Mapping[str, object] = {"name": "job", "ranks": ranks, "groups": {}, "rendezvous": waits}
    (folder / system_files.ABOUT).write_bytes(system_files.text(about))
    system = system_files.system(dims, peak, memory, roofline=True, tensors=False)
    (folder / system_files.SYSTEM).write_bytes(system_files.text(system))
    (folder / system_files.NETWORK).write_text(network_text(dims))
    (folder / system_files.MEMORY).write_bytes(system_files.text(system_files.memory(machine.host)))
    return simulated(folder, binary, totals=True).slowest.end


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description="Compare `stagec time` with ASTRA-sim.")
    parser.add_argument("binary", type=Path, help="AstraSim_Analytical_Congestion_Unaware")
    parser.add_argument("--machine", type=Path, default=MACHINE)
    parser.add_argument("-k", default="", help="only the jobs whose names have this in them")
    given = parser.parse_args()
    jobs = {name: job for name, job in JOBS.items() if given.k in name}
    print("| job | ranks | ASTRA-sim ns | stagec ns | difference |")
    print("|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for each in compared(given.binary, given.machine, jobs, Path(folder)):
            theirs, ours = f"{each.theirs:,}", f"{each.ours:,.0f}"
            print(f"| {each.job} | {each.ranks} | {theirs} | {ours} | {each.difference:+.2%} |")


if __name__ == "__main__":
    main()
