"""Schedule cards: a schedule as data in a folder or a repository of the Hub, replayed safely.

Imports `zoo` and lower.
"""

from slapo_zoo.cards.program import Program as Program
