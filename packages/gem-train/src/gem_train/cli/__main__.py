"""`python -m gem_train.cli` is the command `gem` where no script is installed."""

import sys

from gem_train.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
