"""Comparisons of this package with what one would use instead, side by side on this machine: `python -m benchmarks`."""
