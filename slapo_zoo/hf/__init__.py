"""Everything taken from `transformers`: attention interface, classes and configs, example inputs, own models.

Imports `parallel`.
"""
