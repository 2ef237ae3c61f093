"""Schedule cards: a schedule as data in a folder or a repository of the Hub, replayed safely.

Imports the package `zoo` and packages of lower floors (see CONTRIBUTING.md).
"""

from slapo_zoo.zoo.cards.program import Program as Program
