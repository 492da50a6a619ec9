"""`python -m stagec` is `stagec`."""

from stagec.driver.cli import entry

entry()
