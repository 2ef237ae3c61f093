"""Version of the package, which records and cards are marked with."""

VERSION = "0.1.0"
