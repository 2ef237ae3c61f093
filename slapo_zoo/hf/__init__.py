"""Everything taken from `transformers`: attention interface, classes and configs, example inputs, models that it lacks.

Of slapo_zoo it imports `errors` and `parallel` only.
"""
