"""The files of `stagec memory`: pages and snapshots."""
