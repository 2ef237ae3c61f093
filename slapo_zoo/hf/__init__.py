"""Everything taken from `transformers`: the attention seam, classes and configs, tiny inputs, own models.

Imports `parallel`.
"""
