"""Tables of measured kernels: files, traces of profilers, packages, and looking kernels up."""
