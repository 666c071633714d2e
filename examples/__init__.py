"""What people run and read: demo, benchmarks, replay, figures."""
