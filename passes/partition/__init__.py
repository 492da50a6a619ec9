"""From the global view to ranks: placements, and the collectives that they need."""
