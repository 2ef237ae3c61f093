"""Version of the package, which is written into measurements and into cards (published schedules)."""

VERSION = "0.1.0"
