"""Search for the fastest values of a schedule's knobs: spaces, a database, strategies, trials."""
