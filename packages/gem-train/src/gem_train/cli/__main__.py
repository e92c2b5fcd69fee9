"""`python -m gem_train.cli` is the command `gem` where no script is installed."""

from gem_train.cli.main import command

if __name__ == "__main__":
    command()
