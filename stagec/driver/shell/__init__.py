"""What makes a command line of the records of options: click options, sections of the help, what a
shell completes."""
