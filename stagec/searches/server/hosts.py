"""The flags of engines for a worker on several hosts, and the lines before its command.

Each host runs the same script. `NODE_RANK` is the number of the host, `LEADER` the address of host
0. Sources: `--nnodes` and `--data-parallel-size-local` of `vllm serve`, `--dist-init-addr` of
`sglang.launch_server`, and `trtllm-llmapi-launch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagec.searches.server.launch import LaunchedWorker

_RENDEZVOUS = 5000
_NUMBERED = """: "${NODE_RANK:?set NODE_RANK to the number of this host, from 0 on}"
: "${LEADER:?set LEADER to the address of host 0}"
"""
#: Other hosts than the first one take no requests.
_HEADLESS = '[ "$NODE_RANK" = 0 ] && HEADLESS= || HEADLESS=--headless\n'


def vllm_hosts(worker: LaunchedWorker) -> tuple[list[str], str]:
    """The flags and lines of vLLM: groups of data parallelism are shared out among hosts, or ranks
    of the one group are."""
    layout, hosts = worker.layout, worker.hosts
    if hosts == 1:
        return [], ""
    if layout.dp == 1:
        words = [
            "--nnodes",
            str(hosts),
            "--node-rank",
            '"$NODE_RANK"',
            "--master-addr",
            '"$LEADER"',
        ]
    elif layout.dp % hosts:
        return [], f"# a worker has {hosts} hosts, which do not divide its {layout.dp} groups\n"
    else:
        local = layout.dp // hosts
        words = ["--data-parallel-size-local", str(local)]
        words += ["--data-parallel-start-rank", f"$((NODE_RANK * {local}))"]
        words += ["--data-parallel-address", '"$LEADER"']
        words += ["--data-parallel-rpc-port", str(_RENDEZVOUS)]
    return [*words, "$HEADLESS"], _NUMBERED + _HEADLESS


def sglang_hosts(worker: LaunchedWorker) -> tuple[list[str], str]:
    """The flags and lines of SGLang."""
    if worker.hosts == 1:
        return [], ""
    words = ["--nnodes", str(worker.hosts), "--node-rank", '"$NODE_RANK"']
    return [*words, "--dist-init-addr", f'"$LEADER:{_RENDEZVOUS}"'], _NUMBERED


def trtllm_hosts(worker: LaunchedWorker) -> list[str]:
    """The command before that of TensorRT-LLM, whose ranks are those of MPI."""
    hosts, ranks = worker.hosts, worker.layout.ranks * worker.layout.pp
    if hosts == 1:
        return []
    words = ["srun", "--nodes", str(hosts), "--ntasks", str(ranks)]
    return [*words, "--ntasks-per-node", str(ranks // hosts), "--mpi=pmix", "trtllm-llmapi-launch"]
