"""Class programs: unrolling a lowered module into the nodes of one rank."""
