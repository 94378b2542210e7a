"""Benchmarks: `python -m bench.NAME [--quick] [--check [GROUP]] [--json FILE]`. Each prints a table, then one JSON line."""
