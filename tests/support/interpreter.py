"""Worker process in which Triton kernels run on the CPU, by Triton's own interpreter.

Triton reads TRITON_INTERPRET when it is first imported, and transformers imports it: the process is a
new one, not a fork of the rank pool's server.

The interpreter truncates fp32 to bf16 and multiplies raw bits in `tl.dot` of bf16: fp32 and fp16 only.
"""

import multiprocessing
import os

from ranks import RankPool

VARIABLE = "TRITON_INTERPRET"


class Interpreter:
    """Worker process: `interpreter.run(fn, *args)` calls a module-level function in it."""

    def __init__(self):
        self.pool = RankPool()
        self.pool._context = multiprocessing.get_context("spawn")

    def run(self, fn, *args):
        os.environ[VARIABLE] = "1"  # a failed job costs the worker, so any job may start a new one
        try:
            return self.pool.run(fn, 1, *args)[0]
        finally:
            del os.environ[VARIABLE]

    def close(self):
        self.pool.close()
