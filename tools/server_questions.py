"""The comparison of servers that `stagec search --serve server` picks with those of aiconfigurator.

`tools/server_questions.csv` has questions, the answers of aiconfigurator 0.12.0 (Apache-2.0, PyPI)
with its tables of vLLM 0.24, and those of the search. `python -m tools.server_questions` prints the
table of docs/server-search.md; `ask` runs the search again, `record --with FILE` the
`aiconfigurator` that is installed there; `estimate --with FILE` lets it estimate the servers that
the search picked. Names of questions restrict each of them. `measured --with FILE` compares the
times between tokens of both with measured servers of vLLM on the given machines.

Throughputs are output tokens per second and rank; seconds are those of one processor.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import resource
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from stagec.jobs.request.options import JobOptions
from stagec.searches.server.launch import layout_of
from stagec.validation.measured_servers import MeasuredServer, measured_servers

FILE = Path(__file__).with_name("server_questions.csv")
Row = dict[str, str]
#: The columns of a question, and those of an answer after `their_` or `our_`.
QUESTION = (
    *("name", "their_model", "model", "sizes", "weight_dtype", "their_system", "machine"),
    *("ranks", "prompt", "output", "ttft_ms", "tpot_ms"),
)
ANSWER = ("mode", "server", "per_rank", "aggregated", "disaggregated", "seconds")
MODES = ("aggregated", "disaggregated")
HEADS = (
    *("question", "its pick", "tokens/s/rank", "ours", "tokens/s/rank"),
    *("as it estimates ours", "by its tables alone"),
    *("gain of disaggregation, its and ours", "CPU-s, its and ours"),
)
#: The factor by which aiconfigurator multiplies the rates of pools that prefill (its
#: `rate_match_prefill_degradation`); that of pools that decode is 0.92.
PREFILL_FACTOR = 0.9
#: The columns of aiconfigurator's estimate for the server that the search picked.
ESTIMATE = ("estimated", "estimated_tpot_ms")
#: Its names of quantized products, with one scale for activations, and with blocks of 16.
_PRODUCTS = {"fp8": "fp8_static", "nvfp4": "nvfp4"}


def main() -> None:
    """Print the table, or ask again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = ("table", "ask", "record", "estimate", "measured")
    parser.add_argument("what", choices=what, nargs="?")
    parser.add_argument("names", nargs="*", help="questions, all by default")
    parser.add_argument("--with", dest="tool", help="aiconfigurator's command")
    given = parser.parse_args()
    with FILE.open(encoding="utf-8", newline="") as stream:
        rows = [dict(row) for row in csv.DictReader(stream)]
    if given.what in (None, "table"):
        print(table(rows))
        return
    if given.what == "measured":
        print("\n".join(compared(given.tool, given.names)))
        return
    for row in rows:
        if given.names and row["name"] not in given.names:
            continue
        if given.what == "ask":
            row.update(asked(row))
        elif given.what == "record":
            row.update(recorded(row, given.tool))
        else:
            row.update(estimated(row, given.tool))
        write(rows)
        print(row["name"], {k: v for k, v in row.items() if k not in QUESTION}, flush=True)


def write(rows: Sequence[Row]) -> None:
    """Write all questions and answers."""
    columns = [*QUESTION, *(f"{who}_{what}" for who in ("their", "our") for what in ANSWER)]
    with FILE.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, [*columns, "our_flags", *ESTIMATE], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def run(words: Sequence[str]) -> tuple[str, float]:
    """The output of a command, and the processor seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{shlex.join(words)}: {done.stderr[-2000:]}")
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# -- the search ------------------------------------------------------------------------------------


def asked(row: Row) -> Row:
    """The answer of the search."""
    words = [sys.executable, "-m", "stagec", "search", row["model"], "--serve", "server"]
    words += ["--stack", "vllm", "--ranks", row["ranks"], "--machine", row["machine"]]
    words += ["--prompt", row["prompt"], "--output-tokens", row["output"]]
    words += ["--ttft", f"{row['ttft_ms']}ms", "--tpot", f"{row['tpot_ms']}ms"]
    words += ["--set", row["sizes"]] if row["sizes"] else []
    words += ["--weight-dtype", row["weight_dtype"]] if row["weight_dtype"] != "bf16" else []
    text, seconds = run([*words, "--jobs", "1", "--verify", "0", "--json"])
    return answer(json.loads(text), seconds)


def answer(data: Mapping[str, Any], seconds: float) -> Row:
    """Columns of an answer of the search."""
    best = data["best"][0]
    texts = [
        f"{p['replicas']} x {_short(p['strategy'])}, {name}{p['batch']}"
        for name, p in (("prefill ", best["prefill"]), ("", best["decode"]))
        if p is not None
    ]
    flags = {p: best[p] and [best[p][n] for n in _POOL] for p in ("prefill", "decode")}
    modes = {m: data["modes"][m] and data["modes"][m]["per_rank"] for m in MODES}
    return {
        "our_mode": best["mode"],
        "our_server": " + ".join(texts),
        "our_per_rank": _number(best["per_rank"]),
        **{f"our_{m}": _number(figure) for m, figure in modes.items()},
        "our_seconds": f"{seconds:.1f}",
        "our_flags": json.dumps(flags),
        **dict.fromkeys(ESTIMATE, ""),
    }


def _short(strategy: str) -> str:
    """The flags without those of the question, in the form in which the other tool names
    layouts."""
    plain = re.sub(r"--weight-dtype \w+", "", strategy).replace("one rank", "")
    return re.sub(r"--| ", "", plain) or "tp1"


_POOL = ("strategy", "replicas", "batch")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


# -- aiconfigurator --------------------------------------------------------------------------------


def about(row: Row) -> list[str]:
    """The common arguments of aiconfigurator."""
    return [
        *("--model-path", row["their_model"], "--system", row["their_system"]),
        *("--backend", "vllm", "--isl", row["prompt"], "--osl", row["output"]),
    ]


def recorded(row: Row, tool: str) -> Row:
    """Its answer."""
    with tempfile.TemporaryDirectory() as folder:
        words = [tool, "cli", "default", *about(row), "--total-gpus", row["ranks"]]
        words += ["--ttft", row["ttft_ms"], "--tpot", row["tpot_ms"]]
        _, seconds = run([*words, "--save-dir", folder, "--top-n", "1"])
        return pick(Path(folder), int(row["ranks"]), seconds)


def pick(folder: Path, ranks: int, seconds: float) -> Row:
    """The columns of an answer for this number of ranks, from the files that it saved in a
    folder."""
    best: dict[str, Row] = {}
    for path in folder.rglob("best_config_topn.csv"):
        with path.open(encoding="utf-8", newline="") as stream:
            mode = "disaggregated" if path.parent.name == "disagg" else "aggregated"
            best.update((mode, dict(row)) for row in list(csv.DictReader(stream))[:1])
    rates = {mode: float(row["tokens/s/gpu_cluster"]) for mode, row in best.items()}
    mode = max(rates, key=lambda m: rates[m])
    row = best[mode]
    if mode == "aggregated":
        copies = ranks // int(row["num_total_gpus"])
        server = f"{copies} x {row['parallel']}, {row['global_bs']}"
    else:
        server = " + ".join(
            f"{row[f'({p})workers']} x {row[f'({p})parallel']}, {name}{row[f'({p})global_bs']}"
            for p, name in (("p", "prefill "), ("d", ""))
        )
    return {
        "their_mode": mode,
        "their_server": re.sub(r"pp1|dp1(?=e)|etp1ep1", "", server),
        "their_per_rank": _number(rates[mode]),
        **{f"their_{m}": _number(rates.get(m)) for m in MODES},
        "their_seconds": f"{seconds:.1f}",
    }


def estimated(row: Row, tool: str) -> Row:
    """Its estimate of the server that the search picked."""
    flags = json.loads(row["our_flags"])
    words = [tool, "cli", "estimate", *about(row)]
    ranks = 0
    if flags["prefill"] is None:
        sizes, groups, ranks = _layout(row, flags["decode"])
        words += ["--estimate-mode", "agg", *_sized("--", sizes)]
        words += ["--batch-size", str(flags["decode"][2] // groups)]
        ranks *= flags["decode"][1]
        copies = flags["decode"][1]
    else:
        words += ["--estimate-mode", "disagg"]
        copies = 1
        for pod in ("prefill", "decode"):
            sizes, groups, each = _layout(row, flags[pod])
            words += _sized(f"--{pod}-", sizes)
            words += [f"--{pod}-batch-size", str(flags[pod][2] // groups)]
            words += [f"--{pod}-num-workers", str(flags[pod][1])]
            ranks += each * flags[pod][1]
    text, _ = run(words)
    total = float(_figure(text, "tokens/s:").replace(",", "")) * copies
    return {
        "estimated": _number(total / int(row["ranks"])),
        "estimated_tpot_ms": _figure(text, "TPOT:"),
    }


def _figure(text: str, name: str) -> str:
    match = re.search(rf"{name}\s+([0-9.,]+)", text)
    return match[1] if match else "nan"


def _layout(row: Row, pool: Sequence[Any]) -> tuple[dict[str, int], int, int]:
    """The sizes of a worker in the form of aiconfigurator, the number of groups with separate
    sequences, and the ranks."""
    words = iter(shlex.split(str(pool[0])) if pool[0] != "one rank" else [])
    flags: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            flags[name] = True
        else:
            flags[name] = int(word) if word.isdigit() else word
    experts = "A3B" in row["their_model"]
    layout = layout_of(JobOptions(row["model"], **flags), experts=experts)
    sizes = {"tp": layout.tp, "pp": layout.pp, "attention-dp": layout.dp}
    if experts:
        sizes |= {"moe-tp": layout.moe_tp, "moe-ep": layout.ep}
    return sizes, layout.dp, layout.ranks * layout.pp


def _sized(prefix: str, sizes: Mapping[str, int]) -> list[str]:
    return [word for name, n in sizes.items() for word in (f"{prefix}{name}-size", str(n))]


# -- measured servers ------------------------------------------------------------------------------


def compared(tool: str, machines: Sequence[str]) -> Iterator[str]:
    """The median signed and absolute errors by device of the times between tokens of measured
    servers of Llama 70B that both predict."""
    errors: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for server in measured_servers("engines"):
        if machines and server.machine not in machines:
            continue
        if server.judged and server.stack == "vllm" and server.model == "llama3-70b":
            theirs = between_tokens(server, tool)
            if theirs is not None:
                ours = server.predicted()[1]
                errors[server.machine].append((theirs / server.tpot - 1, ours / server.tpot - 1))
    for machine, pairs in errors.items():
        medians = [
            f"{who} {median(each):+.1%} ({median(abs(e) for e in each):.1%})"
            for who, each in zip(("its", "ours"), zip(*pairs, strict=True), strict=True)
        ]
        yield f"{machine}: {len(pairs)} servers, {', '.join(medians)}"


def between_tokens(server: MeasuredServer, tool: str) -> float | None:
    """The estimated seconds between tokens of a measured server of Llama 70B; None if it does not
    fit according to aiconfigurator."""
    flags, system = server.flags, server.machine.partition("-")[0] + "_sxm"
    words = [tool, "cli", "estimate", "--estimate-mode", "agg", "--backend", "vllm"]
    words += ["--model-path", "meta-llama/Meta-Llama-3.1-70B", "--system", system]
    words += ["--isl", str(flags["prompt"]), "--osl", str(server.output)]
    words += ["--batch-size", str(server.batch), "--tp-size", str(flags.get("tp", 1))]
    words += ["--ctx-tokens", str(flags.get("step_tokens", 8192) - server.batch)]
    words += ["--gemm-quant-mode", _PRODUCTS[flags["weight_dtype"]]]
    words += ["--kvcache-quant-mode", "fp8"] if flags.get("kv_dtype") == "fp8" else []
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    figure = _figure(done.stdout, "TPOT:")
    return None if figure == "nan" else float(figure) * 1e-3


# -- the table -------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """The answers side by side, as Markdown."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for row in rows:
        what = row["their_model"].rpartition("/")[2].removeprefix("Meta-")
        system = row["their_system"].partition("_")[0].upper()
        question = (
            f"{what}, {row['ranks']} {system}, {row['prompt']} and {row['output']} tokens, "
            f"TTFT {row['ttft_ms']} ms, TPOT {row['tpot_ms']} ms"
        )
        gains = " and ".join(_gain(row, who) for who in ("their", "our"))
        estimated, alone = "", ""
        if row.get("estimated"):
            estimated = f"{float(row['estimated']) / float(row['their_per_rank']) - 1:+.1%}"
            alone = f"{_ours_alone(row) / _theirs_alone(row) - 1:+.1%}"
        cells = [question, row["their_server"], row["their_per_rank"], row["our_server"]]
        cells += [row["our_per_rank"], estimated, alone, gains]
        cells += [f"{row['their_seconds']} and {row['our_seconds']}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ours_alone(row: Row) -> float:
    """Tokens per second and rank of our pick by its tables, without its factors. For two pools it
    estimates min(0.9 p, 0.92 d) from rates p and d, and d follows from the time between tokens; so
    min(p, d) is the smaller one of d and its estimate over 0.9."""
    estimated, flags = float(row["estimated"]), json.loads(row["our_flags"])
    if flags["prefill"] is None:
        return estimated
    _, workers, batch = flags["decode"]
    output = int(row["output"])
    sequences = float(workers * batch) / ((output - 1) * float(row["estimated_tpot_ms"]) * 1e-3)
    return min(estimated / PREFILL_FACTOR, sequences * output / int(row["ranks"]))


def _theirs_alone(row: Row) -> float:
    """An upper bound of the same for its own pick."""
    factor = PREFILL_FACTOR if row["their_mode"] == "disaggregated" else 1.0
    return float(row["their_per_rank"]) / factor


def _gain(row: Row, who: str) -> str:
    one, two = (row[f"{who}_{mode}"] for mode in MODES)
    return f"{float(two) / float(one):.2f}" if one and two else "-"


if __name__ == "__main__":
    main()
