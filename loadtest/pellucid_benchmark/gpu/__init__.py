"""What `gpu_check` runs, each part in a process of its own: `python -m pellucid_benchmark.gpu PART DEVICE`."""
