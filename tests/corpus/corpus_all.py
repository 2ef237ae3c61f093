"""All bugs of the corpus."""

import loop_bugs
import schedule_bugs

BUGS = [*schedule_bugs.BUGS, *loop_bugs.BUGS]
