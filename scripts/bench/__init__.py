"""Benchmarks: `python -m headstart.bench.train`, `.scaling` and `.decode`."""
