from gem_parallel._version import __version__

__all__ = ["__version__"]
