"""After any backward each rank's `.grad` is its part of the true gradient: sums, hooks, guards.

Imports `language` and lower.
"""
