"""Shows whether a change of structure changes a result: what recorded commands give, before and
after.

`python tools/same.py record DIR` runs the commands below with the installed `stagec` (`--stagec
FILE` with another one) and keeps digests of all they write. `python tools/same.py compare BEFORE
AFTER` prints a table, and fails if a digest differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
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
}
#: Answers beside traces.
ANSWERS = {
    "validate": ("validate", "--json"),
    "analyze": ("analyze", "deepseek-v3", "--pp", "16", "--ep", "64", "--dp", "128", "--json"),
}
#: What a manifest says of its making, which may change, and its checksum of itself.
_OF_MAKING = ("command", "format", "strategy", "versions", "checksum", "sha256")


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
    found = {name: _job(given.stagec, words.split()) for name, words in JOBS.items()}
    found |= {name: _answer(given.stagec, words) for name, words in ANSWERS.items()}
    given.out.write_text(json.dumps(found, indent=1))
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


def _answer(stagec: str, words: tuple[str, ...]) -> dict[str, Any]:
    """The digest of each entry of a JSON answer."""
    return _record({n: t.encode() for n, t in _leaves("", json.loads(_run(stagec, *words)))})


def _leaves(path: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        items = [*cast("dict[str, object]", value).items()]
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
        sys.exit(f"stagec {' '.join(words)}:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
