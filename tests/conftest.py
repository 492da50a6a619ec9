"""What holds for all tests."""

from __future__ import annotations

import gc

from hypothesis import settings

# Modules are graphs of many objects, and what a worker remembers grows with its tests: to go
# through all of that at every turn takes a fifth of the time.
gc.set_threshold(50_000, 50, 50)

# The same examples in every run, so that a run is red for what was changed since the one before;
# `pytest --hypothesis-profile=random` looks for new ones. `make test` tries a third of them.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("quick", derandomize=True, max_examples=33)
settings.register_profile("random")
settings.load_profile("fixed")
