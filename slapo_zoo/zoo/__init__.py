"""Sharding rules for models of `transformers`: one table per model family, derivation of tables, options, kernels.

A table is found by the model_type of a config: it is the file of that name in `schedules/`, with _ for -.
The package imports `pipeline`, `weights` and the packages that CONTRIBUTING.md lists below these two.
"""
