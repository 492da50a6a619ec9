"""Shows whether a change of structure changes a result, by comparing the results of recorded
commands before and after.

`python tools/same.py record DIR` runs the commands below with the installed `stagec` (`--stagec
FILE` with another one) and stores digests of their output. `python tools/same.py compare BEFORE
AFTER` prints a table, and fails if a digest differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

#: Jobs that together use every part of the compiler. Sizes are small where files are written.
JOBS = {
    "fsdp": "llama3-8b --tp 2 --dp 4 --sp --zero 3 --set L=4",
    "hybrid": "llama3-8b --dp-replicate 2 --dp-shard 4 --zero 3 --reshard-after-forward last "
    "--fsdp-prefetch 2 --set L=4",
    "ddp": "gpt3-175b --dp 4 --tp 2 --set L=3 --tp-inputs save-gathered --no-async-tp",
    "ring": "llama3-70b --cp 4 --tp 4 --set L=2 --recompute selective --zero 1 --dp 2",
    "ulysses": "llama3-8b --cp 2 --cp-mode ulysses --tp 2 --set L=2 --no-vocab-parallel",
    "pipeline": "llama3-70b --pp 4 --tp 2 --schedule interleaved --chunks 2 --microbatches 8 "
    "--set L=16 --scatter-gather --memory-events",
    "zero-bubble": "mixtral-8x7b --pp 4 --dp 4 --ep 4 --tp 2 --sp --schedule zb-h1 --set L=8",
    "dualpipe": "deepseek-v3 --pp 4 --ep 8 --dp 8 --schedule dualpipev --set L=16",
    "recompute": "gpt-22b --pp 2 --tp 4 --sp --recompute full --recompute-layers 2 --set L=8 "
    "--offload optimizer --memory-nodes --fp8 hybrid",
    "preset": "--preset llama3-405b-8k --only-ranks 0-15,8176-8191",
    "formats": "llama3-8b --tp 2 --dp 2 --set L=2 --machine h100-sxm --format "
    "chakra,astra-sim,simai,goal,scale-sim,hpcc,kineto,perfetto,chrome,pytorch-et",
    "chakra-io": "llama3-8b --tp 2 --set L=2 --format chakra{io=yes} --tensor-names",
    "layers": "llama3-8b --tp 2 --set L=4 --granularity layer --machine h100-sxm --names none",
    "prefill": "llama3-8b --set L=2 --serve prefill --batch 4 --prompt 512 --tp 2",
    "decode": "mixtral-8x7b --set L=2 --serve decode --batch 32 --context 1024 --tp 2 --dp 2 "
    "--ep 2 --weight-dtype fp8 --machine h100-sxm --format chakra,kineto",
    "mixed": "llama3-8b --set L=2 --serve mixed --step decode=8x512,prefill=1x256+0 --tp 2",
    "disaggregated": "llama3-8b --set L=2 --serve disaggregated --batch 8 --prompt 512 "
    "--prefill tp=2 --decode tp=1,dp=2",
    "parts": "whisper-large-v3 --set B=16,L=2,L_dec=2 --tp 2 --dp 2 --part encoder=e:dp=4",
    "requests": "llama3-8b --set L=2 --serve mixed --tp 2 --steps 6 --machine h100-sxm "
    "--requests poisson:rate=50,count=4,prompt=64,output=4,seed=7",
    "lora": "llama3-8b --tp 2 --dp 2 --set L=2 --lora wq,wv",
}
_DECODE = "--serve decode --batch 32 --context 1024"
#: Presets of training.
_TRAINED = ("llama3-405b-8k", "llama3-405b-131k", "deepseek-v3", "megatron-gpt-1t")
_SERVED = ("deepseek-v3-decode", "deepseek-v3-prefill", "llama3-405b-decode", "gemma-3-decode")
#: Models with different blocks.
_FAMILIES = (
    *("bert-base", "clip-vit-large", "deepseek-v3.2", "dit-xl-2", "falcon-h1-0.5b", "flux.1-dev"),
    *("gpt-oss-20b", "jamba-v0.1", "llama3.2-11b-vision", "llama4-scout", "minimax-m1"),
    *("nemotron-h-56b", "qwen3-next-80b-a3b", "rwkv7-1.5b", "t5-base", "whisper-large-v3"),
)
#: Commands whose answers are JSON or a page.
ANSWERS = {
    "validate": "validate --json",
    "analyze": "analyze deepseek-v3 --pp 16 --ep 64 --dp 128 --json",
    "symbolic": "analyze llama3-8b --tp 2 --dp 2 --symbolic --json",
    "analyze-serve": f"analyze llama3-8b {_DECODE} --tp 2 --machine h100-sxm --json",
    "analyze-pods": "analyze llama3-8b --serve disaggregated --batch 8 --prompt 512 --prefill tp=2 "
    "--decode tp=2 --json",
    "analyze-sweep": "analyze llama3-8b --dp 4 --sweep tp=1,2,4 --sweep zero=0,1,3 --json",
    "memory": "memory llama3-8b --tp 2 --dp 4 --zero 3 --json",
    "memory-fit": "memory mixtral-8x7b --pp 2 --dp 4 --ep 4 --set L=8 --fit caching --json",
    "memory-page": "memory llama3-8b --tp 2 --dp 4 --html",
    "time": "time llama3-70b --tp 8 --pp 4 --dp 2 --sp --zero 1 --microbatches 16 --machine "
    "h100-sxm --levers --json",
    "time-serve": f"time mixtral-8x7b {_DECODE} --tp 4 --machine h200 --json",
    "time-parts": "time whisper-large-v3 --set B=16,L=2,L_dec=2 --tp 2 --dp 2 --part "
    "encoder=e:dp=4 --machine h100-sxm --json",
    "time-pods": "time llama3-8b --serve disaggregated --batch 8 --prompt 512 --prefill tp=2 "
    "--decode tp=2 --machine h100-sxm --json",
    "time-draft": "time llama3-70b --serve decode --batch 8 --context 512 --tp 8 --speculative 3 "
    "--machine h100-sxm --draft 'llama3-8b: tp=2' --json",
    "memory-shared": "memory llama3-70b --serve decode --batch 8 --context 512 --tp 8 "
    "--speculative 3 --draft 'llama3-8b: on=model' --json",
    "time-page": "time llama3-8b --tp 2 --dp 4 --zero 3 --machine h100-sxm --html",
    "time-sweep": "time llama3-8b --dp 4 --machine h100-sxm --sweep tp=1,2 --sweep zero=0,3 --json",
    "serve": "serve llama3-8b --serve disaggregated --prefill tp=2 --decode tp=2 --prompt 512 "
    "--output-tokens 64 --batches 4,8 --machine h100-sxm --json",
    "serve-batches": "serve llama3-8b --tp 2 --prompt 512 --output-tokens 64 --batches 1..16 "
    "--machine h100-sxm --json",
    "search": "search llama3-8b --ranks 8 --set L=4,S=2048,B=16 --pp 1 --zero 0,1,3 --machine "
    "h100-sxm --jobs 1 --no-cache --json",
    "search-serve": f"search llama3-8b {_DECODE} --ranks 4 --machine h100-sxm --jobs 1 --no-cache "
    "--tpot 40ms --json",
    "schedule": "schedule zbv --stages 4 --microbatches 8 --json",
    **{name: f"time --preset {name} --machine h100-sxm --json" for name in _TRAINED},
    **{name: f"time --preset {name} --machine h200 --json" for name in _SERVED},
    **{name: f"analyze {name} --dp 2 --json" for name in _FAMILIES},
}
#: The entries of a manifest about its origin, which may change, and its checksum.
_OF_MAKING = ("command", "format", "strategy", "versions", "checksum", "sha256")

#: The entries of a search about its own time.
_OF_CLOCKS = ("seconds", "bound_seconds")


def main() -> int:
    """Record or compare, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("out", type=Path)
    recorder.add_argument("--stagec", default=str(Path(sys.executable).with_name("stagec")))
    comparer = commands.add_parser("compare")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.what == "compare":
        return compare(json.loads(given.before.read_text()), json.loads(given.after.read_text()))
    answers = {name: _job(given.stagec, shlex.split(words)) for name, words in JOBS.items()}
    answers |= {name: _answer(given.stagec, shlex.split(words)) for name, words in ANSWERS.items()}
    given.out.write_text(json.dumps(answers, indent=1))
    return 0


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print a row for each command; 1 if one differs."""
    print(f"{'command':12} {'files':>7} {'bytes':>12}  same")
    wrong = 0
    for name, old in before.items():
        new = after.get(name, {"digests": {}})
        files = {*old["digests"], *new["digests"]}
        other = sorted(f for f in files if old["digests"].get(f) != new["digests"].get(f))
        wrong += bool(other)
        print(
            f"{name:12} {len(files):7} {old['bytes']:12}  {'no: ' + other[0] if other else 'yes'}"
        )
    return int(wrong > 0)


def _job(stagec: str, words: list[str]) -> dict[str, Any]:
    """Digests of the files that a compile writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        _run(stagec, "compile", *words, "-o", str(out), "--quiet", "--name", "job")
        contents = {p.name: _content(p) for p in sorted(out.rglob("*")) if p.is_file()}
    return _record(contents)


def _answer(stagec: str, words: list[str]) -> dict[str, Any]:
    """The digest of each entry of a JSON answer, or of a page."""
    if words[-1] != "--html":
        return _record({n: t.encode() for n, t in _leaves("", json.loads(_run(stagec, *words)))})
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        _run(stagec, *words, str(page))
        return _record({"page": page.read_bytes()})


def _leaves(path: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        members = cast("dict[str, object]", value).items()
        items = [(k, v) for k, v in members if path or k not in _OF_CLOCKS]
    elif isinstance(value, list):
        items = [(str(i), v) for i, v in enumerate(cast("list[object]", value))]
    else:
        yield path, json.dumps(value)
        return
    for key, item in items:
        yield from _leaves(f"{path}.{key}", item)


def _content(path: Path) -> bytes:
    if path.name != "manifest.json":
        return path.read_bytes()
    known = json.loads(path.read_text())
    return json.dumps({k: v for k, v in known.items() if k not in _OF_MAKING}).encode()


def _record(contents: dict[str, bytes]) -> dict[str, Any]:
    digests = {name: hashlib.sha256(text).hexdigest()[:16] for name, text in contents.items()}
    return {"bytes": sum(map(len, contents.values())), "digests": digests}


def _run(stagec: str, *words: str) -> str:
    done = subprocess.run([stagec, *words], check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"stagec {shlex.join(words)}:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
