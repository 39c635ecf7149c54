"""Text that was decoded with the wrong encoding, mended."""
