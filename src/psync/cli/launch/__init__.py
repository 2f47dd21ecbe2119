"""``psync launch``: what a scheduler needs to run a script as the tasks of a cluster.

It prints, and starts nothing: manifests for Kubernetes, a batch script for SLURM. Knows the names
of variables and of resolvers, and no scheduler's API. Begin with ``commands``.
"""
