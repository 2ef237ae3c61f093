"""The commands of `slapo-zoo`, one file each; heavy packages are imported inside the functions."""
