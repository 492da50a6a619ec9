"""ASTRA-sim: Chakra traces, and the files that describe the machine to the simulator."""
