"""memc: a compiler for training memory."""

__version__ = "0.1.0"
