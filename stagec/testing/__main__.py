"""`python -m stagec.testing ...` is `stagec test ...`."""

import sys

from stagec.driver.cli import main

if __name__ == "__main__":
    sys.exit(main(["test", *sys.argv[1:]]))
