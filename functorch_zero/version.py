"""The version, which ranks compare before they train together."""

__version__ = "0.1.0"
