"""The mechanics of the IR: expressions, types, operations, op definitions, building, verifying."""
