"""Graphs (torch.fx) of modules: tracing a forward, matching patterns, and rewriting nodes."""
