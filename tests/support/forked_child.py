"""Program of `slapo_zoo.verify.child` in a process that is forked from the server with the imports, for tests of what it finds.

tests/verify/test_cards.py and tests/zoo/test_auto.py start the program as a user's load does.
"""

import io
import json
import sys
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from unittest.mock import patch

from ranks import forkserver
from slapo_zoo.parallel.ranks.apart import Ended
from slapo_zoo.verify import child


class ForkedChild:
    """Running program; it has the methods of slapo_zoo.parallel.ranks.apart.ProcessApart."""

    def __init__(self, module, request):
        assert module == child.__name__
        self.begin, self.out = time.monotonic(), None
        self.process, context = self, forkserver()
        self._pipe, theirs = context.Pipe()
        self._forked = context.Process(target=_answer, args=(theirs, json.dumps(request)))
        self._forked.start()
        theirs.close()

    def poll(self, timeout_s=0.0):
        """Return status and output if the process has ended, or None; it is never killed for its time."""
        return self.wait(timeout_s) if self.out is not None or self._pipe.poll() else None

    def wait(self, timeout_s):
        """Wait until the process ends; return its status and output."""
        if self.out is None and self._pipe.poll(timeout_s):
            with suppress(EOFError):
                self.out = self._pipe.recv()
        return self.end()

    def end(self):
        """Kill the process, if it still runs; return its status and output."""
        self._forked.join(None if self.out else 0)
        self._forked.kill()
        self._forked.join()
        out, err = self.out or ("", "")
        return Ended(self._forked.exitcode, out, err, time.monotonic() - self.begin)


def _answer(pipe, text):
    out, err = io.StringIO(), io.StringIO()
    with patch.object(sys, "stdin", io.StringIO(text)), redirect_stdout(out), redirect_stderr(err):
        child.main()
    pipe.send((out.getvalue(), err.getvalue()))
