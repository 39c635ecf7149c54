"""Search for the layout of a run on a cluster: all legal ones, pruned by memory, ranked by time."""
