"""The parts of the fuzzer: mutations, and the families of inputs."""
