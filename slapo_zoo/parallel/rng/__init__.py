"""Random numbers that do not depend on the sharding: dropout masks seeded by module, step and batch row, their seeds on
a device, and named states of torch's generators.

The package imports `parallel` and `errors`.
"""
