"""Sources, locations and diagnostics: what every other layer stands on."""
