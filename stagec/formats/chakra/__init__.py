"""MLCommons Chakra execution traces: nodes to bytes and back; the one place that knows protobuf."""
