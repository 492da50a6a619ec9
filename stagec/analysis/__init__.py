"""Counting: FLOPs, communication, memory and nodes of a lowered module, symbolic or bound."""
