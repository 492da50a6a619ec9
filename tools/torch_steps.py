"""Time the steps of `validation/transformers-h200` on the local GPU: `python -m tools.torch_steps
--out FILE`.

Needs PyTorch, transformers and peft, and nothing else of this project. Each step is that of
Trainer: forward with labels, backward, gradient clipping, fused AdamW. FILE is JSON and has the
seconds of each row and of its parts, bytes of the allocator, and the GPU's time by kind of kernel.
`--device cpu --quick` tests it without a GPU, with small models.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

SOURCE = Path(__file__).parents[1] / "validation" / "transformers-h200"
#: What a kernel's name contains, by kind; the first that matches counts.
KINDS = {
    "attention": ("flash", "fmha", "cudnn_generated_fort", "efficient_attention"),
    "optimizer": ("multi_tensor", "LpNorm"),
    "grouped": ("GroupProblem", "grouped"),
    "products": ("nvjet", "gemm", "cutlass", "cublas", "splitK", "gemv", "dot_kernel"),
    "loss": ("SoftMax", "softmax", "nll_loss"),
    "rows": ("index", "embedding", "gather", "scatter", "sort", "topk", "Radix"),
    "reduce": ("reduce_kernel", "layer_norm", "GammaBeta"),
    "copies": ("Memcpy", "Memset", "copy_kernel", "CatArray", "FillFunctor"),
    "elementwise": ("elementwise", "triton_"),
}
#: The number of timed steps, after two others.
_STEPS = 5


class Run:
    """The model of a row with its optimizer, and a step of it."""

    def __init__(self, row: dict[str, str], device: str, *, quick: bool) -> None:
        torch.manual_seed(0)
        sizes = json.loads((SOURCE / row["model"]).read_text())
        config = transformers.AutoConfig.for_model(**(_small(sizes) if quick else sizes))
        config.use_cache = False
        dtype = torch.float32 if row["flags.autocast"] else torch.bfloat16
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model: Any = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=row["flags.attention"] or "sdpa"
            )
        torch.set_default_dtype(torch.float32)
        model.to(dtype).train()
        if row["flags.recompute"]:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if names := row["notes.lora"]:
            lora = peft.LoraConfig(r=16, lora_alpha=16, target_modules=names.split(","))
            model = peft.get_peft_model(model, lora)
        self.model = model
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-5, fused=device != "cpu")
        shape = (1, 64) if quick else (int(row["sizes.B"]), int(row["sizes.S"]))
        self.tokens = torch.randint(0, config.vocab_size, shape, device=device)
        self.autocast: Callable[[], Any] = nullcontext
        if row["flags.autocast"]:
            self.autocast = lambda: torch.autocast(device, dtype=torch.bfloat16)

    def forward(self) -> torch.Tensor:
        with self.autocast():
            loss: torch.Tensor = self.model(input_ids=self.tokens, labels=self.tokens).loss
        return loss

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.model.zero_grad()

    def step(self) -> None:
        self.forward().backward()
        self.update()


def _small(sizes: dict[str, Any]) -> dict[str, Any]:
    """The sizes of a model with the same architecture for a CPU."""
    few = {"num_hidden_layers": 2, "n_layer": 2, "vocab_size": 512, "n_embd": 200}
    narrow = {"intermediate_size", "ffn_dim", "moe_intermediate_size"}
    made = {name: few.get(name, value) for name, value in sizes.items()}
    return made | {name: made[name] // 16 for name in narrow & made.keys()}


def _timed(run: Run) -> dict[str, Any]:
    """The seconds of consecutive steps, and their peak of bytes."""
    for _ in range(2):
        run.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run.step()
        mark.record()
    torch.cuda.synchronize()
    spans = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    return {
        "seconds": statistics.median(spans),
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def _parts(run: Run) -> dict[str, float]:
    """The seconds of forward, backward and the update, each synchronized, and bytes between
    them."""
    made: dict[str, float] = {"before": torch.cuda.memory_allocated()}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        result = call()
        torch.cuda.synchronize()
        made[name] = time.perf_counter() - begin
        made[f"after_{name}"] = torch.cuda.memory_allocated()
        return result

    loss = timed("forward", run.forward)
    timed("backward", loss.backward)
    del loss
    timed("update", run.update)
    return made


def _kernels(run: Run) -> dict[str, Any]:
    """The GPU's time of a step by kind of kernel, and its longest kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run.step()
        torch.cuda.synchronize()
    times, calls, kinds = Counter[str](), Counter[str](), Counter[str]()
    for event in profiler.profiler.kineto_results.events():
        name, spent = event.name(), event.duration_ns()
        if str(event.device_type()).endswith("CUDA") and spent > 0:
            times[name] += spent
            calls[name] += 1
            kinds[_kind(name)] += spent
    return {
        "launches": calls.total(),
        "busy": times.total() / 1e9,
        "kinds": {name: spent / 1e9 for name, spent in kinds.most_common()},
        "top": [(name[:160], calls[name], spent / 1e9) for name, spent in times.most_common(40)],
    }


def _kind(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(p in name for p in parts)), "other")


def _record(row: dict[str, str], device: str, *, quick: bool) -> dict[str, Any]:
    run = Run(row, device, quick=quick)
    if device == "cpu":
        begin = time.perf_counter()
        run.step()
        return {"seconds": time.perf_counter() - begin}
    return {**_timed(run), "parts": _parts(run), **_kernels(run)}


def main() -> int:
    """The exit code: 1 if a step failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.torch_steps", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--row", default="", metavar="TEXT", help="rows with TEXT in their titles")
    args = parser.parse_args()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    steps: dict[str, Any] = {}
    with (SOURCE / "rows.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if args.row in row["row"]]
    for row in rows:
        try:
            steps[row["row"]] = _record(row, args.device, quick=args.quick)
        except Exception as error:  # a failure of one model does not stop the others
            steps[row["row"]] = {"error": f"{type(error).__name__}: {error}"[:400]}
        done = steps[row["row"]]
        print(f"{row['row']}: {done.get('seconds', done.get('error'))}", file=sys.stderr)
        gc.collect()
        if args.device != "cpu":
            torch.cuda.empty_cache()
        args.out.write_text(json.dumps({**versions, "steps": steps}, indent=1))
    return int(any("error" in each for each in steps.values()))


if __name__ == "__main__":
    sys.exit(main())
