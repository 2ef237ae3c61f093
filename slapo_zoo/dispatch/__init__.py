"""Kernel dispatch: the registry of kernels, and tables of measured times by which a kernel or torch's operations run.

This package imports `parallel`, and `slapo_zoo.kernels` imports this package.
"""
