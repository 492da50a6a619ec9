"""`--sweep`: rows of many jobs, as tables, files and plots."""
