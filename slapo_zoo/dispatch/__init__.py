"""Kernel dispatch: the kernel registry, matrix products on a CPU, and measured tables that choose a kernel.

Imports `parallel`; `slapo_zoo.kernels` imports it.
"""
