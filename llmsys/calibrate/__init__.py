"""Measuring a machine: kernels and collectives, into a device profile that the estimate reads."""
