"""Is a scheduled model the plain one? Outputs, gradients, a step, replicas, dropout, files."""
