"""The version of this package, for whoever shows it."""

__all__ = ["__version__"]

__version__ = "0.2.0"
