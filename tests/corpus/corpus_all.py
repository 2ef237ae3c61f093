"""All bugs of the corpus."""

import loop_bugs
import schedule_bugs
import step_bugs

BUGS = [*schedule_bugs.BUGS, *step_bugs.BUGS, *loop_bugs.BUGS]
