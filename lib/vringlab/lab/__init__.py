"""Machines: the embedded host, the guest, and what is changed in them."""
