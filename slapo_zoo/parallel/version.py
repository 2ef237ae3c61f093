"""Version of the package, which is written into measurements and cards."""

VERSION = "0.1.0"
