"""The broadcast benchmark: `python -m benchmarks.broadcast`."""
