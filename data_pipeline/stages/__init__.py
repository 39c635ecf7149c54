"""What one task of each stage does, from files to files."""
