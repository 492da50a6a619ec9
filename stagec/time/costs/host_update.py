"""The update of parameters by a CPU, where the states of the optimizer are (DeepSpeedCPUAdam):

    seconds = bytes / (share x bandwidth of host memory / ranks on a host)

The bytes are those that the update reads and writes: 28 to 32 for an element with a master copy and
two moments in fp32. Cores compute faster than memory moves them. The ranks of a host update at the
same time.

The share follows from table 4 of ZeRO-Offload (arXiv 2101.06840): 0.22, 0.51, 1.03, 2.41 and 2.57 s
for 1, 2, 4, 8 and 10 billion elements on two Xeon 8168 of six channels of DDR4-2666 (256 GB/s).
With 28 bytes that is 0.36 to 0.50 of the bandwidth; the median is taken.
"""

from stagec.machines import Machine

SHARE = 0.43


def host_update_seconds(machine: Machine, size: int, ranks: int) -> float:
    """Seconds in which the host of a rank updates states, which move `size` bytes; `ranks` is the
    number of ranks of the job."""
    host = machine.host
    if host.memory is None:
        return size / host.bandwidth.value
    return size * min(ranks, host.devices) / (SHARE * host.memory.value)
