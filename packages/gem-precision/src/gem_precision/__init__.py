from gem_precision._version import __version__

__all__ = ["__version__"]
