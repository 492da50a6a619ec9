"""Constants of machines that fit measured kernels and collectives best."""
