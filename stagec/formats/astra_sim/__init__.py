"""ASTRA-sim: Chakra traces, and the files that tell the simulator of the machine."""
