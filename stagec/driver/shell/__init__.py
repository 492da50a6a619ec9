"""The command line from the records of options: click options, sections of help, completion."""
