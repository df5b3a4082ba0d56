"""The version, in a module of its own so that the host half can say it."""

__version__ = "0.1.0"
