"""From a partitioned function to the nodes of traces."""
