"""Sources, locations, diagnostics and limits, which all other layers use."""
