"""MLCommons Chakra execution traces: encodes and decodes nodes."""
