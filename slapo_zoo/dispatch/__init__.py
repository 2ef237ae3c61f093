"""Kernel dispatch: the registry of kernels, and tables of measured times that decide if a kernel or torch's code runs.

This package imports `parallel`, and `slapo_zoo.kernels` imports this package.
"""
