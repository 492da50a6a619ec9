"""PyTorch as a judge of memory plans: the steps of a validation source, run by PyTorch on one CPU
under fake tensors and fake process groups, and what its storages hold, by category."""
