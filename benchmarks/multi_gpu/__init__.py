"""Parts of ``bench_multi_gpu.py``: correctness, collectives, scaling and prediction on the GPUs of one host."""
