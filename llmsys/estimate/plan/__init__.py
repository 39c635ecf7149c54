"""Which layout a run should use on a cluster: every legal one, pruned by memory and ranked by time."""
