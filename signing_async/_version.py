"""The version of the package. It is apart so that every module can import it."""

__version__ = "0.1.0"
