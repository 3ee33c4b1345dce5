"""Benchmarks: ``python -m benchmarks.<name>`` writes benchmarks/results/, ``python -m benchmarks.plot`` draws them."""
