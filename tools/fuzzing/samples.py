"""Files that commands answer from, small: what the families of `answers` change."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from stagec.formats.chakra.nodes import encode_metadata, encode_node
from stagec.formats.chakra.record_files import read_trace
from stagec.importers.registry import BUILT_IN
from tests.configurations import small
from tools.fuzzing.base import MODEL, FaultError, in_process, job

ROOT = Path(__file__).resolve().parents[2]
SPACE = b'stg.space @s {\n  stg.vary[dp, "1,2"]\n  stg.vary[zero, "0,1"]\n}\n'
#: A program in place of ASTRA-sim that says what the files beside it say.
_SAYS = '#!/bin/sh\ncat "{0}/said.txt"; cat "{0}/nodes.txt" > nodes.log\n'


def machine() -> bytes:
    """The text of a machine."""
    return (ROOT / "stagec" / "machines" / "tpu-v4.toml").read_bytes()


def decoder() -> bytes:
    """A configuration of a small decoder."""
    return json.dumps(small("llama", num_hidden_layers=2), indent=1).encode()


def profile() -> bytes:
    """A trace of the profiler."""
    return (ROOT / "docs" / "examples" / "trace.json").read_bytes()


def table() -> bytes:
    """Measured times of kernels, enough rows for a fit."""
    sizes = (64, 256, 1024, 4096)
    products = [(m, n) for m in sizes for n in sizes]
    rows = [f"matmul,bf16,1x{m}x{n}x512,,,{2 + m * n / 1e4}" for m, n in products]
    rows += [f"memory,,{1 << k},,,{2 + 2**k / 1e6}" for k in range(10, 26)]
    rows += [f"all_reduce,,8x{1 << k},,,{9 + 2**k / 1e5}" for k in range(10, 26)]
    return "\n".join(["kind,dtype,extents,causal,op,microseconds", *rows]).encode()


@lru_cache(maxsize=1)
def configurations() -> list[bytes]:
    """A small configuration of each family."""
    names = [name for family in BUILT_IN for name in (*family.model_types, *family.marks)]
    return [json.dumps(small(name), indent=1).encode() for name in names]


@lru_cache(maxsize=1)
def simulated() -> dict[str, bytes]:
    """A job for ASTRA-sim, a program in its place, and what that says of the job."""
    with tempfile.TemporaryDirectory() as place:
        model, folder = Path(place) / "tiny.stg", Path(place) / "job"
        model.write_text(MODEL)
        line = f"compile {model} --dp 2 --format astra-sim --machine tpu-v4 --quiet -o {folder}"
        code, _, err = in_process(line.split())
        if code:
            raise FaultError(f"the job for ASTRA-sim does not compile: {err}")
        files = {f"job/{p.name}": p.read_bytes() for p in sorted(folder.iterdir())}
        (Path(place) / "logging.toml").write_text('level = "debug"')
        names = {
            "workload": folder / "tiny",
            "comm-group": folder / "tiny.json",
            "system": folder / "system.json",
            "network": folder / "network.yml",
            "remote-memory": folder / "memory.json",
            "logging": "logging.toml",
        }
        words = [f"--{name}-configuration={path}" for name, path in names.items()]
        stub = [sys.executable, str(ROOT / "tests" / "astra_stub.py"), *words]
        said = subprocess.run(stub, cwd=place, capture_output=True, check=True).stdout
        nodes = (Path(place) / "nodes.log").read_bytes()
    return {**files, "said.txt": said, "nodes.txt": nodes}


def write_program(folder: Path) -> None:
    """Write the program in place of ASTRA-sim, where there is what it says."""
    if (folder / "said.txt").exists():
        path = folder / "sim"
        path.write_text(_SAYS.format(folder))
        path.chmod(0o755)


@lru_cache(maxsize=1)
def traces() -> dict[str, bytes]:
    """The folder of a job, with durations."""
    files = {f"job/{name}": data for name, data in job().files.items()}
    for path in sorted(job().folder.glob("*.et")):
        nodes = [replace(node, duration_micros=node.id) for node in read_trace(path)]
        files[f"job/{path.name}"] = encode_metadata("0.0.4") + b"".join(map(encode_node, nodes))
    return files
