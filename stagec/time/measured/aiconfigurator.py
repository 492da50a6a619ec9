"""Measured tables of the PyPI package aiconfigurator-core; only this module knows its files.

For each framework the newest tables are read; where several frameworks measured a kernel,
`Measured` takes the median. All times are those of consecutive kernels in a CUDA graph (its
collector/helper.py, `benchmark_with_power`), without launch gaps. Some include more than the
kernel: products of f8e4m3 and f4e2m1 quantize their left operand first, attention writes its keys
and values to a cache. The package is licensed under Apache-2.0; nothing of it is copied here.
"""

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagec.support.diagnostics import error
from stagec.time.measured.tables import Table

PACKAGE = "aiconfigurator_core"
#: The folder of tables of each machine.
FOLDERS: Mapping[str, str] = MappingProxyType(
    {
        "a100-80g": "a100_sxm",
        "l40s": "l40s",
        "h100-sxm": "h100_sxm",
        "h200": "h200_sxm",
        "b200": "b200_sxm",
        "b300": "b300_sxm",
        "gb200-nvl72": "gb200",
        "gb300-nvl72": "gb300",
    }
)
_TYPES = MappingProxyType({"bfloat16": "bf16", "fp8": "f8e4m3", "nvfp4": "f4e2m1", "half": "f16"})
Columns: TypeAlias = Mapping[str, NDArray[Any]]
#: From the columns of a file: kind, type, whether causal, the chosen rows, and their extents; the
#: last element may be an op.
Reader: TypeAlias = Callable[[Columns], Iterator[tuple[Any, ...]]]


def read_tables(machine: str, folder: Path | None = None) -> list[Table]:
    """All tables of a machine: products, attention, latent attention, quantization (bound by
    memory) and NCCL. `folder` is that of the package if it is not installed.

    Raises `DiagnosticError` if there are none, or the package cannot be read.
    """
    if machine not in FOLDERS:
        raise error(
            f"aiconfigurator has no tables for machine '{machine}'",
            remedy=f"choose among {', '.join(FOLDERS)}, or give a table of your own (--measured)",
        )
    place = (folder or _installed()) / "systems" / "data" / FOLDERS[machine]
    if not place.is_dir():
        raise error(f"{place}: no such folder", remedy="give the folder of aiconfigurator_core")
    return [table for pattern, read in _READERS.items() for table in _read(place, pattern, read)]


def _installed() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise error(
            "the tables of aiconfigurator are not installed", remedy="pip install 'stagec[kernels]'"
        )
    return Path(spec.submodule_search_locations[0])


def _read(place: Path, pattern: str, read: Reader) -> Iterator[Table]:
    room, name = pattern.split("/")
    for framework in sorted(f for f in (place / room).glob("*") if f.is_dir()):
        files = [v / f"{name}_perf.parquet" for v in framework.iterdir()]
        files = [f for f in files if f.is_file()]
        if files:
            columns = _columns(max(files, key=lambda f: _version(f.parent.name)))
            for kind, dtype, causal, chosen, *extents in read(columns):
                op = extents.pop() if isinstance(extents[-1], str) else ""
                seconds = np.asarray(columns["latency"], float)[chosen] * 1e-3
                rows = np.stack(np.broadcast_arrays(*extents), axis=1)[chosen].astype(np.int64)
                good = np.isfinite(seconds) & (seconds > 0) & (rows > 0).all(axis=1)
                if good.any():
                    yield Table(kind, dtype, causal, rows[good], seconds[good], framework.name, op)


def _version(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def _columns(path: Path) -> Columns:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise error("pyarrow is not installed", remedy="pip install 'stagec[kernels]'") from None
    try:
        table = parquet.read_table(path)
        return {name: table[name].to_numpy() for name in table.column_names}
    except (OSError, ValueError) as problem:  # pyarrow's errors are among them
        raise error(
            f"{path}: cannot read the table: {problem}", remedy="install the package again"
        ) from None


def _by_type(column: NDArray[Any]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    for name in np.unique(column.astype(str)):
        if str(name) in _TYPES:
            yield _TYPES[str(name)], column == name


def _products(c: Columns) -> Iterator[tuple[Any, ...]]:
    one = np.ones_like(c["m"])
    for dtype, chosen in _by_type(c["gemm_dtype"]):
        yield "matmul", dtype, False, chosen, one, c["m"], c["n"], c["k"]


def _plain(c: Columns, dtype: str) -> NDArray[np.bool_]:
    """Which rows have no window, a cache of the type of the operands, and a kernel of a library.
    Kernels in Triton replace them where libraries have none, for heads of 192 or 512 elements."""
    windows = c.get("window_size", np.zeros_like(c["isl"]))
    library = np.char.find(c["kernel_source"].astype(str), "triton") < 0
    plain: NDArray[np.bool_] = (windows == 0) & (c["kv_cache_dtype"] == c[dtype]) & library
    return plain


def _context(c: Columns) -> Iterator[tuple[Any, ...]]:
    heads, queries, width = c["num_heads"], c["isl"], c["head_dim"]
    shared = np.where(c["num_key_value_heads"] == 0, heads, c["num_key_value_heads"])
    plain = _plain(c, "attn_dtype") & (c["step"] == 0)
    for dtype, chosen in _by_type(c["attn_dtype"]):
        yield (
            *("attention", dtype, True, chosen & plain),
            *(c["batch_size"], heads, shared, queries, queries, width, width),
        )


def _decoding(c: Columns) -> Iterator[tuple[Any, ...]]:
    heads, width, one = c["num_heads"], c["head_dim"], np.ones_like(c["isl"])
    shared = np.where(c["num_key_value_heads"] == 0, heads, c["num_key_value_heads"])
    plain = _plain(c, "attn_dtype")
    for dtype, chosen in _by_type(c["attn_dtype"]):
        yield (
            *("attention", dtype, False, chosen & plain),
            *(c["batch_size"], heads, shared, one, c["isl"] + c["step"], width, width),
        )


def _encoder(c: Columns) -> Iterator[tuple[Any, ...]]:
    heads, queries, width = c["num_heads"], c["isl"], c["head_dim"]
    for dtype, chosen in _by_type(c["attn_dtype"]):
        yield (
            *("attention", dtype, False, chosen),
            *(c["batch_size"], heads, heads, queries, queries, width, width),
        )


def _experts(c: Columns) -> Iterator[tuple[Any, ...]]:
    """Gated experts with balanced loads, all on one rank. The extents are experts, tokens of each,
    width and inner width. The time is that of both products and of all between them, so it is not
    that of one kernel."""
    rows = c["num_tokens"] * c["topk"] // c["num_experts"]
    shape = c["num_experts"], rows, c["hidden_size"], c["inter_size"] // c["moe_tp_size"]
    plain = (c["distribution"] == "balanced") & (c["moe_ep_size"] == 1)
    for dtype, chosen in _by_type(c["moe_dtype"]):
        yield "experts", dtype, False, chosen & plain, *shape


def _latent(c: Columns) -> Iterator[tuple[Any, ...]]:
    """Multi-head latent attention of DeepSeek-V3: with heads expanded to 128 + 64 and 128 elements,
    except that FlashAttention absorbs the expansion and has one latent head of 512 + 64 and 512."""
    heads, queries = c["num_heads"], c["isl"]
    absorbed = c["kernel_source"] == "flash_attention"
    shared = np.where(absorbed, 1, heads)
    qk, v = np.where(absorbed, 576, 192), np.where(absorbed, 512, 128)
    plain = _plain(c, "mla_dtype") & (c["step"] == 0)
    for dtype, chosen in _by_type(c["mla_dtype"]):
        yield (
            *("attention", dtype, True, chosen & plain),
            *(c["batch_size"], heads, shared, queries, queries, qk, v),
        )


def _quantization(op: str) -> Reader:
    """Quantization from bf16 to f8e4m3, which moves three bytes an element: by a given scale, or
    with the computation of the scale."""

    def read(c: Columns) -> Iterator[tuple[Any, ...]]:
        yield "memory", "", False, c["quant_dtype"] == "fp8", 3 * c["m"] * c["k"], op

    return read


def _nccl(c: Columns) -> Iterator[tuple[Any, ...]]:
    """Collectives by ranks and bytes of the whole buffer, as nccl-tests count them."""
    size = c["message_size"] * np.where(c["nccl_dtype"] == "half", 2, 1)
    for name in np.unique(c["op_name"].astype(str)):
        kind = "all_to_all" if name == "alltoall" else str(name)
        yield kind, "", False, c["op_name"] == name, c["num_gpus"], size


_READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "gemm/gemm": _products,
        "attention/context_attention": _context,
        "attention/generation_attention": _decoding,
        "encoder_attention/encoder_attention": _encoder,
        "mla/context_mla": _latent,
        "moe/moe": _experts,
        "quantize/scale_matrix": _quantization("quantize"),
        "quantize/computescale": _quantization("find_scale"),
        "comm/nccl": _nccl,
    }
)
