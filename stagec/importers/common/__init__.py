"""What the readers of many families share: from keys of a configuration to parts of a text."""
