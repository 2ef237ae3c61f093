"""Kernel dispatch: the kernel registry, matrix products on a CPU, and measured tables that choose a kernel.

This package imports `parallel`, and `slapo_zoo.kernels` imports this package.
"""
