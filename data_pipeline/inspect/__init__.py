"""What a dataset folder holds, held against what its manifest says."""
