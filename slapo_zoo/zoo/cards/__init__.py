"""Schedule cards: published schedules, as data in a folder or Hub repository, applied without their author's code.

A schedule is a list of directives: changes of modules (shard, sync, ...) that make a model run in parallel.
"""

from slapo_zoo.zoo.cards.program import Program as Program
