"""Package of the schedule language: Schedule (a model with the changes made to it), Directive (one change), primitives
(kinds of change), explain, and graphs of modules. CONTRIBUTING.md lists below `language` all packages that it imports.
"""
