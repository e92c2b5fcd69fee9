"""Choices of tuning as its tests make them."""

from gem_kernels._src.tuning.choices import Choice, Key, MadeFor

HERE = MadeFor(gpu="NVIDIA H200", capability=(9, 0), triton="3.6.0", gem_kernels="0.1.0", candidates="abc")
KEY = Key("gdpa", "forward", "bfloat16", "D128", "long-long")
FAST = {"block_m": 128, "block_n": 128, "num_warps": 8, "num_stages": 2}
DEFAULT = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 3}


def choice(key=KEY, config=FAST, ms=0.5):
    return Choice(key, config, ms, DEFAULT, 1.0)
