"""Package of the schedule language: Schedule (a model with the changes made to it), Directive (one change), primitives
(kinds of change), `explain` (lists their collectives), and torch.fx graphs. CONTRIBUTING.md lists what this package imports.
"""
