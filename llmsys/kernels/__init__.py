"""The choice of kernels for a device, without torch."""
