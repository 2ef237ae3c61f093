"""Which (tp, pp, dp, micro-batch, recomputation) fits a cluster and is fastest, by simulation."""
