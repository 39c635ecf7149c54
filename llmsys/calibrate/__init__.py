"""Measure a machine's kernels and collectives into a device profile for the estimate."""
