"""Random numbers that do not depend on the layout: the stream, its seeds on a device, generators.

Imports `parallel` and `errors`.
"""
