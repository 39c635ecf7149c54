"""Inspection of prepared datasets: verify, explain, compare, sweep thresholds."""
