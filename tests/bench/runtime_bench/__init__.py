"""The parts of bench_runtime.py: what each measures, and against what."""
