"""The comparison of published figures and measurements with computed ones. The published data are
in separate distributions."""
