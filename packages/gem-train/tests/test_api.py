import subprocess
import sys

import gem_train


def test_public_names_are_pinned() -> None:
    assert gem_train.__all__ == [
        "BinaryMetrics",
        "CheckpointError",
        "Checkpointer",
        "ConfigError",
        "Evaluation",
        "NonFiniteError",
        "RunLog",
        "SampleBalancer",
        "TrainResult",
        "Trainer",
        "TrainerConfig",
        "World",
        "__version__",
        "data",
        "evaluate",
        "protocols",
        "write_report",
    ]
    assert all(hasattr(gem_train, name) for name in gem_train.__all__)


def test_the_library_imports_no_other_package_of_the_project() -> None:
    """Model, precision and kernels arrive through protocols; only recipes and the command line import them."""
    code = (
        "import sys, gem_train, gem_train.launch, gem_train.doctor, gem_train.cli.main\n"
        "found = {name.split('.')[0] for name in sys.modules} & {'gem_model', 'gem_precision', 'gem_kernels'}\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
