"""Search for the fastest values of a schedule's knobs, and the planner, the one model of cost.

Imports `model` and lower.
"""
