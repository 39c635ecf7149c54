"""Repair of text that was decoded with the wrong encoding."""
