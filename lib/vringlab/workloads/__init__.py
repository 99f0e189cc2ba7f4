"""The documented workloads, one file each."""
