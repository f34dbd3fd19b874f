"""What machines and runs teach: micro-benchmarks, the curves fitted to them, and what forecasts missed."""
