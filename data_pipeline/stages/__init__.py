"""Task functions of the stages: each reads files and writes files."""
