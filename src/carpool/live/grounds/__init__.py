"""Where the nodes of a cluster come from."""
