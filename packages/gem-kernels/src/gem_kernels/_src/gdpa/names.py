"""The activation names of GDPA, free of imports so that the public function can check them without Triton."""

ACTIVATION_NAMES = (
    "raw",
    "gelu",
    "gelu_approx",
    "fast_gelu",
    "leaky_relu",
    "relu",
    "silu",
    "fast_silu",
    "hardswish",
    "relu_square",
    "fast_gelu_taylor_approx",
)
