"""Schedule cards: published schedules, as data in a folder or Hub repository, applied without their author's code.

Imports the package `zoo` and packages of lower floors (see CONTRIBUTING.md).
"""

from slapo_zoo.zoo.cards.program import Program as Program
