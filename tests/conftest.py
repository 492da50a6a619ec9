"""What holds for all tests."""

from __future__ import annotations

import gc

# Modules are graphs of many objects, and what a worker remembers grows with its tests: to go
# through all of that at every turn takes a fifth of the time.
gc.set_threshold(50_000, 50, 50)
