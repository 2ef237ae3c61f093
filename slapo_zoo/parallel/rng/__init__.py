"""Random numbers that are the same for every sharding: the random stream, its seeds on a device, generators.

It imports `parallel` and `errors`.
"""
