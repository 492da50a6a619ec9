"""How long a step takes: from the nodes of programs and a machine to times, and why."""
