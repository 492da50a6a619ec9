"""The command line and the compile driver."""
