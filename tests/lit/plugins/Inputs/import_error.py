"""A file that needs what is not there."""

import importlib

importlib.import_module("no_such_module_of_this_name")
