"""Search: spaces of strategies, lower bounds, the best of them, and why others lose."""
